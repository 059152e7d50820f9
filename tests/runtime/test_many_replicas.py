"""Ten thousand replicas in one process."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from anyio import sleep_forever

from aiodist import CollectiveError
from aiodist._core import analysis
from tests.runtime.programs import here, mirrored, replica


@pytest.mark.asyncio
async def test_ten_thousand_replicas_meet() -> None:
    count = 10_000
    order = []

    async def program() -> int:
        await here().barrier()
        order.append(replica())
        total = await here().all_reduce("SUM", np.full(1, replica()))
        return int(total[0]) if replica() % 5000 == 0 else 0

    result = await mirrored(count).run(program)
    assert order == list(range(count))
    assert sum(result.values) == 2 * (count * (count - 1) // 2)


@pytest.mark.asyncio
async def test_replicas_that_meet_again_and_again_leave_the_garbage_collector_alone() -> None:
    collections: list[object] = []

    def note(phase: str, info: object) -> None:
        if phase == "start":
            collections.append(info)

    async def program() -> None:
        value = np.ones(1)
        for _ in range(2):
            await here().barrier()
        if replica() == 0:
            gc.collect()
            gc.callbacks.append(note)
        for _ in range(5):
            await here().all_reduce("SUM", value)
        if replica() == 0:
            gc.callbacks.remove(note)

    await mirrored(3_000).run(program)
    assert len(collections) <= 5  # it was 25 when all were woken at a time


@pytest.mark.anyio
async def test_the_first_of_many_that_raises_ends_the_others_before_they_are_woken() -> None:
    went_on = []

    async def program() -> None:
        await here().barrier()
        went_on.append(replica())
        if replica() == 0:
            raise KeyError("first")
        await sleep_forever()

    with pytest.raises(KeyError, match="first"):
        await mirrored(600).run(program)
    assert went_on == list(range(len(went_on)))


@pytest.mark.anyio
async def test_what_a_failure_of_one_of_many_leaves_behind_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    async def program() -> None:
        await here().barrier()
        if replica() == 0:
            raise KeyError("first")
        with pytest.raises(CollectiveError):
            await here().barrier()

    analyse = analysis.analyse

    def counted(*args: Any, **more: Any) -> Any:
        looks.append(args)
        return analyse(*args, **more)

    monkeypatch.setattr(analysis, "analyse", counted)
    with pytest.raises(KeyError, match="first"):
        await mirrored(200).run(program)
    assert len(looks) <= 1
