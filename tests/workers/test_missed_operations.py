"""An operation outside of replicas that a worker has left before others came fails on those, too, in its place."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aiodist import (
    CollectiveTimeoutError,
    IncompleteCollectiveError,
    MultiWorkerMirroredStrategy,
    get_replica_context,
)
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio


async def reduce(strategy: MultiWorkerMirroredStrategy, step: int) -> int:
    return int(await strategy.reduce("SUM", step, None))


async def run(strategy: MultiWorkerMirroredStrategy, step: int) -> int:
    async def replica(step: int) -> int:
        return int(await get_replica_context().all_reduce("SUM", step))

    return int(await strategy.run(replica, (step,)))


async def steps_of_two(operation: Any, seconds: float, limit: float | None = None) -> list[list[Any]]:
    """Return what each worker's steps give; the first one leaves two so soon, and the other comes when it has.

    From the first of these on steps have a limit.
    """
    job = Job(1, 1)
    left = anyio.Event()

    async def worker(strategy: MultiWorkerMirroredStrategy) -> list[Any]:
        found: list[Any] = []
        for step in range(5):
            if step == 1:
                job.limit(limit)
            if strategy is job.strategies[1] and step == 1:
                await left.wait()
            leaves = strategy is job.strategies[0] and step in (1, 2)
            try:
                with anyio.move_on_after(seconds if leaves else 20) as scope:
                    found.append(await operation(strategy, step))
                if scope.cancelled_caught:
                    found.append("cancelled")
            except (CollectiveTimeoutError, IncompleteCollectiveError) as error:
                found.append(type(error))
            if leaves and (step == 2 or found[-1] is CollectiveTimeoutError):
                left.set()
        return found

    outcomes: list[list[Any]] = await job.everywhere(worker)
    return outcomes


@pytest.mark.parametrize("seconds", [0.0, 0.01], ids=["before its turn", "in the midst"])
@pytest.mark.parametrize("operation", [reduce, run])
async def test_steps_that_were_cancelled_do_not_shift_those_of_others(operation: Any, seconds: float) -> None:
    one, other = await steps_of_two(operation, seconds)
    assert one == [0, "cancelled", "cancelled", 6, 8]
    assert other == [0, IncompleteCollectiveError, IncompleteCollectiveError, 6, 8]


@pytest.mark.parametrize("operation", [reduce, run])
async def test_a_step_that_timed_out_fails_on_who_comes_late(operation: Any) -> None:
    one, other = await steps_of_two(operation, 20, limit=0.2)
    assert one[:2] == other[:2] == [0, CollectiveTimeoutError]
    pairs = [(a, b) for a, b in zip(one[2:], other[2:], strict=True) if a is not CollectiveTimeoutError]
    assert pairs
    assert all(a == b for a, b in pairs)


async def test_strategy_that_was_never_used_is_named_and_meets_the_others_later() -> None:
    job = Job(1, 1, 1, timeout_seconds=0.1)

    async def twice(strategy: MultiWorkerMirroredStrategy) -> list[Any]:
        found = []
        for step in range(2):
            with pytest.raises(CollectiveTimeoutError) as caught:
                await reduce(strategy, step)
            found.append(str(caught.value))
        return found

    async def later(strategy: MultiWorkerMirroredStrategy) -> Any:
        with anyio.fail_after(10):
            if strategy is job.strategies[2]:
                for step in range(2):
                    with pytest.raises(CollectiveTimeoutError):
                        await reduce(strategy, step)
            return await reduce(strategy, 3)

    async def only_the_first_two(strategy: MultiWorkerMirroredStrategy) -> Any:
        return None if strategy is job.strategies[2] else await twice(strategy)

    one, other, _ = await job.everywhere(only_the_first_two)
    assert one == other
    for text in one:
        assert "replica 2 has not arrived" in text
        assert "Worker 2: its strategy has not been used yet" in text
    job.limit(None)  # so that a slow machine does not fail the rest
    assert await job.everywhere(later) == [9, 9, 9]
