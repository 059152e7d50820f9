"""Large values are reduced and gathered across replicas in a worker thread."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiodist import PerReplica
from aiodist._strategy import operands
from aiodist_kernels import policy
from tests.runtime.programs import mirrored

pytestmark = pytest.mark.anyio


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the thread that each reduction or gathering is done in."""
    seen: list[int] = []

    def spy(plain: Any, *args: Any) -> Any:
        seen.append(threading.get_ident())
        return plain(*args)

    monkeypatch.setattr(operands, "given", partial(spy, operands.given))
    return seen


@pytest.mark.parametrize("nest", [False, True])
async def test_large_values_leave_the_loop(threads: list[int], monkeypatch: pytest.MonkeyPatch, nest: bool) -> None:
    strategy = mirrored(2)
    value: Any = PerReplica([np.arange(6.0), np.arange(6.0) / 3])
    value = {"a": [value]} if nest else value

    async def each() -> list[Any]:
        return [
            await strategy.reduce("SUM", value, None),
            await strategy.gather(value, 0),
            await strategy.extended.reduce_to("MEAN", value, "CPU:0"),
        ]

    on_loop = await each()
    assert set(threads) == {threading.get_ident()}
    threads.clear()
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 8)
    assert repr(await each()) == repr(on_loop)
    assert len(threads) == 3
    assert threading.get_ident() not in threads
