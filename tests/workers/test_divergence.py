"""Workers that diverge: all raise the same error, in bounded time, and their strategy has ended."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import Reason, ReplicaContext
from aiodist._core.ledger import HISTORY
from aiodist._strategy.scope import replicas_of
from tests.runtime.programs import Program, mirrored, run, turns
from tests.workers.simulated import Job, on_uvloop_too
from tests.workers.test_as_on_one_machine import without_workers

pytestmark = pytest.mark.anyio


async def test_different_calls_outside_of_replicas() -> None:
    async def program(strategy: Any) -> Any:
        if replicas_of(strategy).share.own.start == 0:
            return await strategy.reduce("SUM", 1.0, None)
        return await strategy.gather(np.ones(2), 0)

    job = Job(1, 1)
    for outcome in await job.everywhere(program):
        assert isinstance(outcome, aiodist.CollectiveMismatchError)
        assert "strategy.reduce(SUM, [float])" in str(outcome)
        assert "strategy.gather([float64[*]], axis=0)" in str(outcome)


async def test_run_that_a_worker_never_calls_times_out_everywhere() -> None:
    job = Job(1, 1, timeout_seconds=0.05, answer_seconds=0.01)

    async def program(strategy: Any) -> Any:
        return await strategy.run(lambda: 1) if replicas_of(strategy).share.own.start == 0 else None

    first, _ = await job.everywhere(program)
    assert isinstance(first, aiodist.CollectiveTimeoutError)
    assert "replica 1 has not arrived" in str(first)


@on_uvloop_too
@pytest.mark.parametrize("where", ["in a collective", "outside"])
async def test_lost_worker_is_named_by_all_others(where: str) -> None:
    job, victim = Job(1, 1, 2), anyio.CancelScope()

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == 1:
            await anyio.wait_all_tasks_blocked()
            job.cluster.lose(1, "has died")
            victim.cancel()
        if where == "outside":
            await anyio.sleep_forever()
        await ctx.all_reduce("SUM", 1)

    async def one(strategy: Any) -> None:
        with victim if strategy is job.strategies[1] else nullcontext():
            await run(strategy, program)

    first, _, last = await job.everywhere(one)
    for outcome in (first, last):
        assert isinstance(outcome, aiodist.WorkerLostError)
        assert str(outcome) == "worker 1 of 3 has died; it had replica 1"
        assert outcome.report.suspects == (1,)

    async def again(strategy: Any) -> Any:
        return await strategy.reduce("MEAN", 1.0, None) if replicas_of(strategy).share.own.start != 1 else None

    first, _, last = await job.everywhere(again)
    assert isinstance(first, aiodist.WorkerLostError)
    assert isinstance(last, aiodist.WorkerLostError)


async def test_concurrent_runs_do_not_disturb_each_other() -> None:
    job = Job(1, 2)

    async def program(strategy: Any) -> Any:
        found: dict[int, Any] = {}

        async def one(k: int) -> None:
            async def replica(ctx: ReplicaContext) -> Any:
                total = 0
                for step in range(5):
                    await turns(int((ctx.replica_id_in_sync_group + k + step) % 3 == 0))
                    total += await ctx.all_reduce("SUM", k, name="step")
                return total

            found[k] = (await run(strategy, replica))[0]

        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for k in range(1, 4):
                    tasks.start_soon(one, k)
                    await anyio.sleep(0.01)
        return [found[k] for k in (1, 2, 3)]

    assert await job.everywhere(program) == [[15, 30, 45]] * 2


async def test_errors_name_replicas_by_their_ids_over_all_workers() -> None:
    job = Job(2, 2)

    async def one(strategy: aiodist.MultiWorkerMirroredStrategy) -> None:
        if strategy is job.strategies[1]:  # whose replicas are 2 and 3, while the other one does nothing
            await strategy.reduce("SUM", aiodist.PerReplica([np.ones(2), np.ones((2, 2))]), None)

    assert "replica 2's is float64[2], replica 3's is float64[2, 2]" in str((await job.everywhere(one))[1])

    async def other_keys(ctx: ReplicaContext) -> Any:
        return {ctx.replica_id_in_sync_group: 1}

    assert "value[2] is on replica 2 only" in str((await job.run(other_keys))[1])


async def average(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("MEAN", np.ones(3))


def through_a_helper(usual: str, odd: str) -> Program:
    """Return a program whose last replica calls a helper from two lines in another order than the others do."""

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        for name in odd if ctx.replica_id_in_sync_group == ctx.num_replicas_in_sync - 1 else usual:
            if name == "1":
                await average(ctx)
            else:
                await average(ctx)
        await ctx.barrier()

    return program


@pytest.mark.parametrize("layout", [(2, 2), (1, 1, 1), (1,) * 66], ids=lambda layout: str(len(layout)))
async def test_callers_of_a_helper_in_another_order_are_found(layout: tuple[int, ...]) -> None:
    with pytest.raises(aiodist.CollectiveMismatchError) as expected:
        await run(mirrored(sum(layout)), through_a_helper("12", "21"))
    for outcome in await Job(*layout).run(through_a_helper("12", "21")):
        assert isinstance(outcome, aiodist.CollectiveMismatchError), outcome
        assert (outcome.report.reason, outcome.report.sequence_number) == (Reason.CALL_SITE, 2)
        assert outcome.report.suspects == expected.value.report.suspects
        if len(layout) < 64:  # on a busy machine not all of 66 may answer in time
            assert without_workers(str(outcome)) == without_workers(str(expected.value))


@pytest.mark.parametrize("layout", [(2, 2), (1,) * 66], ids=lambda layout: str(len(layout)))
async def test_callers_that_merely_differ_are_no_fault(layout: tuple[int, ...]) -> None:
    assert await Job(*layout).values(through_a_helper("111", "222")) == [None] * sum(layout)


async def test_callers_in_another_order_farther_apart_than_reports_go_are_no_fault() -> None:
    many = "2" * HISTORY
    assert await Job(1, 1).values(through_a_helper("1" + many, many + "1")) == [None] * 2


@pytest.mark.parametrize("size", [1, 1000], ids=["in the record", "beside it"])
async def test_error_of_a_replica_with_calls_in_flight_is_raised(size: int) -> None:
    async def program(ctx: ReplicaContext) -> None:
        handles = [ctx.all_reduce("SUM", np.ones(size)) for _ in range(4)]
        await handles[0]
        raise ValueError("bad batch")

    for outcome in await Job(1, 1).run(program):
        assert isinstance(outcome, ValueError), repr(outcome)


async def test_report_of_many_workers_lists_the_tasks_of_the_loop_for_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each list would have the tasks of all workers, so a report of thousands would take time that grows with n²."""

    async def program(ctx: ReplicaContext) -> Any:
        return await (ctx.barrier() if ctx.replica_id_in_sync_group == 7 else ctx.all_reduce("SUM", 1.0))

    all_tasks = Mock(return_value=set())
    monkeypatch.setattr(asyncio, "all_tasks", all_tasks)
    outcomes = await Job(*[1] * 130).run(program)
    all_tasks.assert_not_called()
    assert {type(outcome) for outcome in outcomes} == {aiodist.CollectiveMismatchError}
