"""More workers than all receive everything of: what a step costs one of them does not grow with their number."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodist import (
    CollectiveMismatchError,
    CommunicationOptions,
    ReplicaContext,
    Variable,
    WorkerLostError,
    get_replica_context,
)
from aiodist._workers.engines.simulated import SimulatedCommunicator
from tests.workers.simulated import Job, on_one_machine, on_uvloop_too

LAYOUT = (*[1] * 64, 3, 1)
REPLICAS = sum(LAYOUT)
HUNDREDS = 512
ASYNCIO = pytest.param(("asyncio", {}), id="asyncio")
pytestmark = pytest.mark.anyio


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets what each gathering of every worker's bytes gives to each of them."""
    sizes = []
    for name in ("iallgather", "iallgatherv"):
        real = getattr(SimulatedCommunicator, name)

        def spied(self: Any, send: Any, receive: Any, *counts: Any, real: Any = real) -> Any:
            sizes.append(receive.size)
            return real(self, send, receive, *counts)

        monkeypatch.setattr(SimulatedCommunicator, name, spied)
    return sizes


async def test_programs_that_gather_nothing_gather_nothing(gathered: list[int]) -> None:
    async def program(ctx: ReplicaContext) -> Any:
        r = ctx.replica_id_in_sync_group
        v = Variable(np.full(2, r + 5.0), aggregation="sum")
        await ctx.barrier()
        await v.assign_add(np.ones(2))
        mean = await ctx.all_reduce("MEAN", {"loss": 0.5 * r, "w": np.full(100, r, np.float32)})
        total = await ctx.all_reduce("SUM", r)
        return v.numpy().tolist(), mean["loss"], float(mean["w"][9]), total, await ctx.broadcast(r, 65)

    async def outside(strategy: Any) -> Any:
        with strategy.scope():
            v = Variable(float(strategy.share.mine.start))
        await strategy.run(lambda: 1)
        return v.numpy()

    job, n = Job(*LAYOUT), REPLICAS
    assert await job.values(program) == [([5.0 + n] * 2, (n - 1) / 4, (n - 1) / 2, n * (n - 1) // 2, 65)] * n
    assert {float(value) for value in await job.everywhere(outside)} == {0.0}
    assert gathered == []


@pytest.mark.parametrize("op", ["SUM", "MEAN", "PRODUCT", "MIN", "MAX"])
async def test_numbers_of_python_are_exact(op: str) -> None:
    rng = np.random.default_rng(5)
    digits = (2, 17, 30) if op != "MEAN" else (2, 7)
    numbers = [[int(rng.integers(-9, 9)) * 10**k + r for k in digits] for r in range(REPLICAS)]
    huge = [10**40 * (-1) ** r + r for r in range(REPLICAS)]

    async def program(ctx: ReplicaContext) -> Any:
        r = ctx.replica_id_in_sync_group
        return await ctx.all_reduce(op, numbers[r]), await ctx.all_reduce(op, huge[r])

    columns = [list(column) for column in zip(*numbers, strict=True)]
    fold: Any = {"SUM": sum, "MEAN": lambda c: sum(c) / len(c), "PRODUCT": np.multiply.reduce, "MIN": min, "MAX": max}[
        op
    ]
    expected = [fold(np.array(c, object)) for c in columns], fold(np.array(huge, object))
    assert await Job(*LAYOUT).values(program) == [expected] * REPLICAS


async def test_numbers_of_python_other_than_integers() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        r = ctx.replica_id_in_sync_group
        return [
            await ctx.all_reduce("SUM", [0.25 * r, complex(r, 1), r]),
            await ctx.all_reduce("MAX", [r == 3, 0.5 * r]),
            await ctx.all_reduce("MIN", [r != 3, -0.5 * r, float("nan") if r == 65 else 1.0]),
        ]

    n = REPLICAS
    total = n * (n - 1) // 2
    right = [[0.25 * total, complex(total, n), total], [True, 0.5 * (n - 1)], [False, -0.5 * (n - 1), float("nan")]]
    for found in await Job(*LAYOUT).values(program):
        assert repr(found) == repr(right)


async def test_ordered_sums_of_floats_are_those_of_one_machine() -> None:
    parts = np.random.default_rng(3).normal(size=REPLICAS).tolist()

    async def program(ctx: ReplicaContext) -> Any:
        return await ctx.all_reduce("SUM", parts[ctx.replica_id_in_sync_group])

    total = 0.0
    for part in parts:
        total += part
    assert await Job(*LAYOUT, reduction="ordered").values(program) == [total] * REPLICAS


async def test_first_replica_says_how_to_accumulate() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        first = ctx.replica_id_in_sync_group == 0
        options = CommunicationOptions(accumulate="float64") if first else None
        small = first or ctx.replica_id_in_sync_group > 1
        return await ctx.all_reduce("SUM", np.full(1, 2.0**-24 if small else 1.0, np.float32), options)

    expected = np.float32(1.0 + (REPLICAS - 1) * 2.0**-24)
    assert [float(value[0]) for value in await Job(*LAYOUT).values(program)] == [expected] * REPLICAS


@on_uvloop_too
async def test_as_many_runs_at_a_time_as_there_are_lanes() -> None:
    async def outside(strategy: Any) -> Any:
        found = {}

        async def one(k: int) -> None:
            found[k] = await strategy.run(lambda: get_replica_context().all_reduce("SUM", np.full(1, k), name="step"))

        async with anyio.create_task_group() as tasks:
            for k in range(3):
                tasks.start_soon(one, k)
                await anyio.lowlevel.checkpoint()
        return [int(strategy.experimental_local_results(found[k])[0][0]) for k in range(3)]

    assert await Job(*LAYOUT).everywhere(outside) == [[0, REPLICAS, 2 * REPLICAS]] * len(LAYOUT)


async def test_lost_worker_is_named_by_all_others() -> None:
    job = Job(*LAYOUT)

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == 40:
            job.cluster.lose(40, "has died")
            await anyio.sleep_forever()
        await ctx.barrier()

    others = await job.run_and_lose(40, program)
    assert all(isinstance(outcome, WorkerLostError) for outcome in others), others
    assert {str(outcome) for outcome in others} == {"worker 40 of 66 has died; it had replica 40"}


@pytest.mark.parametrize("anyio_backend", [ASYNCIO])
async def test_hundreds_of_workers_match_and_one_of_them_diverges() -> None:
    job = Job(*[1] * HUNDREDS)

    async def matching(ctx: ReplicaContext) -> Any:
        await ctx.barrier()
        return await ctx.all_reduce("SUM", 1), float((await ctx.all_reduce("SUM", np.ones(20)))[7])

    async def diverging(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == 333:
            await ctx.barrier()
        await ctx.all_reduce("SUM", np.ones(2))

    assert await job.values(matching) == [(HUNDREDS, HUNDREDS)] * HUNDREDS
    outcomes = await job.run(diverging)
    assert all(isinstance(outcome, CollectiveMismatchError) for outcome in outcomes)
    assert len({id(outcome.report) for outcome in outcomes}) == 1, "the report is one for all"
    report = outcomes[0].report
    assert report.suspects == (333,)
    assert "replica 333" in str(report)
    assert [len(camp.replicas) for camp in report.camps] == [HUNDREDS - 1, 1]


async def test_report_on_many_workers_tells_what_was_agreed_on_before() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(20):
            await ctx.barrier()
        await ctx.all_reduce("SUM", np.ones(3 if ctx.replica_id_in_sync_group == 9 else 2))

    outcomes = await Job(*LAYOUT).run(program)
    assert all(isinstance(outcome, CollectiveMismatchError) for outcome in outcomes)
    with pytest.raises(CollectiveMismatchError) as expected:
        await on_one_machine(program, REPLICAS)
    report, right = outcomes[-1].report, expected.value.report
    assert (report.reason, report.suspects, report.sequence_number) == (right.reason, (9,), 20)
    assert [one.history for one in report.replicas] == [one.history for one in right.replicas]
