"""An operation outside of replicas that a worker has left before others came fails on those, too, in its place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodist import (
    CollectiveTimeoutError,
    IncompleteCollectiveError,
    MultiWorkerMirroredStrategy,
    ReplicaContextError,
    get_replica_context,
)
from aiodist._arrays.options import OrderCheck
from aiodist.replica.awaiting import Bell
from aiodist.replica.root_crossing import RootCrossing
from aiodist.workers.simulated import SimulatedCommunicator, SimulatedRequest
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


Refused = Callable[[MultiWorkerMirroredStrategy, bool], Any]


BAD: Any = 7


def replica_function(value: int) -> int:
    return value


REFUSED: dict[str, Refused] = {
    "reduce": lambda s, bad: s.reduce("SUM", "text" if bad else 1, None),
    "op of reduce": lambda s, bad: s.reduce("AVERAGE" if bad else "SUM", 1, None),
    "gather": lambda s, bad: s.gather(np.ones(2), 5 if bad else 0),
    "run": lambda s, bad: s.run(replica_function, BAD if bad else (1,)),
    "options of run": lambda s, bad: s.run(replica_function, (1,), None, BAD if bad else None),
    "reduce_to": lambda s, bad: s.extended.reduce_to("SUM", 1, BAD if bad else "CPU:0"),
    "batch_reduce_to": lambda s, bad: s.extended.batch_reduce_to("SUM", [(1, "CPU:0"), BAD] if bad else []),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
async def test_call_that_raises_for_its_arguments_on_one_worker_fails_on_the_others(call: Refused) -> None:
    job = Job(1, 1, 1)

    async def worker(strategy: MultiWorkerMirroredStrategy) -> list[Any]:
        found: list[Any] = [await reduce(strategy, 1)]
        for step in range(3):  # from one line, so that nothing but the refusal tells the steps apart
            try:
                await call(strategy, strategy is job.strategies[1] and step == 1)
                found.append(None)
            except (TypeError, ValueError, IncompleteCollectiveError) as error:
                found.append(error)
        return [*found, await reduce(strategy, 2)]

    outcomes = await job.everywhere(worker)
    for rank, found in enumerate(outcomes):
        assert [found[0], found[1], found[3], found[4]] == [3, None, None, 6], found
        if rank == 1:
            assert isinstance(found[2], (TypeError, ValueError))
        else:
            assert isinstance(found[2], IncompleteCollectiveError)
            assert found[2].report.suspects == (1,)
            raised = f"for the call raised there: {type(outcomes[1][2]).__name__}: {outcomes[1][2]}"
            assert str(found[2]).startswith(f"replica 1 did not come to collective #2, {raised}\n")


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
async def test_others_hear_of_such_a_call_also_where_nothing_else_is_called_there(call: Refused) -> None:
    job = Job(1, 1)
    heard = anyio.Event()

    async def worker(strategy: MultiWorkerMirroredStrategy) -> Any:
        if strategy is job.strategies[1]:
            with pytest.raises((TypeError, ValueError)):
                await call(strategy, True)
            await heard.wait()
            return None
        with pytest.raises(IncompleteCollectiveError, match="for the call raised there"):
            await call(strategy, False)
        heard.set()
        return None

    assert await job.everywhere(worker) == [None, None]
    await job.check_that_it_works()


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
async def test_calls_that_raise_on_all_workers_disturb_nobody(call: Refused) -> None:
    async def worker(strategy: MultiWorkerMirroredStrategy) -> list[Any]:
        found: list[Any] = []
        for step in range(4):
            try:
                await call(strategy, step != 2)
                found.append(None)
            except (TypeError, ValueError) as error:
                found.append(type(error))
        return [*found, await reduce(strategy, 2)]

    for found in await Job(1, 1, 1).everywhere(worker):
        assert found[0] is found[1] is found[3] is not None
        assert found[2] is None
        assert found[4] == 6


async def test_call_in_the_wrong_place_is_none_of_the_workers_operations() -> None:
    async def worker(strategy: MultiWorkerMirroredStrategy) -> Any:
        async def replica() -> None:
            if get_replica_context().replica_id_in_sync_group == 1:
                with pytest.raises(ReplicaContextError):
                    await strategy.reduce("SUM", "text", None)

        await strategy.run(replica)
        return await reduce(strategy, 2)

    assert await Job(1, 1).everywhere(worker) == [4, 4]


class LateRequest:
    """A record's exchange that is asked for its end after a nap, as MPI's are."""

    by_itself = True

    def __init__(self, request: SimulatedRequest, told: anyio.Event) -> None:
        self._request = request
        self._told = told

    def test(self) -> bool:
        return self._told.is_set() and self._request.test()


@pytest.mark.parametrize("first", [reduce, run])
async def test_disagreement_that_a_worker_sees_only_after_the_verdict_is_told_there_too(
    first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(1, 1)
    await job.check_that_it_works()
    told = anyio.Event()
    judge, gather = RootCrossing.judge, SimulatedCommunicator.iallgather

    def noted(crossing: RootCrossing, verdict: Any) -> None:
        judge(crossing, verdict)
        if crossing.span.layout.rank == 0:
            told.set()

    def late(communicator: SimulatedCommunicator, *buffers: Any) -> Any:
        request: Any = gather(communicator, *buffers)
        return LateRequest(request, told) if communicator.rank == 0 else request

    async def nap(bell: Bell, elapsed: float, *, by_itself: bool = False) -> None:
        await told.wait()

    async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
        if strategy is job.strategies[0]:
            return await first(strategy, 1)
        return await strategy.gather(np.full(3, 1), 0)

    monkeypatch.setattr(RootCrossing, "judge", noted)
    monkeypatch.setattr(SimulatedCommunicator, "iallgather", late)
    monkeypatch.setattr(Bell, "nap", nap)
    outcomes = await job.everywhere(one)
    monkeypatch.undo()
    assert [type(outcome).__name__ for outcome in outcomes] == ["CollectiveMismatchError"] * 2
    await job.check_that_it_works()


async def _until_it_meets(operation: Any, strategy: MultiWorkerMirroredStrategy) -> tuple[int, int]:
    """Return what an operation gives, and how often it has failed before."""
    for failures in range(9):
        with suppress(CollectiveTimeoutError, IncompleteCollectiveError):
            return await operation(strategy, 5), failures
    raise AssertionError("it never meets the others")


@pytest.mark.parametrize("operation", [reduce, run])
async def test_steps_that_a_late_worker_still_agrees_to_are_carried_out_in_their_order(
    operation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(1, 1, 1)
    job.limit(0.02)
    board: Any = job.cluster.switchboard(job.strategies[0]._team.span.layout, OrderCheck.CALL_SITE)
    others, late = job.strategies[:2], anyio.Event()
    ask = type(board)._ask

    def ask_the_others(board: Any, rank: int, *question: Any) -> None:
        if rank != 2 or late.is_set():
            ask(board, rank, *question)

    async def judge_without_the_last() -> None:  # as the control plane does where a worker says nothing
        while not late.is_set():
            await anyio.lowlevel.checkpoint()
            for key in board._coordinator.pending:
                if len(board._coordinator._cases[key].states) == len(others):
                    board._coordinator.conclude(key)

    async def worker(strategy: MultiWorkerMirroredStrategy) -> Any:
        if strategy in others:
            for step in range(3):
                with pytest.raises(CollectiveTimeoutError):
                    await operation(strategy, step)
            job.limit(None)
            late.set()
        await late.wait()
        return await _until_it_meets(operation, strategy)

    monkeypatch.setattr(type(board), "_ask", ask_the_others)
    assert [strategy.num_replicas_in_sync for strategy in job.strategies] == [3] * 3  # all have met
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(judge_without_the_last)
        assert {value for value, _ in await job.everywhere(worker)} == {15}
