"""Workers agree on every collective or all raise what one machine would, in whatever order deliveries arrive."""

from __future__ import annotations

import asyncio
import random
import selectors
import tracemalloc
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

from aiodist import CollectiveError, IncompleteCollectiveError, ReplicaContext, WorkerLostError
from aiodist._core.terms import Reason
from aiodist._workers.engines.simulated import SimulatedCluster
from aiodist._workers.messages import Message
from aiodist._workers.record import MOST_IN_FULL, RecordBuffers
from tests.runtime.programs import mirrored, run, turns
from tests.workers.simulated import Job
from tests.workers.test_as_on_one_machine import without_workers

Counts = tuple[int, ...]
LAYOUTS = [(1, 1), (2, 1), (1, 2, 1), (1, 1, 1, 1)]
SEEDS = range(15)
each_layout = pytest.mark.parametrize("counts", LAYOUTS, ids=str)


class Op(NamedTuple):
    """A step of a replica's program.

    Attributes:
        what: ``call``, ``issue`` (a call that is awaited at the end), ``join``, ``group`` (makes a group), ``raise``.
        name: the call's name; the values of calls with even names fit in the record.
        kind: the kind of the call.
        group: the index of its group among the replica's, 0 for that of the run.
        ranks: the members of a group that is made.
    """

    what: str
    name: int
    kind: str = "all_reduce"
    group: int = 0
    ranks: tuple[int, ...] = ()

    def begin(self, ctx: ReplicaContext) -> Any:
        mine, name = 3 ** (ctx.replica_id_in_sync_group % 30), str(self.name)
        match self.kind:
            case "barrier":
                return ctx.barrier(name=name)
            case "merge_call":
                return ctx.merge_call(lambda _, __: "merged", (mine,))
            case "all_gather":
                return ctx.all_gather(np.ones(2), 0, name=name)
            case _:
                return ctx.all_reduce("SUM", [mine, *([np.ones(2000)] if self.name % 2 else [])], name=name)


Program = Sequence[Sequence[Op]]


async def carry_out(program: Program, ctx: ReplicaContext) -> str:
    """Run this replica's part of a program; return the results."""
    contexts, issued, found = [ctx], [], []
    for op in program[ctx.replica_id_in_sync_group]:
        match op.what:
            case "raise":
                raise ValueError("bad batch")
            case "group":
                contexts.append(ctx.new_group(op.ranks, str(op.name)))
            case "join":
                last = await ctx.join()
                assert last < ctx.num_replicas_in_sync
            case "issue":
                issued.append(op.begin(contexts[op.group]))
            case _:
                found.append(await op.begin(contexts[op.group]))
    return repr(found + [await handle for handle in issued])


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time advances only when nothing else can happen, however busy the machine is."""

    def __init__(self) -> None:
        super().__init__(_Selector(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        self._clock.now += timeout or 0.0
        return super().select(None if timeout is None else 0)


def timed(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=Clock) as runner:
        return runner.run(coroutine)


class LateCluster(SimulatedCluster):
    """The engine's deliveries and the coordinator's messages arrive in a drawn order."""

    def __init__(self, seed: int, size: int, **options: Any) -> None:
        super().__init__(size, **options)
        self.draw = random.Random(seed)
        self.to_coordinator: list[deque[Message]] = [deque() for _ in range(size)]
        self.to_worker: list[deque[Message]] = [deque() for _ in range(size)]

    def connect(self) -> None:
        super().connect()
        self.held = []

    def take(self, rank: int, message: Message) -> None:
        self.to_coordinator[rank].append(message)

    def _send(self, sent: Any) -> None:
        for ranks, message in sent:
            for rank in ranks:
                self.to_worker[rank].append(message)

    def lose(self, rank: int, why: str) -> None:
        """Lose a worker, and perhaps its latest messages to the coordinator."""
        queue = self.to_coordinator[rank]
        for _ in range(self.draw.randint(0, len(queue))):
            queue.pop()
        while queue:
            super().take(rank, queue.popleft())
        super().lose(rank, why)

    def deliver_one(self) -> bool:
        """Deliver one of the things in flight; return whether there was any."""

        def take(rank: int) -> None:
            super(LateCluster, self).take(rank, self.to_coordinator[rank].popleft())

        def send(rank: int) -> None:
            super(LateCluster, self)._send(iter([((rank,), self.to_worker[rank].popleft())]))

        actions: list[Callable[[], object]] = [partial(self.release, i) for i in range(len(self.held or ()))]
        actions += [partial(take, rank) for rank, queue in enumerate(self.to_coordinator) if queue]
        actions += [partial(send, rank) for rank, queue in enumerate(self.to_worker) if queue]
        if actions:
            self.draw.choice(actions)()
        return bool(actions)


async def outcomes(counts: Counts, program: Program, seed: int, kill: tuple[int, int] = (-1, -1)) -> list[Any]:
    """Return each worker's results or error; `kill` names a worker and the number of deliveries before it dies."""
    job = Job(*counts, cluster=partial(LateCluster, seed), answer_seconds=60)
    cluster: Any = job.cluster
    victim, ended = anyio.CancelScope(), anyio.Event()

    async def deliver() -> None:
        number = 0
        while not ended.is_set():
            if cluster.held is not None:
                if number == kill[1]:
                    cluster.lose(kill[0], "has died")
                    victim.cancel()
                number += 1
            if not cluster.deliver_one():
                await anyio.sleep(1e-3)
            await turns(cluster.draw.randint(0, 3))

    async def one(strategy: Any) -> Any:
        with victim if strategy is job.strategies[kill[0]] and kill[0] >= 0 else nullcontext():
            return await run(strategy, partial(carry_out, program))
        return "killed"

    found: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deliver)
        found = await job.everywhere(one)
        ended.set()
    return found


async def check(counts: Counts, program: Program, seed: int) -> None:
    """Compare the outcome of a program on several workers with that on one machine."""
    found = await outcomes(counts, program, seed)
    try:
        right = list(await run(mirrored(sum(counts)), partial(carry_out, program)))
    except CollectiveError as error:
        right = [error]
    if not isinstance(right[0], CollectiveError):
        assert [result for each in found for result in each] == right
        return
    expected = right[0].report
    for each in found:
        assert type(each) is type(right[0]), (each, right)
        assert each.report.reason == expected.reason
        if expected.reason is not Reason.CYCLE:  # of several cycles, any may be reported
            assert each.report.sequence_number == expected.sequence_number
            assert set(each.report.suspects) == set(expected.suspects), f"{each}\n{expected}"
    assert len({without_workers(str(each)) for each in found}) == 1


def alike(draw: random.Random, replicas: int) -> list[list[Op]]:
    """Return a program in which all replicas make the same calls."""
    ops = [
        Op(draw.choice(["call", "call", "issue"]), name, draw.choice(["all_reduce", "barrier", "merge_call"]))
        for name in range(1, draw.randint(2, 8))
    ]
    return [list(ops) for _ in range(replicas)]


def grouped(draw: random.Random, replicas: int) -> list[list[Op]]:
    """Return a program of groups, each with calls that its members make in one order, all drawn."""
    groups = [tuple(sorted(draw.sample(range(replicas), draw.randint(1, replicas)))) for _ in range(2)]
    program: list[list[Op]] = [[Op("group", 10 + i, ranks=g) for i, g in enumerate(groups) if rank in g]
                               for rank in range(replicas)]  # fmt: skip
    for name in range(20, 20 + draw.randint(1, 6)):
        ranks = draw.choice([tuple(range(replicas)), *groups])
        for rank in ranks:
            made = [op.ranks for op in program[rank] if op.what == "group"]
            program[rank].append(Op("call", name, group=1 + made.index(ranks) if ranks in made else 0))
    return program


def with_a_fault(draw: random.Random, program: list[list[Op]]) -> list[list[Op]]:
    """Return a program in which one replica deviates once."""
    program = [[op._replace(what="call") if op.what == "issue" else op for op in ops] for ops in program]
    faulty = draw.choice([ops for ops in program if any(op.what == "call" for op in ops)])
    calls = [at for at, op in enumerate(faulty) if op.what == "call"]
    at, other = draw.choice(calls), draw.choice(calls)
    match draw.choice(["skip", "add", "swap", "other", "leave"]):
        case "skip":
            del faulty[at]
        case "add":
            faulty.insert(at, Op("call", 90))
        case "swap":
            faulty[other], faulty[at] = faulty[at], faulty[other]
        case "other":
            faulty[at] = faulty[at]._replace(kind="all_gather")
        case "leave":
            del faulty[at:]
    return program


@each_layout
@pytest.mark.parametrize("make", [alike, grouped], ids=lambda make: make.__name__)
@pytest.mark.parametrize("faulty", [False, True], ids=["alike", "faulty"])
def test_programs_end_as_on_one_machine(counts: Counts, make: Callable[..., list[list[Op]]], faulty: bool) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        program = make(draw, sum(counts))
        timed(check(counts, with_a_fault(draw, program) if faulty else program, seed))


@each_layout
def test_uneven_loops_with_a_join(counts: Counts) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        loops = [[Op("call", 5)] * draw.randint(0, 4) for _ in range(sum(counts))]
        timed(check(counts, [[*loop, Op("join", 6), Op("call", 7)] for loop in loops], seed))


@each_layout
def test_replica_that_raises_is_the_cause_elsewhere(counts: Counts) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        program = alike(draw, sum(counts))
        failing = draw.randrange(sum(counts))
        program[failing][draw.randrange(len(program[failing])) :] = [Op("raise", 50)]
        found = timed(outcomes(counts, program, seed))
        own = next(rank for rank in range(len(counts)) if failing < sum(counts[: rank + 1]))
        assert repr(found.pop(own)) == "ValueError('bad batch')"
        for error in found:
            assert isinstance(error, IncompleteCollectiveError), error
            assert f"Replica {failing} raised ValueError: bad batch" in str(error)
            assert repr(error.__cause__) == f"RuntimeError('Replica {failing} raised ValueError: bad batch')"


@each_layout
@pytest.mark.parametrize("faulty", [False, True], ids=["alike", "faulty"])
def test_worker_that_dies_at_any_moment_ends_the_others_alike(counts: Counts, faulty: bool) -> None:
    """Every survivor has the results, or the same error as the others: that a worker is lost, or the report."""
    for seed in SEEDS:
        draw = random.Random(seed)
        program = grouped(draw, sum(counts))
        if faulty:
            program[draw.randrange(len(program))].append(Op("call", 90))
        victim = draw.randrange(len(counts))
        found = timed(outcomes(counts, program, seed, kill=(victim, draw.randrange(50))))
        errors = [each for rank, each in enumerate(found) if rank != victim and isinstance(each, Exception)]
        assert len({without_workers(str(error)) for error in errors}) <= 1, errors
        for error in errors:
            if isinstance(error, WorkerLostError):
                assert error.report.suspects == tuple(range(sum(counts[:victim]), sum(counts[: victim + 1])))
            else:
                assert faulty
                assert isinstance(error, CollectiveError), repr(error)


def test_more_workers_than_exchange_whole_records() -> None:
    n = MOST_IN_FULL + 1
    same = alike(random.Random(1), n)
    odd = [[op._replace(what="call") for op in ops] for ops in same]
    del odd[20][-1]
    uneven = [[*[Op("call", 5)] * (i % 3), Op("join", 6), Op("call", 7)] for i in range(n)]
    for program in (same, odd, uneven):
        timed(check((1,) * n, program, seed=1))


def test_long_records_take_memory_only_where_they_are_used() -> None:
    """A program may have thousands of groups of two workers, mostly with small values.

    Allocations are counted, not resident pages: NumPy may reuse memory that has been written to before.
    """
    communicator: Any = SimulatedCluster(2).communicators[0]
    communicator.record_bytes = 1 << 16
    tracemalloc.start()
    try:
        records = RecordBuffers(communicator)
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert records.payload.size > 65_000
    assert allocated < 32_768
