"""`aiodist.testing`: running, exploring, recording and comparing collectives, and bad arguments."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodist import DeadlockError, MirroredStrategy, PerReplica, ReduceOp, get_replica_context
from aiodist.testing import Explored, assert_same_collectives, explore, record_collectives, run_replicas


async def doubled(value: Any, *, plus: int = 0) -> Any:
    ctx = get_replica_context()
    await ctx.barrier()
    await asyncio.sleep(1e6)  # virtual time
    return value * 2 + plus + ctx.replica_id_in_sync_group


def test_results_are_per_replica_time_is_virtual_and_arguments_are_those_of_run() -> None:
    assert run_replicas(doubled, 3, args=(5,)) == (10, 11, 12)
    assert run_replicas(doubled, 2, (PerReplica((1, 2)),), {"plus": 10}) == (12, 15)
    assert run_replicas(doubled, MirroredStrategy(["CPU:4", "CPU:7"]), args=(1,)) == (2, 3)
    assert run_replicas(doubled, 1, args=(1,)) == (2,)


def test_exploration_returns_the_number_of_schedules() -> None:
    assert explore(doubled, 2, schedules=7, args=(1,)) == Explored(7, (2, 3))
    assert explore(doubled, 1, schedules=7, args=(1,)).schedules == 1


@pytest.mark.parametrize("run", [run_replicas, explore])
def test_deadlock_and_a_call_in_a_coroutine_are_errors(run: Any) -> None:
    with pytest.raises(DeadlockError, match="nothing can run any more"):
        run(asyncio.Event().wait, 2)

    async def main() -> None:
        run(doubled, 2, args=(1,))

    with pytest.raises(RuntimeError, match=r"call it from a plain function.*asyncio\.to_thread"):
        asyncio.run(main())


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="schedules must be at least 1"):
        explore(doubled, 2, schedules=0)
    with pytest.raises(ValueError, match="must be a number of replicas, at least 1"):
        run_replicas(doubled, 0)
    with pytest.raises(ValueError, match="expected a schedule such as"):
        run_replicas(doubled, 2, replay="17")


# Recordings of collectives.

CALLS = ["all_reduce(SUM, float32[2])", "barrier()", "all_gather(float64[*], axis=0)"]


async def program(*, meets: bool = True) -> None:
    ctx = get_replica_context()
    await ctx.all_reduce(ReduceOp.SUM, np.ones(2, np.float32))
    if meets:
        await ctx.barrier()
    await ctx.all_gather(np.ones(ctx.replica_id_in_sync_group + 1), 0)


other_program = partial(program, meets=False)


def test_collectives_are_recorded_with_their_call_sites_on_any_event_loop() -> None:
    with record_collectives() as record:
        run_replicas(program, 3)
    assert record.calls == CALLS
    assert [r.sequence_number for r in record] == [0, 1, 2]
    assert record[0].location.function == "program"
    for backend in ("asyncio", "trio"):
        with record_collectives() as record:
            anyio.run(MirroredStrategy(["CPU:0", "CPU:1"]).run, program, backend=backend)
        assert record.calls == CALLS


def test_only_runs_that_begin_in_the_block_are_recorded() -> None:
    async def main() -> list[str]:
        strategy, calls = MirroredStrategy(["CPU:0", "CPU:1"]), list[str]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(strategy.run, program)
            await anyio.lowlevel.checkpoint()
            with record_collectives() as record:
                await strategy.run(other_program)
                calls.extend(record.calls)
        return calls

    assert anyio.run(main) == [CALLS[0], CALLS[2]]


def test_equal_collectives_of_different_numbers_of_replicas_compare_equal() -> None:
    with record_collectives() as one:
        run_replicas(program, 2)
    with record_collectives() as two:
        run_replicas(program, 5)
    for left, right in ((one, two), (one, CALLS), (list(one), iter(two.calls)), ([], [])):
        assert_same_collectives(left, right)


def test_difference_is_shown_as_a_diff() -> None:
    with record_collectives() as record:
        run_replicas(other_program, 2)
    with pytest.raises(AssertionError) as caught:
        assert_same_collectives(record, CALLS)
    assert str(caught.value).splitlines() == [
        "the collectives differ: 2 calls, expected 3",
        "--- expected",
        "+++ actual",
        "@@ -1,3 +1,2 @@",
        f" {CALLS[0]}",
        f"-{CALLS[1]}",
        f" {CALLS[2]}",
    ]
