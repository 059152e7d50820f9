"""A program for several real workers: many checks in one job, since a job takes long to start.

python job.py fault KIND...        the last worker does something wrong, in one run after the other; the others print
                                   what they report
python job.py stalls               the last worker is late, blocks its loop, is late again, and disagrees
python job.py groups               groups and joins in one run, then two groups in opposite order; then disagreements
                                   in a run, and in a group, that are caught; one worker ends later than the others
python job.py conforms             each worker goes through all that a communicator must do, and prints digests of what
                                   programs give, the same on all
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np

import aiodist
from aiodist import (
    CollectiveMismatchError,
    CommunicationOptions,
    DeadlockError,
    MultiWorkerMirroredStrategy,
    PerReplica,
    ReduceOp,
    ReplicaContext,
    Variable,
)
from aiodist._arrays import environment
from aiodist._strategy.scope import replicas_of
from aiodist._workers.ending import Journal
from aiodist._workers.transport import Communicator, Steps
from tests.workers.conformance import CASES, go_through, wait


def say(line: str) -> None:
    """Print a line in one piece, also where Python writes unbuffered: other workers print at the same moment."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def values(ctx: ReplicaContext) -> list[Any]:
    """Return the results of all kinds of collectives, on values whose sums are exact in any order."""
    r, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
    found: list[Any] = []
    for dtype in (np.int32, np.float16, np.float32, np.float64, np.complex64):
        for size in (3, 1000, 300_000) if dtype is np.float32 else (3, 1000):  # each kernel is compiled anew
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
        found.append(await ctx.all_gather(scattered, 0))
        exchanged = await ctx.all_to_all(np.arange(size * n) + r)
        found.append(await ctx.all_gather(exchanged, 0))
    variable = Variable(np.full(3, float(r)), aggregation="sum")
    await ctx.barrier()
    await variable.assign_add(np.ones(3))
    found.append(variable.read_value())
    return found


async def all_values(strategy: MultiWorkerMirroredStrategy) -> str:
    """Return a digest of everything."""

    async def replica() -> list[Any]:
        return await values(aiodist.get_replica_context())

    first = strategy.experimental_local_results(await strategy.run(replica))[0]
    local = replicas_of(strategy).local
    ones = PerReplica([np.ones(2)] * local) if local > 1 else np.ones(2)
    first.append(await strategy.reduce("SUM", ones, None))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def large() -> Any:
        return await aiodist.get_replica_context().all_reduce("SUM", np.ones(1 << 20))

    ticking = asyncio.create_task(tick())
    await strategy.run(large)
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


def all_ordered_sums(communicator: Communicator, replicas: int) -> str:
    """Return the digest of ordered sums, with so many replicas on this worker."""
    options = CommunicationOptions(timeout_seconds=150)
    devices = [f"CPU:{i}" for i in range(replicas)]
    strategy = MultiWorkerMirroredStrategy(devices, communicator, communication_options=options, reduction="ordered")
    found = asyncio.run(strategy.run(lambda: ordered_sums(aiodist.get_replica_context())))
    return str(strategy.experimental_local_results(found)[0])


async def faulty(ctx: ReplicaContext, kind: str) -> None:
    """Go wrong on the last replica."""
    await ctx.barrier()
    if ctx.replica_id_in_sync_group == ctx.num_replicas_in_sync - 1:
        if kind == "shape":
            await ctx.all_reduce("SUM", np.ones(7))
        go_wrong(kind)
    limit = 0.5 if kind == "blocked" else None
    await ctx.all_reduce("SUM", np.ones(5), CommunicationOptions(timeout_seconds=limit))


def go_wrong(kind: str) -> None:
    """Do something that no collective sees."""
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


async def stalls(strategy: MultiWorkerMirroredStrategy, *, last: bool) -> None:
    """Let the last worker be waited for in several ways, and disagree in the end."""

    async def replica() -> None:
        ctx = aiodist.get_replica_context()
        await ctx.barrier()
        if last:
            time.sleep(2)  # noqa: ASYNC251  (it blocks the loop)
        await ctx.barrier()

    await strategy.run(replica)
    if last:
        await asyncio.sleep(1)
    await strategy.reduce("SUM", 1, None)
    await strategy.run(lambda: aiodist.get_replica_context().all_reduce("MAX" if last else "SUM", 1))


def wait_until_the_others_wait() -> None:
    """Return a second after all others have come to the making of the strategy, as the journal says."""
    others = (found.workers if (found := environment.launched()) else 1) - 1
    while len(Journal(environment.notes()).waiting) < others:
        time.sleep(0.05)
    time.sleep(1)


async def disagree(strategy: MultiWorkerMirroredStrategy, *, in_group: bool) -> None:
    """Let the last replica contribute more than the others, and catch the error."""

    async def replica() -> None:
        ctx = aiodist.get_replica_context()
        odd = ctx.replica_id_in_sync_group == ctx.num_replicas_in_sync - 1
        where = ctx.new_group(range(ctx.num_replicas_in_sync), "everyone") if in_group else ctx
        for _ in range(3):
            await where.all_reduce("SUM", np.ones(1 << 17))
        await where.all_reduce("SUM", np.ones((1 << 17) + 8 * odd))

    try:
        await strategy.run(replica)
    except CollectiveMismatchError:
        say(f"worker {replicas_of(strategy).share.mine.start} caught it")


def caught(mpi: Any) -> None:
    """End in good order after errors that the program has caught."""
    for in_group in (False, True):
        strategy = MultiWorkerMirroredStrategy(communicator=mpi.COMM_WORLD)
        asyncio.run(disagree(strategy, in_group=in_group))
    if replicas_of(strategy).share.mine.start > 0:
        time.sleep(1.5)  # longer than a worker that has said farewell is waited for


async def groups_and_joins() -> str:
    """Return what pairs, overlapping groups and uneven loops give."""
    ctx = aiodist.get_replica_context()
    me, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
    found = []
    for step in range(3):
        pairs = [(a, b) for a in range(n) for b in range(a) if me in (a, b)]
        groups = [ctx.new_group(pair, f"{pair}") for pair in pairs]
        size = (3, 1000, 20_000)[step]  # in a record, in one of two workers alone, behind it
        handles = [group.all_reduce("SUM", np.full(size, 10**me + step)) for group in groups]
        found += [int((await handle)[-1]) for handle in handles]
    half = ctx.new_group(range(me % 2, n, 2))
    found += [await half.all_reduce("SUM", 10**me) for _ in range(me // 2 + 1)]
    found.append(await half.join())
    found += [int((await ctx.all_reduce("SUM", np.full(10_000, 1)))[-1]) for _ in range(me)]
    found.append(await ctx.join())
    return str(found)


async def opposite() -> None:
    """Use two groups in another order on the first replica."""
    ctx = aiodist.get_replica_context()
    groups = (
        [ctx.new_group([0, 5], name) for name in ("rows", "columns")] if ctx.replica_id_in_sync_group % 5 == 0 else []
    )
    for group in groups[:: 1 if ctx.replica_id_in_sync_group else -1]:
        await group.barrier()
    await ctx.barrier()


async def groups() -> None:
    """Print what groups and joins in one run give, and then two groups in opposite order."""
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0", "CPU:1"])
    results = strategy.experimental_local_results(await strategy.run(groups_and_joins))
    for place, result in enumerate(results):
        say(f"replica {replicas_of(strategy).share.mine.start + place}: {result}")
    try:
        await strategy.run(opposite)
    except DeadlockError as error:
        say(f"circle {str(error).splitlines()[0]}")
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0", "CPU:1"])
    say(f"again {strategy.experimental_local_results(await strategy.run(again))[0]}")


async def again() -> np.ndarray:
    """Show that another strategy works."""
    return np.asarray(await aiodist.get_replica_context().all_reduce("SUM", np.ones(1)))


def connected() -> Communicator:
    """Return the communicator of the engine, also where there is one worker, for which the local engine would do."""
    launched = environment.launched()
    torch = launched is not None and launched.by == environment.TORCHRUN
    engine = importlib.import_module(f"aiodist._workers.engines.{'torch' if torch else 'mpi'}")
    return made((engine.TorchCommunicator if torch else engine.MpiCommunicator).of_world())


def made(steps: Steps[Communicator]) -> Communicator:
    """Return a communicator, when it is made."""
    try:
        while True:
            wait(next(steps))
    except StopIteration as end:
        found: Communicator = end.value
        return found


def conform() -> None:
    """Go through all that a communicator must do, and print digests, the same on all workers."""
    communicator = connected()
    begun = time.perf_counter()
    for case in CASES:
        go_through(case, communicator)
    say(f"{communicator.engine} conforms in {time.perf_counter() - begun:.2f} s")
    options = CommunicationOptions(timeout_seconds=150)
    strategy = MultiWorkerMirroredStrategy(["CPU:0", "CPU:1"], made(communicator.dup()), communication_options=options)
    say(f"digest {asyncio.run(all_values(strategy))}")
    say(f"ordered {all_ordered_sums(made(communicator.dup()), 4 // communicator.size)}")


def main() -> None:
    """Do what the arguments say."""
    what, *kinds = sys.argv[1:]
    if what == "conforms":
        conform()
        return
    if what == "groups":
        mpi = importlib.import_module("mpi4py.MPI")  # before aiodist has made it ready
        asyncio.run(groups())
        caught(mpi)
        return
    if what == "stalls":
        os.environ["AIODIST_STALL_SECONDS"] = "0.5"
        found = environment.launched()
        last = found is None or found.rank == found.workers - 1
        if last:
            wait_until_the_others_wait()
        asyncio.run(stalls(MultiWorkerMirroredStrategy(), last=last))
        return
    asyncio.run(all_faults(MultiWorkerMirroredStrategy(), kinds))


async def all_faults(strategy: MultiWorkerMirroredStrategy, kinds: list[str]) -> None:
    """Let all these faults happen, and print the error of each; raise the last."""
    for kind in kinds:
        if kind != kinds[0]:  # which has ended the strategy
            strategy = MultiWorkerMirroredStrategy()
        try:
            await strategy.run(lambda kind=kind: faulty(aiodist.get_replica_context(), kind))
        except Exception as error:
            say(f"{kind}: worker {replicas_of(strategy).share.mine.start} {type(error).__name__} {str(error)!r}")
            if kind == kinds[-1]:
                raise


if __name__ == "__main__":
    main()
