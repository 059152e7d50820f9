"""Joining: replicas that run out of data, and what the others' collectives and errors are then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import IndexedSlices, ReplicaContext, ReplicaContextError, Variable
from tests.runtime.programs import mirrored, replica, results, run

pytestmark = pytest.mark.anyio


async def test_open_collectives_go_on_when_the_last_missing_replica_joins() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        handles = [ctx.all_reduce("SUM", replica() + 1) for _ in range(3 - replica())]
        await ctx.join()
        return [await handle for handle in handles]

    assert await results(3, program) == ([6, 3, 1], [6, 3], [6])


async def test_values_of_every_form_are_reduced_without_it() -> None:
    large = np.ones((1 << 20) + 1, np.float32)
    strategy = mirrored(3)
    with strategy.scope():
        total = Variable(0.0, aggregation="sum")

    async def program(ctx: ReplicaContext) -> None:
        me = replica()
        if me != 1:
            out = {"a": np.zeros(2), "b": np.zeros(3)}
            value = {"b": np.full(3, float(me)), "a": np.ones(2)}
            assert await ctx.all_reduce("SUM", value, out=out) is out
            assert (out["a"].tolist(), out["b"].tolist()) == ([2, 2], [2, 2, 2])
            rows = IndexedSlices(np.ones((1, 2)), np.array([me]), (4, 2))
            assert sorted((await ctx.all_reduce("SUM", rows)).indices.tolist()) == [0, 2]
            assert (await ctx.all_reduce("SUM", large) == 2).all()
            await total.assign_add(1.0)
        await ctx.join()

    await run(strategy, program)
    assert [float(value) for value in total.values] == [2.0] * 3


async def test_what_needs_a_value_of_every_replica_is_refused() -> None:
    kinds: dict[str, tuple[Any, ...]] = {
        "reduce_scatter": ("SUM", np.ones(3)),
        "scan": ("SUM", 1),
        "all_to_all": (np.ones(3),),
        "merge_call": (print,),
        "broadcast": (np.ones(3), 1),
    }

    async def program(ctx: ReplicaContext) -> None:
        for kind, arguments in kinds.items() if replica() != 1 else ():
            with pytest.raises(ValueError, match=f"{kind} needs .* replica 1 has joined"):
                await getattr(ctx, kind)(*arguments)
        await ctx.join()

    await run(mirrored(3), program)


async def test_a_join_in_a_group_is_of_that_group() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        if replica() == 1:
            return await ctx.all_reduce("SUM", 1, name="all")
        group = ctx.new_group([2, 0])
        for _ in range(replica()):
            assert await group.all_reduce("SUM", 1) == 1
        return await group.join(), await ctx.all_reduce("SUM", 1, name="all")

    assert await results(3, program) == ((0, 3), 3, (0, 3))


async def test_a_join_is_awaited_before_the_next_collective() -> None:
    async def program(ctx: ReplicaContext) -> None:
        handle = ctx.join()
        for issue in (ctx.barrier, ctx.join) if replica() == 0 else ():
            with pytest.raises(ReplicaContextError, match="this replica has joined"):
                issue()
        await handle
        await ctx.barrier()

    await run(mirrored(2), program)


async def test_a_join_may_last_longer_than_collectives_may_and_leaves_nothing() -> None:
    async def late(ctx: ReplicaContext) -> None:
        for _ in range(20 * replica()):
            await checkpoint()
        await ctx.join()

    async def often(ctx: ReplicaContext) -> None:
        for step in range(500):
            if step % 2 == replica():
                await ctx.barrier()
            await ctx.join()
        assert not ctx._me.member.group.open

    await run(mirrored(2, timeout=1e-9), late)
    await run(mirrored(2), often)
