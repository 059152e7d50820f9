"""A program for several real workers, with many checks in one job, because a job takes long to start.

python job.py fault KIND...        the last worker goes wrong, in one run after another; the others print their errors
python job.py stalls               the last worker is late, blocks its loop, is late again, and disagrees
python job.py groups               groups and joins in one run, then two groups in opposite order; then disagreements
                                   in a run and in a group, which are caught; one worker ends later than the others
python job.py conforms             each worker goes through the conformance cases and prints digests of the results of
                                   programs, which are the same on all
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import aiodist
from aiodist import ReduceOp, ReplicaContext
from aiodist._arrays import environment
from aiodist._strategy.scope import replicas_of
from aiodist._workers.journal import Journal
from aiodist._workers.transport import Communicator, Steps
from tests.workers.conformance import CASES, go_through, wait


def job(workers: int, *arguments: str) -> tuple[int, str]:
    """Run this program as a job; return its exit code and output. It must leave no process and no temporary file."""
    from tests.tools.jobs import Jobs  # which workers do not need

    with closing(Jobs()) as jobs, TemporaryDirectory() as folder:
        variables = {"TMPDIR": folder, "PYTHONWARNINGS": "error::DeprecationWarning"}
        started = jobs.start(["-n", str(workers), __file__, *arguments], **variables)
        code = started.end()
        assert list(Path(folder).iterdir()) == [], started.output
        return code, started.output


def say(line: str) -> None:
    """Print a line in one piece, even unbuffered: other workers print at the same moment."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def run(strategy: aiodist.Strategy, program: Callable[[ReplicaContext], Any]) -> tuple[Any, ...]:
    """Run a program that takes its context; return the local results."""
    results = await strategy.run(lambda: program(aiodist.get_replica_context()))
    return strategy.experimental_local_results(results)


async def values(ctx: ReplicaContext) -> list[Any]:
    """Return the results of all kinds of collectives on values whose sums are exact in any order."""
    r, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
    found: list[Any] = []
    for dtype in (np.int32, np.float16, np.float32, np.float64, np.complex64):
        large = [300_000] if dtype is np.float32 else []  # of one dtype, because every kernel must be compiled
        for size in (3, 1000, *large):
            whole = np.random.default_rng(r).integers(0, 4, size).astype(dtype)
            found.append(await ctx.all_reduce("SUM", whole))
            if np.dtype(dtype).kind != "c":
                found.append(await ctx.all_reduce(ReduceOp.MAX, whole))
    mean = await ctx.all_reduce("MEAN", {"w": np.full(5000, r, np.float32), "l": 0.5 * r})
    found += [mean["w"], mean["l"]]
    for size in (20, 20_000):  # in one segment, and in several
        found.append(await ctx.all_gather([np.full((size, r + 1), r), np.full((3, 1), r, np.int8)], 1))
        found.append(await ctx.broadcast([np.full(10 * size, r), np.arange(size).reshape(-1, 20).T], n - 1))
        scattered = await ctx.reduce_scatter("SUM", np.arange(2 * size * n, dtype=np.float32))
        exchanged = await ctx.all_to_all(np.arange(size * n) + r)
        found += [await ctx.all_gather(part, 0) for part in (scattered, exchanged)]
    variable = aiodist.Variable(np.full(3, float(r)), aggregation="sum")
    await ctx.barrier()
    await variable.assign_add(np.ones(3))
    found.append(variable.read_value())
    return found


async def all_values(strategy: aiodist.MultiWorkerMirroredStrategy) -> str:
    """Return a digest of the results in and outside of replicas."""
    first = (await run(strategy, values))[0]
    local = replicas_of(strategy).local
    ones = aiodist.PerReplica([np.ones(2)] * local) if local > 1 else np.ones(2)
    first.append(await strategy.reduce("SUM", ones, None))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await run(strategy, lambda ctx: ctx.all_reduce("SUM", np.ones(1 << 20)))
    ticking.cancel()
    assert ticks > 10 or strategy.num_replicas_in_sync == local, "the event loop stood still"
    total = hashlib.sha256()
    for value in first:
        for leaf in value if isinstance(value, list) else [value]:
            array = np.asarray(leaf)
            total.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    return total.hexdigest()[:16]


async def ordered_sums(ctx: ReplicaContext) -> str:
    """Return a digest of sums and means whose bits depend on their order."""
    total = hashlib.sha256()
    for size in (3, 1000, 300_000):
        value = np.random.default_rng(ctx.replica_id_in_sync_group).normal(size=size)
        for dtype in (np.float16, np.float32, np.float64) if size < 300_000 else (np.float32,):
            for op in ("SUM", "MEAN"):
                total.update((await ctx.all_reduce(op, value.astype(dtype))).tobytes())
    return total.hexdigest()[:16]


def strategy_of(communicator: Communicator, replicas: int, **options: Any) -> aiodist.MultiWorkerMirroredStrategy:
    """Return a strategy with that many replicas on this worker."""
    options["communication_options"] = aiodist.CommunicationOptions(timeout_seconds=150)
    return aiodist.MultiWorkerMirroredStrategy([f"CPU:{i}" for i in range(replicas)], communicator, **options)


def all_ordered_sums(communicator: Communicator, replicas: int) -> str:
    """Return the digest of ordered sums, with that many replicas on this worker."""
    strategy = strategy_of(communicator, replicas, reduction="ordered")
    return str(asyncio.run(run(strategy, ordered_sums))[0])


async def faulty(ctx: ReplicaContext, kind: str) -> None:
    """Go wrong on the last replica."""
    await ctx.barrier()
    if ctx.replica_id_in_sync_group == ctx.num_replicas_in_sync - 1:
        if kind == "shape":
            await ctx.all_reduce("SUM", np.ones(7))
        go_wrong(kind)
    limit = 0.5 if kind == "blocked" else None
    await ctx.all_reduce("SUM", np.ones(5), aiodist.CommunicationOptions(timeout_seconds=limit))


def go_wrong(kind: str) -> None:
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "exits":
        sys.exit(5)
    if kind == "raises":
        raise ValueError("bad batch")
    if kind == "blocked":
        time.sleep(3)


async def stalls(strategy: aiodist.MultiWorkerMirroredStrategy, *, last: bool) -> None:
    """Let the others wait for the last worker in several ways, and let it disagree in the end."""

    async def replica(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        if last:
            time.sleep(2)  # noqa: ASYNC251  (it blocks the loop)
        await ctx.barrier()

    await run(strategy, replica)
    if last:
        await asyncio.sleep(1)
    await strategy.reduce("SUM", 1, None)
    await run(strategy, lambda ctx: ctx.all_reduce("MAX" if last else "SUM", 1))


def wait_until_the_others_wait() -> None:
    """Return a second after all others have begun to make the strategy, as the journal says."""
    others = (found.workers if (found := environment.launched()) else 1) - 1
    while len(Journal(environment.journal_folder()).waiting) < others:
        time.sleep(0.05)
    time.sleep(1)


async def disagree(strategy: aiodist.MultiWorkerMirroredStrategy, *, in_group: bool) -> None:
    """Let the last replica contribute more than the others, and catch the error."""

    async def replica(ctx: ReplicaContext) -> None:
        odd = ctx.replica_id_in_sync_group == ctx.num_replicas_in_sync - 1
        where = ctx.new_group(range(ctx.num_replicas_in_sync), "everyone") if in_group else ctx
        for _ in range(3):
            await where.all_reduce("SUM", np.ones(1 << 17))
        await where.all_reduce("SUM", np.ones((1 << 17) + 8 * odd))

    try:
        await run(strategy, replica)
    except aiodist.CollectiveMismatchError:
        say(f"worker {replicas_of(strategy).share.own.start} caught it")


def caught(mpi: Any) -> None:
    for in_group in (False, True):
        strategy = aiodist.MultiWorkerMirroredStrategy(communicator=mpi.COMM_WORLD)
        asyncio.run(disagree(strategy, in_group=in_group))
    if replicas_of(strategy).share.own.start > 0:
        time.sleep(1.5)  # longer than others wait for a worker that has announced its end


async def groups_and_joins(ctx: ReplicaContext) -> str:
    """Return the results of pairs, overlapping groups and uneven loops."""
    me, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
    found = []
    for step in range(3):
        pairs = [(a, b) for a in range(n) for b in range(a) if me in (a, b)]
        groups = [ctx.new_group(pair, f"{pair}") for pair in pairs]
        size = (3, 1000, 20_000)[step]  # in any record, only in one of two workers, behind it
        handles = [group.all_reduce("SUM", np.full(size, 10**me + step)) for group in groups]
        found += [int((await handle)[-1]) for handle in handles]
    half = ctx.new_group(range(me % 2, n, 2))
    found += [await half.all_reduce("SUM", 10**me) for _ in range(me // 2 + 1)]
    found.append(await half.join())
    found += [int((await ctx.all_reduce("SUM", np.full(10_000, 1)))[-1]) for _ in range(me)]
    found.append(await ctx.join())
    return str(found)


async def opposite(ctx: ReplicaContext) -> None:
    """Use two groups in opposite order on the first replica and on the last."""
    if ctx.replica_id_in_sync_group in (0, 5):
        groups = [ctx.new_group([0, 5], name) for name in ("rows", "columns")]
        for group in groups if ctx.replica_id_in_sync_group else reversed(groups):
            await group.barrier()
    await ctx.barrier()


async def groups() -> None:
    """Print the results of groups and joins, the error of two groups in opposite order, and another strategy's sum."""
    strategy = aiodist.MultiWorkerMirroredStrategy(devices=["CPU:0", "CPU:1"])
    for replica_id, result in enumerate(await run(strategy, groups_and_joins), replicas_of(strategy).share.own.start):
        say(f"replica {replica_id}: {result}")
    try:
        await run(strategy, opposite)
    except aiodist.DeadlockError as error:
        say(f"cycle {str(error).splitlines()[0]}")
    strategy = aiodist.MultiWorkerMirroredStrategy(devices=["CPU:0", "CPU:1"])
    say(f"again {(await run(strategy, lambda ctx: ctx.all_reduce('SUM', np.ones(1))))[0]}")


def connected() -> Communicator:
    """Return the engine's communicator, even for one worker, for which a strategy would use the local engine."""
    launched = environment.launched()
    torch = launched is not None and launched.by == environment.TORCHRUN
    engine = importlib.import_module(f"aiodist._workers.engines.{'torch' if torch else 'mpi'}")
    return made((engine.TorchCommunicator if torch else engine.MpiCommunicator).of_world())


def made(steps: Steps[Communicator]) -> Communicator:
    try:
        while True:
            wait(next(steps))
    except StopIteration as end:
        found: Communicator = end.value
        return found


def conform() -> None:
    """Go through the conformance cases and print digests, which are the same on all workers."""
    communicator = connected()
    begun = time.perf_counter()
    for case in CASES:
        go_through(case, communicator)
    say(f"{communicator.engine} conforms in {time.perf_counter() - begun:.2f} s")
    say(f"digest {asyncio.run(all_values(strategy_of(made(communicator.dup()), 2)))}")
    say(f"ordered {all_ordered_sums(made(communicator.dup()), 4 // communicator.size)}")


def main() -> None:
    match sys.argv[1:]:
        case ["conforms"]:
            conform()
        case ["groups"]:
            mpi = importlib.import_module("mpi4py.MPI")  # before aiodist has initialised it
            asyncio.run(groups())
            caught(mpi)
        case ["stalls"]:
            os.environ["AIODIST_STALL_SECONDS"] = "0.5"
            found = environment.launched()
            last = found is None or found.rank == found.workers - 1
            if last:
                wait_until_the_others_wait()
            asyncio.run(stalls(aiodist.MultiWorkerMirroredStrategy(), last=last))
        case ["fault", *kinds]:
            asyncio.run(all_faults(kinds))


async def all_faults(kinds: list[str]) -> None:
    """Print the error of each of these faults, and raise the last."""
    for kind in kinds:
        strategy = aiodist.MultiWorkerMirroredStrategy()  # the fault before has ended the last one
        try:
            await run(strategy, lambda ctx, kind=kind: faulty(ctx, kind))  # type: ignore[misc]
        except Exception as error:
            say(f"{kind}: worker {replicas_of(strategy).share.own.start} {type(error).__name__} {str(error)!r}")
            if kind == kinds[-1]:
                raise


if __name__ == "__main__":
    main()
