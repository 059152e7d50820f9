"""Callers that are cancelled at any suspension of an operation: all workers end, and their errors name the caller."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import numpy as np
import pytest

from aiodist import CollectiveError, MultiWorkerMirroredStrategy, ReplicaContext, Variable
from tests.runtime.programs import run, turns
from tests.workers.simulated import Job, on_trio_too

Operation = Callable[[MultiWorkerMirroredStrategy], Coroutine[Any, Any, Any]]
pytestmark = [pytest.mark.anyio, on_trio_too]


class Caller:
    """A caller that is interrupted at one of its suspensions.

    Args:
        at: the number of that suspension, from 0.
        how: ``scope``, by a cancel scope around it; ``task``, as by `asyncio.timeout` or Ctrl-C, against which no
            shield helps.

    Attributes:
        interrupted: whether it has come to that suspension.
    """

    def __init__(self, at: int, how: str) -> None:
        self._at = at
        self._how = how
        self._suspensions = 0
        self.interrupted = False

    async def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the coroutine's result, None if it was cancelled."""
        with anyio.CancelScope() as scope:
            if self._how == "scope":
                return await self._driven(coroutine, scope.cancel)
            task = asyncio.current_task()
            assert task is not None
            try:
                return await self._driven(coroutine, task.cancel)
            except asyncio.CancelledError:
                task.uncancel()
        return None

    @types.coroutine
    def _driven(self, coroutine: Coroutine[Any, Any, Any], interrupt: Callable[[], object]) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                trap = coroutine.send(value) if error is None else coroutine.throw(error)
            except StopIteration as end:
                return end.value
            if self._suspensions == self._at:
                self.interrupted = True
                interrupt()
            self._suspensions += 1
            error = None
            try:
                value = yield trap
            except BaseException as thrown:  # noqa: BLE001  (the coroutine's)
                error = thrown


async def two_sums(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("SUM", ctx.replica_id_in_sync_group)
    await ctx.all_reduce("SUM", 1)


async def group_of_two(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group < 2:
        await ctx.new_group([0, 1]).all_reduce("SUM", 1)
    await ctx.all_reduce("SUM", 1)


async def uneven_loops_with_a_join(ctx: ReplicaContext) -> None:
    for _ in range(ctx.replica_id_in_sync_group):
        await ctx.all_reduce("SUM", 1)
    await ctx.join()


async def reduce_much(strategy: MultiWorkerMirroredStrategy) -> Any:
    return await strategy.reduce("SUM", np.ones(200_000), None)


_variables: WeakKeyDictionary[MultiWorkerMirroredStrategy, Variable] = WeakKeyDictionary()


async def make_variable(strategy: MultiWorkerMirroredStrategy) -> None:
    with strategy.scope():
        _variables[strategy] = Variable(np.zeros(3), aggregation="mean")
    await strategy.reduce("SUM", 1, None)  # which transfers its initial value


async def assign(strategy: MultiWorkerMirroredStrategy) -> Any:
    return await strategy.run(lambda: _variables[strategy].assign_add(np.ones(3)))


RUNS: dict[str, Operation] = {
    program.__name__: partial(run, program=program) for program in (two_sums, group_of_two, uneven_loops_with_a_join)
}
OPERATIONS = RUNS | {"reduce_much": reduce_much, "assign": assign}


async def _outcomes(job: Job, operation: Operation, victim: int, shift: int, caller: Caller) -> list[Any]:
    """Return each worker's outcome of an operation; the victim starts some turns later, and is interrupted."""

    async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
        is_victim = strategy is job.strategies[victim]
        await turns(max(0, shift if is_victim else -shift))
        return await (caller.call(operation(strategy)) if is_victim else operation(strategy))

    return await job.everywhere(one)


async def _sweep(operation: Operation, workers: int, victim: int, shift: int, how: str) -> None:
    """Interrupt a caller at each of its suspensions, and check everybody's outcome."""
    at, interrupted = 0, True
    while interrupted:
        job = Job(*[1] * workers, answer_seconds=0.5)
        if operation is assign:
            assert await job.everywhere(make_variable) == [None] * workers
        if at % 2:
            await job.values(lambda ctx: ctx.all_reduce("SUM", 1))  # so that the communicator for runs exists
        caller = Caller(at, how)
        outcomes = await _outcomes(job, operation, victim, shift, caller)
        wrong = [o for o in outcomes if isinstance(o, Exception) and not isinstance(o, CollectiveError)]
        assert not wrong, (at, wrong)
        errors = [o for o in outcomes if isinstance(o, CollectiveError)]
        assert all(victim in error.report.suspects for error in errors), (at, errors)
        interrupted = caller.interrupted
        at += 1
    assert at > 1 or shift >= 0  # the last to come may never be suspended


@pytest.mark.parametrize("how", ["scope", "task"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
async def test_a_caller_that_is_cancelled_anywhere(operation: Operation, how: str, anyio_backend: Any) -> None:
    if anyio_backend[0] == "trio" and how != "scope":
        pytest.skip("what trio cancels is a scope")
    for workers, victim, shift in ((2, 0, -2), (2, 0, 3), (3, 2, 1)):
        await _sweep(operation, workers, victim, shift, how)
