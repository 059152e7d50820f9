"""Large results lie in memory that is used again, but never while anybody can see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist_kernels import policy
from tests.runtime.programs import here, mirrored, replica

SIZE = 1 << 16


pytestmark = pytest.mark.usefixtures("made")

KEEP: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda array: None,
    "array": lambda array: array,
    "slice": lambda array: array[5:9],
    "view": lambda array: array.reshape(2, -1).T[::2],
    "memoryview": lambda array: memoryview(array)[3:],
}


class Step(NamedTuple):
    """One run: what is kept of its result, how it ends, whether worker threads reduce, and whether it is a nest."""

    keep: str
    ending: str
    off_loop: bool
    nest: bool


steps = st.builds(
    Step, st.sampled_from(list(KEEP)), st.sampled_from(["return", "raise", "cancel"]), st.booleans(), st.booleans()
)


@given(program=st.lists(steps, min_size=2, max_size=12))
def test_what_is_kept_stays_as_it_is(program: list[Step]) -> None:
    kept: list[tuple[Any, bytes]] = []

    async def one(number: int, step: Step, scope: anyio.CancelScope) -> None:
        mine: Any = np.full(SIZE, number * 10 + replica(), np.float32)
        result = await here().all_reduce("SUM", {"w": mine, "b": mine[:7]} if step.nest else mine)
        array: Any = result["w"] if step.nest else result
        assert (array == number * 20 + 1).all()
        held = KEEP[step.keep](array)
        if held is not None:
            kept.append((held, bytes(np.ascontiguousarray(held))))
        if step.ending == "raise":
            raise LookupError
        if step.ending == "cancel" and replica() == 0:
            scope.cancel()
        await here().barrier()

    async def main() -> None:
        strategy = mirrored(2)
        for number, step in enumerate(program):
            with pytest.MonkeyPatch.context() as patch, suppress(LookupError), anyio.CancelScope() as scope:
                patch.setattr(policy, "BLOCKING_FROM_MOVED", 1 if step.off_loop else 1 << 40)
                await strategy.run(one, (number, step, scope))
            for held, wanted in kept:
                assert bytes(np.ascontiguousarray(held)) == wanted
            del kept[::3]

    asyncio.run(main())
