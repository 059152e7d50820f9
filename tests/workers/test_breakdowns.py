"""A step that fails on one worker, others being in the midst of it: all hear of it, and the next one is right."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist import (
    IncompleteCollectiveError,
    MultiWorkerMirroredStrategy,
    Variable,
    WorkerLostError,
    get_replica_context,
)
from aiodist.replica.breaking import Breaking
from aiodist.replica.crossing import Crossing
from aiodist.workers.simulated import SimulatedCommunicator
from tests.workers.breaking import Fault
from tests.workers.launched import job
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio
Operation = Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]
PROGRAM = Path(__file__).with_name("breakdown_job.py")
LARGE = 150_000  # two segments of float64, so that one is in flight when another fails


def check(found: Any, expected: Any) -> None:
    """Check a result where it is: a wrong one is never taken for what has failed."""
    np.testing.assert_array_equal(found, expected)


async def _sums() -> None:
    ctx = get_replica_context()
    n = ctx.num_replicas_in_sync
    for size in (3, 1000, LARGE):
        check(await ctx.all_reduce("SUM", np.full(size, 1.5)), np.full(size, 1.5 * n))


async def _again() -> None:
    ctx = get_replica_context()
    n = ctx.num_replicas_in_sync
    for size in (1000, LARGE):
        for _ in range(3):  # from the second time on, they go the straight way
            check(await ctx.all_reduce("SUM", np.full(size, 1.5)), np.full(size, 1.5 * n))


async def _others() -> None:
    ctx = get_replica_context()
    r, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
    rows = np.repeat(range(n), range(1, n + 1))
    check(await ctx.all_gather(np.full((r + 1, 200), r), 0), rows[:, None].repeat(200, 1))
    check(await ctx.broadcast(np.full(LARGE, r), n - 1), np.full(LARGE, n - 1))
    check((await ctx.all_to_all(np.arange(100 * n)))[:100], np.arange(100 * r, 100 * r + 100))
    assert await ctx.merge_call(lambda _: 4) == 4
    if r:
        check(await ctx.all_reduce("SUM", np.ones(300)), np.full(300, float(n - 1)))
    await ctx.join()


async def _group() -> None:
    ctx = get_replica_context()
    n = ctx.num_replicas_in_sync
    group = ctx.new_group(range(n), "all")
    check(await group.all_reduce("SUM", np.ones(LARGE)), np.full(LARGE, float(n)))
    check(await ctx.all_reduce("SUM", np.ones(300)), np.full(300, float(n)))


async def sums(strategy: MultiWorkerMirroredStrategy) -> None:
    await strategy.run(_sums)


async def again(strategy: MultiWorkerMirroredStrategy) -> None:
    await strategy.run(_again)


async def others(strategy: MultiWorkerMirroredStrategy) -> None:
    await strategy.run(_others)


async def group(strategy: MultiWorkerMirroredStrategy) -> None:
    await strategy.run(_group)


async def reduce(strategy: MultiWorkerMirroredStrategy) -> None:
    n = strategy.num_replicas_in_sync
    check(await strategy.reduce("SUM", np.ones(LARGE), None), np.full(LARGE, float(n)))


async def gather(strategy: MultiWorkerMirroredStrategy) -> None:
    n = strategy.num_replicas_in_sync
    assert (await strategy.gather(np.ones((300, 2)), 0)).shape == (300 * n, 2)


async def variable(strategy: MultiWorkerMirroredStrategy) -> None:
    with strategy.scope():
        created = Variable(np.full(500, 2.0), aggregation="mean")
    assert await strategy.reduce("SUM", 1, None) == strategy.num_replicas_in_sync
    check(created.read_value(), np.full(500, 2.0))


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Let a worker have a fault."""
    return Fault(monkeypatch)


async def _outcomes(team: Job, fault: Fault, operation: Operation) -> list[Any]:
    async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
        return await fault.on(team.strategies.index(strategy), operation(strategy))

    return await team.everywhere(one)


def _check_what_is_told(outcomes: list[Any], fault: Fault) -> None:
    """Check that all raise one report, which names who has failed and why, and that one what it was."""
    told = [outcome for rank, outcome in enumerate(outcomes) if rank != fault.victim]
    if all(outcome is None for outcome in told):  # its record was with the others, who have heard all that they need
        return
    if fault.how == "test":  # likewise, and some were in the midst of it
        told = [outcome for outcome in told if outcome is not None]
    assert all(isinstance(outcome, IncompleteCollectiveError) for outcome in told), outcomes
    assert len({str(outcome) for outcome in told}) == 1
    text = f"{type(fault.error).__name__}: {fault.error}"
    if "could not carry out" in str(told[0]):  # else it lacked memory when all was there, and a replica raised that
        assert f"worker {fault.victim} of {len(outcomes)} (replica {fault.victim}) could not carry out" in str(told[0])
    else:
        text = f"Replica {fault.victim} raised {text}"
    assert text in str(told[0])
    assert all(repr(outcome.__cause__) == repr(fault.error) for outcome in told)
    own = outcomes[fault.victim]
    if own is not fault.error:  # nobody waits in the creation of a group, or of a variable, or at the end
        assert (own.report, repr(own.__cause__)) == (told[0].report, repr(fault.error))


async def _check_that_it_works(team: Job) -> None:
    await team.check_that_it_works()
    for operation in (sums, group, reduce):
        assert await team.everywhere(operation) == [None] * len(team.strategies)


@pytest.mark.parametrize(
    ("workers", "victim", "operation", "how"),
    [
        (2, 1, sums, "begin"),
        (3, 0, sums, "test"),
        (3, 1, sums, "memory"),
        (3, 2, others, "begin"),
        (2, 0, others, "memory"),
        (2, 0, group, "begin"),
        (3, 1, group, "test"),
        (3, 2, reduce, "begin"),
        (3, 1, reduce, "memory"),
        (3, 2, reduce, "test"),
        (2, 0, gather, "test"),
        (2, 1, variable, "begin"),
    ],
)
async def test_every_worker_hears_of_it_wherever_it_happens(
    workers: int, victim: int, operation: Operation, how: str, fault: Fault
) -> None:
    await _check_everywhere(workers, victim, operation, how, fault, "ahead")


@pytest.mark.parametrize("verify", ["ahead", "alongside"])
@pytest.mark.parametrize("how", ["begin", "test", "memory"])
async def test_every_worker_hears_of_it_where_calls_come_again(verify: str, how: str, fault: Fault) -> None:
    await _check_everywhere(3, 1, again, how, fault, verify)


async def _check_everywhere(
    workers: int, victim: int, operation: Operation, how: str, fault: Fault, verify: str
) -> None:
    """Check it for a fault at each of the engine's calls, or of memory's."""
    error = MemoryError("no room") if how == "memory" else RuntimeError("the engine is broken")
    fault.victim = victim
    at, happened = 0, True
    while happened:
        team = Job(*[1] * workers, verify=verify)
        fault.strike(at, how, error.with_traceback(None), times=3 if how == "memory" else 1)
        outcomes = await _outcomes(team, fault, operation)
        happened = fault.happened
        if any(outcomes):
            assert happened
            _check_what_is_told(outcomes, fault)
        fault.strike(None)
        await _check_that_it_works(team)
        at += 1
    assert at > 1


@pytest.mark.parametrize("verify", ["ahead", "alongside"])
async def test_a_replica_that_catches_it_is_told_at_its_next_collective(verify: str, fault: Fault) -> None:
    async def program() -> Any:
        ctx = get_replica_context()
        for _ in range(3):
            await ctx.all_reduce("SUM", np.ones(1000))
        try:
            return await ctx.all_reduce("SUM", np.ones(2000))
        except MemoryError:
            await ctx.barrier()

    fault.victim = 1
    team = Job(1, 1, verify=verify)
    fault.strike(3, "memory", MemoryError("no room"), times=5)
    outcomes = await _outcomes(team, fault, lambda strategy: strategy.run(program))
    fault.strike(None)
    texts = {str(outcome) for outcome in outcomes}
    assert len(texts) == 1
    assert "(replica 1) could not carry out collective #3, all_reduce(SUM, float64[2000])" in texts.pop()
    await _check_that_it_works(team)


async def test_a_step_that_all_go_on_with_behind_the_verdict(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica fails while values are on their way, which all carry over; then one worker cannot."""
    fault.victim = 1
    in_the_air, told = anyio.Event(), anyio.Event()

    class Late:
        """A request that fails when the others have had their verdict."""

        def __init__(self, begun: Any, error: Exception) -> None:
            self._begun, self._error = begun, error
            in_the_air.set()

        def test(self) -> bool:
            if told.is_set():
                raise self._error
            return False

    monkeypatch.setattr("tests.workers.breaking.BadRequest", Late)

    async def program() -> Any:
        ctx = get_replica_context()
        pending = ctx.all_reduce("SUM", np.ones(1000))
        if ctx.replica_id_in_sync_group == 0:
            await in_the_air.wait()
            raise ValueError("bad batch")
        return await pending

    def break_off(crossing: Crossing) -> None:
        Breaking._break_off(crossing)
        told.set()

    monkeypatch.setattr(Crossing, "_break_off", break_off)
    team = Job(1, 1, 1)
    fault.strike(3, "test", RuntimeError("the engine is broken"))
    outcomes = await _outcomes(team, fault, lambda strategy: strategy.run(program))
    assert fault.happened
    fault.strike(None)
    assert repr(outcomes[0]) == "ValueError('bad batch')"
    assert [type(outcome) for outcome in outcomes[1:]] == [IncompleteCollectiveError] * 2
    await _check_that_it_works(team)


async def test_a_strategy_without_another_communicator_says_so(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    def isplit(communicator: SimulatedCommunicator, *_: object) -> None:
        raise RuntimeError("no more communicators")

    monkeypatch.setattr(SimulatedCommunicator, "isplit", isplit)
    team = Job(1, 1, 1)
    fault.victim = 1
    assert await team.everywhere(gather) == [None] * 3
    fault.strike(1, "test")
    assert (await _outcomes(team, fault, reduce))[1] is fault.error
    for outcome in await team.everywhere(gather):
        assert isinstance(outcome, WorkerLostError)
        assert "this strategy is of no use any more: worker 1 of 3 (replica 1) could not carry out" in str(outcome)
        assert "another one cannot be made: RuntimeError: no more communicators" in str(outcome)


async def test_what_an_engine_said_of_a_worker_that_is_then_told_to_be_lost_is_the_cause(fault: Fault) -> None:
    error = RuntimeError("connection closed by peer")

    async def program() -> None:
        ctx = get_replica_context()
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == 0:
            fault.strike(0, "test", error)
            await ctx.barrier()
        await anyio.wait_all_tasks_blocked()  # the other one waits for whoever knows more than its engine
        assert fault.happened
        team.cluster.lose(1, "has died")

    team = Job(1, 1)
    outcomes = await _outcomes(team, fault, lambda strategy: strategy.run(program))
    assert isinstance(outcomes[0], WorkerLostError)
    assert "worker 1 of 2 has died" in str(outcomes[0])
    assert outcomes[0].__cause__ is error


class Odd(BaseException):
    """An exception that is no `Exception`, as KeyboardInterrupt is none."""


@pytest.mark.parametrize("kind", [Odd, GeneratorExit])
@pytest.mark.parametrize("size", [3, LARGE])
async def test_an_exception_that_is_none_ends_the_run_on_all_workers(kind: type[BaseException], size: int) -> None:
    team = Job(1, 1, 1)
    found: list[BaseException] = []

    async def program() -> None:
        ctx = get_replica_context()
        for step in range(4):
            check(await ctx.all_reduce("SUM", np.ones(size)), np.full(size, 3.0))
            if step == 2 and ctx.replica_id_in_sync_group == 1:
                raise kind("gone")

    async def one(strategy: MultiWorkerMirroredStrategy) -> None:
        try:
            await strategy.run(program)
        except BaseException as error:  # noqa: BLE001  (it would end the test)
            found.append(error)

    await team.everywhere(one)
    told = [error for error in found if isinstance(error, IncompleteCollectiveError)]
    assert len(found) == 3
    assert len(told) == 2
    assert len({str(error) for error in told}) == 1
    assert "replica 1 ended without collective #3" in str(told[0])
    await _check_that_it_works(team)


@pytest.mark.parametrize(("workers", "how"), [(3, ("asyncio", "ahead")), (2, ("trio", "alongside"))], ids=str)
def test_real_workers_hear_of_it_and_go_on(workers: int, how: tuple[str, str]) -> None:
    code, output, _ = job(workers, *how, program=PROGRAM)
    assert code == 0, output
    for name in ("run", "group", "reduce"):
        lines = [line for line in output.splitlines() if line.startswith(f"{name} ")]
        assert sum("after" in line for line in lines) == workers
        assert all(line.endswith(f"after: {workers}.0 {workers}.0") for line in lines if "after" in line)
        last = workers - 1
        assert f"{name} {last} soon: MemoryError: no room <- None" in lines
        for rank in range(last):
            told = next(line for line in lines if line.startswith(f"{name} {rank} soon: IncompleteCollectiveError: "))
            assert f"worker {last} of {workers} (replica {last}) could not carry out collective #" in told
            assert told.endswith(": MemoryError: no room <- MemoryError('no room')")
