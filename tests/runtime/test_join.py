"""Joining: replicas that run out of data, and what the others' collectives and errors are then."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodist import (
    IndexedSlices,
    ReplicaContext,
    ReplicaContextError,
    Variable,
    get_replica_context,
)
from tests.runtime.programs import error_of, mirrored, results, run

pytestmark = pytest.mark.anyio


async def test_who_has_joined_takes_part_with_nothing() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        mine = np.array([me + 1.0])
        seen: list[Any] = []
        for _ in range(me + 1):
            seen.append([(await ctx.all_reduce(op, mine))[0] for op in ("SUM", "MEAN", "MIN", "MAX", "PRODUCT")])
            seen.append((await ctx.all_gather(mine, 0)).tolist())
            seen.append((await ctx.broadcast(mine, 2)).tolist())
            await ctx.barrier()
        return seen[-3:], await ctx.join()

    assert await results(3, program) == (
        ([[6, 2, 1, 3, 6], [1, 2, 3], [3]], 2),
        ([[5, 2.5, 2, 3, 6], [2, 3], [3]], 2),
        ([[3, 3, 3, 3, 3], [3], [3]], 2),
    )


async def test_open_collectives_go_on_when_the_last_missing_replica_joins() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        handles = [ctx.all_reduce("SUM", me + 1) for _ in range(3 - me)]
        await ctx.join()
        return [await handle for handle in handles]

    assert await results(3, program) == ([6, 3, 1], [6, 3], [6])


async def test_nests_out_buffers_rows_and_large_values_are_reduced_without_it() -> None:
    large = np.ones((1 << 20) + 1, np.float32)

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        if me != 1:
            out = {"a": np.zeros(2), "b": np.zeros(3)}
            value = {"b": np.full(3, float(me)), "a": np.ones(2)}
            assert await ctx.all_reduce("SUM", value, out=out) is out
            assert (out["a"].tolist(), out["b"].tolist()) == ([2, 2], [2, 2, 2])
            rows = IndexedSlices(np.ones((1, 2)), np.array([me]), (4, 2))
            assert sorted((await ctx.all_reduce("SUM", rows)).indices.tolist()) == [0, 2]
            assert (await ctx.all_reduce("SUM", large) == 2).all()
        await ctx.join()

    await run(mirrored(3), program)


async def test_a_variables_assignment_is_made_without_it() -> None:
    strategy = mirrored(3)
    with strategy.scope():
        total = Variable(0.0, aggregation="sum")

    async def program(ctx: ReplicaContext) -> None:
        for _ in range(ctx.replica_id_in_sync_group):
            await total.assign_add(1.0)
        await ctx.join()

    await run(strategy, program)
    assert [float(value) for value in total.values] == [3.0] * 3


@pytest.mark.parametrize("kind", ["reduce_scatter", "scan", "all_to_all", "merge_call", "broadcast"])
async def test_what_needs_a_value_of_every_replica_is_refused(kind: str) -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group != 1:
            arguments: dict[str, tuple[Any, ...]] = {
                "reduce_scatter": ("SUM", np.ones(3)),
                "scan": ("SUM", 1),
                "all_to_all": (np.ones(3),),
                "merge_call": (print,),
                "broadcast": (np.ones(3), 1),
            }
            with pytest.raises(ValueError, match=f"{kind} needs .* replica 1 has joined"):
                await getattr(ctx, kind)(*arguments[kind])
        await ctx.join()

    await run(mirrored(3), program)


async def test_a_join_in_a_group_is_of_that_group() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        if me == 1:
            return await ctx.all_reduce("SUM", 1, name="all")
        group = ctx.new_group([2, 0])
        for _ in range(me):
            assert await group.all_reduce("SUM", 1) == 1
        return await group.join(), await ctx.all_reduce("SUM", 1, name="all")

    assert await results(3, program) == ((0, 3), 3, (0, 3))


async def test_outside_any_run_a_replica_joins_alone() -> None:
    ctx = get_replica_context()
    assert await ctx.join() == 0
    assert await ctx.all_reduce("SUM", 2) == 2


async def test_a_join_is_awaited_before_the_next_collective() -> None:
    async def program(ctx: ReplicaContext) -> None:
        handle = ctx.join()
        if ctx.replica_id_in_sync_group == 0:
            for issue in (ctx.barrier, ctx.join):
                with pytest.raises(ReplicaContextError, match="this replica has joined"):
                    issue()
        await handle
        await ctx.barrier()

    await run(mirrored(2), program)


# When replicas do not meet.


async def test_one_that_is_cancelled_out_of_the_join_is_named() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 0:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await ctx.join()
        while True:
            await anyio.lowlevel.checkpoint()

    error = await error_of(program)
    assert (error.report.reason, error.report.suspects) == ("abandoned", (0,))
    assert str(error).startswith("replica 0 was cancelled out of the join (collective #0) before it was complete\n")


async def test_a_join_may_last_longer_than_collectives_may() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group:
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
        await ctx.join()

    await run(mirrored(2, timeout=1e-9), program)


async def test_many_joins_leave_nothing() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for step in range(500):
            if step % 2 == ctx.replica_id_in_sync_group:
                await ctx.barrier()
            await ctx.join()
        assert not ctx._me.member.group.open

    await run(mirrored(2), program)
