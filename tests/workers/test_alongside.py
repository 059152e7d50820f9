"""Values that move together with their records: the same results, and where workers part the same reports."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import CollectiveError, CommunicationOptions, MultiWorkerMirroredStrategy, ReplicaContext
from aiodist.workers.simulated import SimulatedCommunicator
from tests.collective.runs import mirrored, run
from tests.workers import test_divergence
from tests.workers.simulated import Job, Program, on_one_machine
from tests.workers.test_divergence import PROGRAMS, without_workers

pytestmark = pytest.mark.anyio
LARGE = 300


async def large(ctx: ReplicaContext) -> Any:
    """Return sums that do not travel in records: the first, which makes the communicator, and two more."""
    r = ctx.replica_id_in_sync_group
    return [await ctx.all_reduce("SUM", np.arange(float(LARGE)) * (r + step)) for step in range(3)]


async def check_sums(job: Job) -> None:
    n = job.strategies[0].num_replicas_in_sync
    for found in await job.values(large):
        for step, total in enumerate(found):
            np.testing.assert_array_equal(total, np.arange(float(LARGE)) * (n * (n - 1) // 2 + n * step))


@pytest.mark.parametrize("layout", [(2, 2), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
async def test_workers_that_part_are_told_as_ever_and_the_next_run_is_right(
    layout: tuple[int, ...], program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_divergence, "elements", LARGE)
    with pytest.raises(CollectiveError) as expected:
        await run(mirrored(4), program)
    job = Job(*layout, verify="alongside")
    for _ in range(2):
        await check_sums(job)
        for outcome in await job.run(program):
            assert type(outcome) is expected.type, outcome
            assert without_workers(str(outcome.report)) == without_workers(str(expected.value.report))
    await check_sums(job)


async def begun_in(job: Job, program: Program, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Any]]:
    """Return what the first worker begins in a run, in its order, and the outcomes."""
    begun: list[str] = []
    begin = SimulatedCommunicator._begin

    def noted(communicator: SimulatedCommunicator, kind: tuple[Any, ...], *rest: Any) -> Any:
        if communicator.rank == 0:
            begun.append(kind[0])
        return begin(communicator, kind, *rest)

    monkeypatch.setattr(SimulatedCommunicator, "_begin", noted)
    outcomes = await job.run(program)
    monkeypatch.undo()
    return begun, outcomes


async def test_values_are_begun_before_another_worker_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 1:
            raise ValueError("bad batch")
        await ctx.all_reduce("SUM", np.ones(LARGE))

    for verify, reductions in (("ahead", 0), ("alongside", 1)):
        job = Job(1, 1, verify=verify)
        await check_sums(job)
        begun, outcomes = await begun_in(job, program, monkeypatch)
        assert begun.count("allreduce") == reductions
        assert [type(outcome).__name__ for outcome in outcomes] == ["IncompleteCollectiveError", "ValueError"]
        await check_sums(job)


@pytest.mark.parametrize("counts", [(1, 1), (1,) * 65], ids=["all records", "a reduction of records"])
async def test_a_lane_makes_one_communicator_and_another_one_only_where_workers_parted(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def parting(ctx: ReplicaContext) -> None:
        await ctx.all_reduce("MAX" if ctx.replica_id_in_sync_group else "SUM", np.ones(LARGE))

    job = Job(*counts, verify="alongside")
    await job.check_that_it_works()
    for made in (1, 0, 1):
        begun, outcomes = await begun_in(job, large, monkeypatch)
        assert begun.count("dup") == made
        assert not any(isinstance(outcome, Exception) for outcome in outcomes)
        if not made:
            await job.run(parting)


async def test_workers_with_other_options_go_on_with_what_they_agree_on() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        first = ctx.replica_id_in_sync_group == 0
        return [
            await ctx.all_reduce("SUM", np.full(size, 1e8 if first else 1.0, np.float32), options)
            for options in (None, CommunicationOptions(accumulate="float64") if first else None, None)
            for size in (LARGE, 100)
        ]

    expected = await on_one_machine(program, 3)
    for modes in (["alongside"] * 3, ["ahead", "alongside", "alongside"]):
        job = Job(1, 1, 1)
        job.strategies = [
            MultiWorkerMirroredStrategy(
                communicator, ["CPU:0"], communication_options=CommunicationOptions(verify=verify)
            )
            for communicator, verify in zip(job.cluster.communicators, modes, strict=True)
        ]
        for _ in range(2):
            for found, right in zip(await job.values(program), expected, strict=True):
                for one, other in zip(found, right, strict=True):
                    np.testing.assert_array_equal(one, other)


async def test_groups_and_what_is_called_outside_of_replicas() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        if ctx.replica_id_in_sync_group not in {0, 2}:
            return 0.0
        group = ctx.new_group([0, 2])
        return sum([float((await group.all_reduce("SUM", np.full(LARGE, 3.0)))[0]) for _ in range(3)])

    async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
        value = aiodist.PerReplica([np.ones(LARGE)] * 2)
        return [float((await strategy.reduce("SUM", value, None))[-1]) for _ in range(3)]

    job = Job(2, 2, verify="alongside")
    for _ in range(2):
        assert await job.values(program) == [18.0, 0.0] * 2
        assert await job.everywhere(one) == [[4.0] * 3] * 2


async def test_join_is_refused_where_values_move_before_it_is_known_who_takes_part() -> None:
    async def program(ctx: ReplicaContext) -> int:
        return await ctx.join()

    for outcome in await Job(1, 1, verify="alongside").run(program):
        assert 'ctx.join() needs verify="ahead", the default' in str(outcome)
    assert await Job(2, verify="alongside").values(program) == [1, 1]


async def test_a_worker_that_is_lost_while_values_move() -> None:
    job = Job(1, 1, 1, verify="alongside")
    await check_sums(job)

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 2:
            await anyio.wait_all_tasks_blocked()
            job.cluster.lose(2, "has died")
            await anyio.sleep_forever()
        await ctx.all_reduce("SUM", np.ones(LARGE))

    for outcome in await job.run_and_lose(2, program):
        assert str(outcome) == "worker 2 of 3 has died; it had replica 2"
