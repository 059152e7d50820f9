"""Exploring finds bugs that hang on the order, reduces their schedules, and repeats them; right programs pass."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiodist import CollectiveMismatchError, get_replica_context
from aiodist.checking.explore import Exploration, explore, replay
from aiodist.checking.runs import coroutine_program
from aiodist.checking.schedule import Schedule
from tests.checking.programs import Main, mirrored
from tests.project.paths import ROOT, environment


def exploration(main: Main, schedules: int = 100, seed: int = 0) -> Exploration:
    return explore(coroutine_program(main), schedules=schedules, seed=seed, seconds=20)


# Programs with a bug that shows in some orders only.


async def first_come() -> None:
    """Whoever comes first does the work that all should do: in plain order replica 0, which all expect."""
    done: list[int] = []

    async def replica() -> None:
        ctx = get_replica_context()
        for _ in range(5):
            await ctx.barrier()
        done.append(ctx.replica_id_in_sync_group)
        if done[0] == ctx.replica_id_in_sync_group != 0:
            await ctx.all_reduce("SUM", 1.0)
        await ctx.barrier()

    await mirrored(4).run(replica)


async def racing_children() -> None:
    """Two child tasks of each replica issue a collective each, in whatever order they are started."""

    async def replica() -> None:
        ctx = get_replica_context()
        await ctx.barrier()
        async with asyncio.TaskGroup() as tasks:
            for op in ("SUM", "MAX"):
                tasks.create_task(_reduce(ctx, op))

    await mirrored(3).run(replica)


async def _reduce(ctx: Any, op: str) -> None:
    await ctx.all_reduce(op, np.ones(2))


async def late_flag() -> None:
    """Replica 1 reads a flag that replica 0 sets; in plain order it is set by then."""
    flag: list[bool] = []

    async def replica() -> None:
        ctx = get_replica_context()
        for step in range(20):
            await ctx.barrier()
            if step == 10 and ctx.replica_id_in_sync_group == 0:
                flag.append(True)
            if step == 10 and ctx.replica_id_in_sync_group == 1 and not flag:
                raise LookupError("no flag")

    await mirrored(2).run(replica)


WRONG = [
    (first_come, CollectiveMismatchError),
    (racing_children, CollectiveMismatchError),
    (late_flag, LookupError),
]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("main", "error"), WRONG)
def test_bug_that_hangs_on_the_order_is_found_reduced_and_repeated(
    main: Main, error: type[Exception], seed: int
) -> None:
    found = exploration(main, seed=seed)
    assert found.plain is not None
    assert found.plain.error is None
    assert found.failure is not None
    assert isinstance(found.failure.error, error)
    schedule = found.failure.schedule
    assert len(schedule.changes) == 1
    assert len(found.story) == 1
    assert "replica" in found.story[0]

    again = replay(coroutine_program(main), Schedule.parse(str(schedule)), seconds=20)
    assert again.failure is not None
    assert str(again.failure.error) == str(found.failure.error)
    assert again.story == found.story


def test_exploration_is_a_function_of_its_seed() -> None:
    def summary(seed: int) -> tuple[int, str]:
        found = exploration(racing_children, seed=seed)
        assert found.failure is not None
        return found.schedules, str(found.failure.schedule)

    assert summary(1) == summary(1)


def test_schedule_does_not_depend_on_the_process() -> None:
    """Neither on the seed of hashes nor on where objects lie in memory."""
    program = (
        "from tests.checking.test_explore import *\n"
        "for main, _ in WRONG: found = exploration(main, seed=3); print(found.schedules, found.failure.schedule)"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environment() | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


# Right programs.


async def overlapping() -> None:
    async def replica() -> list[float]:
        ctx = get_replica_context()
        pending = [ctx.all_reduce("SUM", np.ones(2) * i) for i in range(4)]
        await asyncio.sleep(0.1 * ctx.replica_id_in_sync_group)
        return [float((await one)[0]) for one in pending]

    strategy = mirrored(3)
    results = await asyncio.gather(strategy.run(replica), strategy.run(replica))
    assert [strategy.experimental_local_results(r)[2] for r in results] == [[0.0, 3.0, 6.0, 9.0]] * 2


async def merging() -> None:
    async def sum_up(strategy: Any, values: Any) -> Any:
        await asyncio.sleep(0)
        return await strategy.reduce("SUM", values, axis=None)

    async def replica() -> Any:
        ctx = get_replica_context()
        async with asyncio.timeout(5):
            await ctx.barrier()
        return await ctx.merge_call(sum_up, args=(np.float64(ctx.replica_id_in_sync_group),))

    strategy = mirrored(4)
    assert strategy.experimental_local_results(await strategy.run(replica))[0] == 6.0


async def through_queues() -> None:
    """Each replica hands a value to the next by a queue, between collectives."""
    queues: list[asyncio.Queue[int]] = [asyncio.Queue(1) for _ in range(3)]

    async def replica() -> int:
        ctx = get_replica_context()
        me, total = ctx.replica_id_in_sync_group, 0
        for step in range(5):
            await queues[(me + 1) % 3].put(step)
            total += await queues[me].get()
            total = int(await ctx.all_reduce("MAX", total))
        return total

    strategy = mirrored(3)
    assert await strategy.run(replica) == 10


async def locked() -> None:
    lock = asyncio.Lock()
    inside = 0

    async def replica() -> None:
        nonlocal inside
        ctx = get_replica_context()
        for _ in range(4):
            async with lock:
                inside += 1
                await asyncio.sleep(0)
                assert inside == 1
                inside -= 1
            await ctx.barrier()

    await mirrored(4).run(replica)


@pytest.mark.parametrize("main", [overlapping, merging, through_queues, locked])
def test_right_program_passes_under_every_schedule(main: Main) -> None:
    found = exploration(main, schedules=150)
    assert found.failure is None, found.failure.error
    assert found.schedules == 150


def test_program_without_a_choice_has_one_schedule() -> None:
    async def main() -> None:
        await asyncio.sleep(1)

    assert exploration(main).schedules == 1


def test_failure_in_plain_order_needs_no_change() -> None:
    async def main() -> None:
        raise ValueError("always")

    found = exploration(main)
    assert found.schedules == 1
    assert found.failure is not None
    assert str(found.failure.schedule) == "0/"


def test_each_schedule_is_announced() -> None:
    seen: list[int] = []
    before: Callable[[int], None] = seen.append
    explore(coroutine_program(locked), schedules=4, seed=0, seconds=20, before=before)
    assert seen == [0, 1, 2, 3]
