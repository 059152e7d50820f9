"""Programs with groups and joins give on several workers what they give on one machine, or raise the same error."""

from __future__ import annotations

import re
from typing import Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import ReplicaContext, get_replica_context
from tests.runtime.divergences import DIVERGENCES
from tests.runtime.programs import Program, error_of, mirrored, run, turns
from tests.workers.simulated import Job, on_uvloop_too

LAYOUTS = [(1, 1, 1, 1), (2, 2), (1, 3), (4,)]
pytestmark = pytest.mark.anyio


async def every_collective(ctx: ReplicaContext) -> Any:
    me = ctx.replica_id_in_sync_group
    group = ctx.new_group([me % 2 + 2, me % 2])
    mine = np.array([me, 10 + me])
    out = np.zeros(2, int)
    await group.barrier()
    found = [
        await group.all_reduce("SUM", me),
        (await group.all_gather(mine, 0)).tolist(),
        (await group.broadcast(mine, 1)).tolist(),
        (await group.reduce_scatter("SUM", mine)).tolist(),
        (await group.all_to_all(mine)).tolist(),
        await group.all_reduce("SUM", mine, out=out) is out,
        out.tolist(),
        (await group.all_reduce("MAX", np.full(70_000, me)))[-1],
    ]
    assert await group.run_sync(get_replica_context) is ctx
    return found


async def a_group_of_a_group(ctx: ReplicaContext) -> Any:
    if ctx.replica_id_in_sync_group == 0:
        return None
    outer = ctx.new_group([3, 2, 1])
    if outer.replica_id_in_sync_group == 1:
        return None
    inner = outer.new_group([0, 2])
    return inner.replica_id_in_sync_group, await inner.all_reduce("SUM", ctx.replica_id_in_sync_group)


async def racing_tasks(ctx: ReplicaContext) -> Any:
    me = ctx.replica_id_in_sync_group
    sums: tuple[list[int], list[int]] = [], []

    async def work(group: ReplicaContext, pauses: int, mine: list[int]) -> None:
        for step in range(10):
            await turns(pauses)
            mine.append(await group.all_reduce("SUM", step))

    async with anyio.create_task_group() as tasks:
        for mine, pauses, name in zip(sums, (me, 3 - me), "ab", strict=True):
            tasks.start_soon(work, ctx.new_group(range(4), name), pauses, mine)
    return sums


async def joins_in_groups(ctx: ReplicaContext) -> Any:
    me = ctx.replica_id_in_sync_group
    if me == 1:
        return await ctx.all_reduce("SUM", 1, name="all")
    group = ctx.new_group([2, 0, 3])
    sums = [await group.all_reduce("SUM", np.full(100, me)) for _ in range(me)]
    return [one[0] for one in sums], await group.join(), await ctx.all_reduce("SUM", 1, name="all")


async def every_kind(ctx: ReplicaContext) -> Any:
    me = ctx.replica_id_in_sync_group
    mine = np.array([me + 1])
    seen: list[Any] = []
    for _ in range(me + 1):
        seen.append([(await ctx.all_reduce(op, mine))[0] for op in ("SUM", "MEAN", "MIN", "MAX", "PRODUCT")])
        seen.append((await ctx.all_gather(mine, 0)).tolist())
        seen.append((await ctx.broadcast(mine, 3)).tolist())
        seen.append(await ctx.all_reduce("SUM", me))
        await ctx.barrier()
    last = await ctx.join()
    return seen, last, await ctx.all_reduce("SUM", 1)


async def rows_and_buffers(ctx: ReplicaContext) -> Any:
    me = ctx.replica_id_in_sync_group
    found: list[Any] = []
    if me != 1:
        out = {"a": np.zeros(2), "b": np.zeros(3)}
        assert await ctx.all_reduce("SUM", {"b": np.full(3, float(me)), "a": np.ones(2)}, out=out) is out
        rows = aiodist.IndexedSlices(np.ones((1, 2)), np.array([me]), (4, 2))
        found = [out["a"].tolist(), out["b"].tolist(), (await ctx.all_reduce("SUM", rows)).indices.tolist()]
        found.append(float((await ctx.all_reduce("SUM", np.ones(50_000, np.float32)))[-1]))
    await ctx.join()
    return found


VALUES = [every_collective, a_group_of_a_group, racing_tasks, joins_in_groups, every_kind, rows_and_buffers]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("program", VALUES, ids=lambda program: program.__name__)
async def test_groups_and_joins_give_the_same_as_on_one_machine(layout: tuple[int, ...], program: Program) -> None:
    async def as_text(ctx: ReplicaContext) -> str:
        return repr(await program(ctx))

    assert await Job(*layout).values(as_text) == list(await run(mirrored(4), as_text))


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("seed", range(4))
async def test_ordered_means_over_uneven_loops_have_the_bits_of_one_worker(layout: tuple[int, ...], seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 4, (3, 4))  # of steps, by epoch and replica

    async def program(ctx: ReplicaContext) -> Any:
        me, found = ctx.replica_id_in_sync_group, []
        values = np.random.default_rng([seed, me])
        for epoch in counts:
            for _ in range(epoch[me]):
                await turns(values.choice((0, 0, 1, 3)))
                value = values.standard_normal(70).astype(np.float32)
                found += [await ctx.all_reduce("MEAN", value), await ctx.all_gather(value[:2], 0)]
            assert epoch[await ctx.join()] == max(epoch)
        return repr([array.tobytes() for array in found])

    alone = await Job(4, reduction="ordered").values(program)
    assert await Job(*layout, reduction="ordered").values(program) == alone


# When replicas disagree.


def diverging(what: str) -> Program:
    """Return a program in which one replica makes another call than the others."""
    divergence = DIVERGENCES[what]

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        await (divergence.odd if ctx.replica_id_in_sync_group == 1 else divergence.usual)(ctx)

    program.__name__ = what
    return program


async def merge_call_before_a_difference(ctx: ReplicaContext) -> None:
    async def merged(_: Any) -> None:
        await turns(9)

    pending = [ctx.merge_call(merged), ctx.barrier(name="next")]
    if ctx.replica_id_in_sync_group == 2:
        pending.append(ctx.barrier(name="odd"))
    pending.append(ctx.all_gather(np.ones(3), 0))
    for handle in pending:
        await handle


async def late(ctx: ReplicaContext) -> None:
    barrier = ctx.barrier()
    if ctx.replica_id_in_sync_group == 3:  # which has connected before anybody's time begins
        await anyio.sleep_forever()
    await barrier
    await ctx.all_reduce("SUM", 1, aiodist.CommunicationOptions(timeout_seconds=0.05))


async def late_in_one_that_is_not_made_yet(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 0:
        await ctx.new_group([0, 2], "pair").all_reduce("SUM", 1, aiodist.CommunicationOptions(timeout_seconds=0.05))
    elif ctx.replica_id_in_sync_group == 2:
        await anyio.sleep_forever()


async def another_place(ctx: ReplicaContext) -> None:
    first = ctx.new_group(range(4)) if ctx.replica_id_in_sync_group == 0 else None
    group = first or ctx.new_group(range(4))
    await group.barrier()


async def cancelled(ctx: ReplicaContext) -> Any:
    me = ctx.replica_id_in_sync_group
    if me in (1, 2):
        return await ctx.barrier(name="end")
    group = ctx.new_group([0, 3], "pair")
    if me == 0:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await group.barrier()
        await ctx.barrier(name="end")
    return await anyio.sleep_forever()


async def a_join_that_one_leaves_out(ctx: ReplicaContext) -> None:
    group = ctx.new_group(range(4), "all")
    for _ in range(ctx.replica_id_in_sync_group):
        await group.barrier()
    if ctx.replica_id_in_sync_group != 3:
        await group.join()


FAULTS = [
    *map(diverging, ["kind", "size", "another_key", "merge_function", "reduce_op"]), merge_call_before_a_difference,
    late, late_in_one_that_is_not_made_yet, another_place, cancelled, a_join_that_one_leaves_out,
]  # fmt: skip


def without_workers(text: str) -> str:
    """Return a report without the names of workers and devices and without line breaks, which differ on one machine."""
    return " ".join(re.sub(r"(worker \d+ )?CPU:\d+", "CPU", text).split())


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
async def test_every_worker_raises_what_one_machine_would(program: Program) -> None:
    expected = await error_of(program, 4)
    for layout in ((1, 1, 1, 1), (3, 1)):
        for outcome in await Job(*layout).run(program):
            assert type(outcome) is type(expected), outcome
            report, right = outcome.report, expected.report
            assert (report.reason, report.suspects, report.group) == (right.reason, right.suspects, right.group)
            assert report.sequence_number == right.sequence_number
            assert without_workers(str(report)) == without_workers(str(right))


async def merged(strategy: Any, value: Any) -> Any:
    return await strategy.reduce("SUM", value, None), len(strategy.experimental_local_results(value))


@on_uvloop_too
async def test_a_merge_function_of_a_group_has_this_workers_values() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        if me < 2:  # both on one worker
            return await ctx.new_group([0, 1]).merge_call(merged, (me + 1.0,))
        group = ctx.new_group([2, 4] if me in (2, 4) else [3, 5])
        with pytest.raises(aiodist.ReplicaContextError, match="in the merge function of the group of replicas"):
            await group.merge_call(merged, (1.0,))
        return await group.merge_call(lambda _, value: value, (me,))

    async def as_text(ctx: ReplicaContext) -> str:
        return repr(await program(ctx))

    assert await Job(2, 2, 2).values(as_text) == ["(3.0, 2)", "(3.0, 2)", "2", "3", "4", "5"]
