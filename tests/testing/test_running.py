"""`run_replicas` and `explore`: results, errors with the way to see them again, and what they refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiodist import (
    DeadlockError,
    MirroredStrategy,
    PerReplica,
    get_replica_context,
)
from aiodist.testing import Explored, explore, run_replicas


async def doubled(value: Any, *, plus: int = 0) -> Any:
    ctx = get_replica_context()
    await ctx.barrier()
    await asyncio.sleep(1e6)  # no test waits for that: time is virtual
    return value * 2 + plus + ctx.replica_id_in_sync_group


def test_results_come_one_a_replica_time_is_virtual_and_arguments_are_those_of_run() -> None:
    assert run_replicas(doubled, 3, args=(5,)) == (10, 11, 12)
    assert run_replicas(doubled, 2, (PerReplica((1, 2)),), {"plus": 10}) == (12, 15)
    assert run_replicas(doubled, MirroredStrategy(["CPU:4", "CPU:7"]), args=(1,)) == (2, 3)
    assert run_replicas(doubled, 1, args=(1,)) == (2,)


def test_exploration_tells_how_many_schedules_there_were() -> None:
    assert explore(doubled, 2, schedules=7, args=(1,)) == Explored(7, (2, 3))
    assert explore(doubled, 1, schedules=7, args=(1,)).schedules == 1


@pytest.mark.parametrize("run", [run_replicas, explore])
def test_deadlock_is_an_error_at_once_and_a_call_in_a_coroutine_is_refused(run: Any) -> None:
    with pytest.raises(DeadlockError, match="nothing can run any more"):
        run(asyncio.Event().wait, 2)

    async def main() -> None:
        run(doubled, 2, args=(1,))

    with pytest.raises(RuntimeError, match="call it from a plain function"):
        asyncio.run(main())


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="schedules must be at least 1"):
        explore(doubled, 2, schedules=0)
    with pytest.raises(ValueError, match="must be a number of replicas, at least 1"):
        run_replicas(doubled, 0)
    with pytest.raises(ValueError, match="expected a schedule such as"):
        run_replicas(doubled, 2, replay="17")
