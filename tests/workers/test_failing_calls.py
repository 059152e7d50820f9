"""A call that fails on a worker before its record is brought: it gives the strategy up, or all go on behind it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodist import CollectiveError, MultiWorkerMirroredStrategy, ReplicaContext, WorkerLostError
from tests.workers.failing import Call, Failures
from tests.workers.launched import job
from tests.workers.simulated import Job, Program

PROGRAM = Path(__file__).with_name("failing_job.py")
with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
MANY = (*[1] * 64, 2)
pytestmark = pytest.mark.anyio


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    return Failures(monkeypatch)


async def gathers(ctx: ReplicaContext) -> list[Any]:
    """Gather by step; a failed step is None."""
    found: list[Any] = []
    for step in range(4):
        try:
            found.append((await ctx.all_gather(np.array([step, ctx.replica_id_in_sync_group]), 0)).tolist())
        except MemoryError:
            found.append(None)
            continue
        expected = [x for replica_id in range(ctx.num_replicas_in_sync) for x in (step, replica_id)]
        assert found[-1] == expected, "values of several steps were put together"
    return found


async def overlapped(ctx: ReplicaContext) -> list[Any]:
    """Call everything before anything is awaited."""
    handles = [ctx.all_gather(np.array([step, ctx.replica_id_in_sync_group]), 0) for step in range(4)]
    found: list[Any] = []
    for handle in handles:
        try:
            found.append((await handle).tolist())
        except MemoryError:
            found.append(None)
    return found


async def catches_nothing(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("SUM", np.ones(3))
    await ctx.all_gather(np.array([1, ctx.replica_id_in_sync_group]), 0)
    await ctx.barrier()


async def in_a_group(ctx: ReplicaContext) -> None:
    me = ctx.replica_id_in_sync_group
    some = ctx.new_group([0, 2] if me != 1 else [1], "some")
    try:
        await some.barrier()
        await some.all_reduce("SUM", np.ones(2))
    except MemoryError:
        pass
    del some
    await ctx.barrier()


async def uneven(ctx: ReplicaContext) -> str:
    """Make as many sums as one's id says, and one."""
    sums: list[Any] = []
    for _ in range(ctx.replica_id_in_sync_group + 1):
        try:
            sums.append(float((await ctx.all_reduce("SUM", np.ones(2)))[0]))
        except MemoryError:
            sums.append(None)
    await ctx.join()
    return f"{sums} {await ctx.all_reduce('SUM', 1)}"


def no_room(*calls: Call) -> dict[Call, Exception]:
    return {call: MemoryError("no room") for call in calls}


def check_that_it_has_ended(outcomes: list[Any], worker: int) -> None:
    """Check that a worker has given up, and that all have heard of it; it may raise its own error."""
    for outcome in outcomes:
        if outcome is outcomes[worker] and isinstance(outcome, MemoryError):
            continue
        assert isinstance(outcome, WorkerLostError), outcomes
        assert str(outcome).startswith(f"worker {worker} of {len(outcomes)} has given up: MemoryError: no room; it had")


ONE = no_room((1, "all_gather", 1))
CASES: dict[str, tuple[Program, tuple[int, ...], dict[Call, Exception]]] = {
    "it_catches": (gathers, (1, 1, 1), ONE),
    "it_catches_nothing": (catches_nothing, (1, 1, 1), ONE),
    "among_calls_that_overlap": (overlapped, (2, 1), ONE),
    "in_a_group": (in_a_group, (1, 1, 1), no_room((2, "all_reduce", 1))),
    "while_another_has_joined": (uneven, (1, 1, 1), no_room((1, "all_reduce", 1))),
}


@pytest.mark.parametrize("options", [{}, {"reduction": "ordered"}], ids=str)
@pytest.mark.parametrize("name", CASES)
async def test_a_call_that_fails_on_one_worker_ends_the_strategy(name: str, options: Any, failures: Failures) -> None:
    program, counts, planned = CASES[name]
    team, worker = Job(*counts, **options), next(iter(planned))[0]
    failures.planned |= planned
    check_that_it_has_ended(await failures.run(team, program), worker)
    failures.planned.clear()
    for outcome in await failures.run(team, catches_nothing):
        assert isinstance(outcome, WorkerLostError)
        assert str(outcome).endswith("That has ended this strategy: make a new one.")


@pytest.mark.parametrize("options", [{}, {"reduction": "ordered"}], ids=str)
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1), MANY], ids=lambda counts: str(sum(counts)))
async def test_a_call_that_has_failed_on_all_workers_is_behind_all_of_them(
    counts: tuple[int, ...], options: Any, failures: Failures
) -> None:
    team = Job(*counts, **options)
    failures.planned |= no_room(*((rank, "all_gather", 1) for rank in range(len(counts))))
    for program in (gathers, overlapped):
        for found in await failures.run(team, program):
            assert [[step is None for step in row] for row in found] == [[False, True, False, False]] * len(found)
    for outcome in await failures.run(team, catches_nothing):
        assert isinstance(outcome, (MemoryError, CollectiveError))


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 2)], ids=str)
async def test_a_call_that_has_failed_on_all_who_have_not_joined(counts: tuple[int, ...], failures: Failures) -> None:
    team = Job(*counts)
    failures.planned |= no_room(*((rank, "all_reduce", 1) for rank in range(1, len(counts))))
    rows = [row for found in await failures.run(team, uneven) for row in found]
    assert rows == ["[3.0] 3", "[3.0, None] 3", "[3.0, None, 1.0] 3"]


async def test_a_call_that_has_failed_on_all_members_of_a_group(failures: Failures) -> None:
    failures.planned |= no_room((0, "all_reduce", 1), (2, "all_reduce", 1))
    assert await failures.run(Job(1, 1, 1), in_a_group) == [(None,)] * 3


@pytest.mark.parametrize("joined", [0, 1])
async def test_more_workers_than_all_receive_everything_of(joined: int, failures: Failures) -> None:
    async def program(ctx: ReplicaContext) -> Any:
        sums: list[float | None] = []
        for _ in range(2 if ctx.replica_id_in_sync_group >= joined else 0):
            try:
                sums.append(float((await ctx.all_reduce("SUM", np.ones(2)))[0]))
            except MemoryError:
                sums.append(None)
        await ctx.join()
        return sums

    team = Job(*MANY)
    failures.planned |= no_room(*((rank, "all_reduce", 0) for rank in range(joined, len(MANY))))
    found = [row for outcome in await failures.run(team, program) for row in outcome]
    assert found == [[]] * joined + [[None, 66.0 - joined]] * (66 - joined)


async def reduce(strategy: MultiWorkerMirroredStrategy) -> Any:
    return await strategy.reduce("SUM", strategy.experimental_distribute_values_from_function(lambda _: 1.0), None)


async def run(strategy: MultiWorkerMirroredStrategy) -> Any:
    return await strategy.run(lambda: 7)


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("operation", [reduce, run])
async def test_outside_of_replicas(operation: Any, counts: tuple[int, ...], failures: Failures) -> None:
    team, kind = Job(*counts), f"strategy.{operation.__name__}"
    works = await failures.everywhere(team, operation)
    failures.planned |= no_room(*((rank, kind, None) for rank in range(3)))
    for _ in range(2):
        assert [repr(each) for each in await failures.everywhere(team, operation)] == ["MemoryError('no room')"] * 3
    failures.planned.clear()
    assert repr(await failures.everywhere(team, operation)) == repr(works)
    failures.planned |= no_room((1, kind, None))
    outcomes = await failures.everywhere(team, operation)
    assert repr(outcomes[1]) == "MemoryError('no room')"
    check_that_it_has_ended(outcomes, 1)


@pytest.mark.parametrize(
    ("workers", "how"),
    [(3, ("asyncio", "mpi")), (2, ("trio", "mpi")), pytest.param(2, ("asyncio", "gloo"), marks=with_torch)],
    ids=str,
)
def test_real_workers_hear_of_it_or_go_on(workers: int, how: tuple[str, str]) -> None:
    code, output, _ = job(workers, how[0], engine=how[1], program=PROGRAM)
    assert code == 0, output
    found = {tuple(head.split()): rest for head, _, rest in (line.partition(": ") for line in output.splitlines())}
    last, error = workers - 1, "MemoryError: no room"
    who = f"WorkerLostError: worker {last} of {workers} has given up: {error}; it had replica {last}"
    for rank in range(workers):
        for name in ("catches", "raises", "gathers"):
            assert found["one", name, str(rank)] == (error if rank == last and name != "catches" else who)
        steps = [repr([10 * step + rank for rank in range(workers)]) for step in range(3)]
        assert found["all", "catches", str(rank)] == repr(f"[{steps[0]}, None, {steps[2]}]")
        assert found["none", "catches", str(rank)] == repr(f"[{', '.join(steps)}]")
        assert found["all", "gathers", str(rank)] == error
