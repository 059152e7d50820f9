"""merge_call: a function that runs once for all replicas. join: replicas that run out of data."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
from anyio import CancelScope
from anyio.lowlevel import checkpoint

import aiodist
from aiodist import IndexedSlices, Mirrored, PerReplica, ReplicaContext, ReplicaContextError, Variable
from tests.runtime.programs import error_of, here, mirrored, on_each, replica, results, run, still_works, turns

pytestmark = pytest.mark.anyio

variable: ContextVar[int] = ContextVar("variable", default=-1)


async def test_plain_function_runs_once_on_regrouped_arguments_with_replica_0s_context() -> None:
    seen = []

    def merge(strategy: Any, x: Any, count: Any, *, name: Any, place: Any) -> str:
        assert aiodist.in_cross_replica_context()
        assert aiodist.get_replica_context() is None
        assert aiodist.get_strategy() is strategy
        seen.append((strategy, x.values, count.values, name, place.values, variable.get()))
        return "done"

    async def program() -> Any:
        variable.set(100 + replica())
        names = {"name": "sgd".upper(), "place": f"r{replica()}"}
        return await here().merge_call(merge, args=(replica(), 7), kwargs=names)

    strategy = mirrored(3)
    assert (await strategy.run(program)).values == ("done",) * 3
    assert seen == [(strategy, (0, 1, 2), (7, 7, 7), "SGD", ("r0", "r1", "r2"), 100)]


async def test_result_gives_each_replica_its_component_at_any_depth() -> None:
    async def program() -> Any:
        return await here().merge_call(lambda _: {"a": PerReplica([1, 2]), "b": [Mirrored([3, 3]), "bare"]})

    assert await on_each(2, program) == ({"a": 1, "b": [3, "bare"]}, {"a": 2, "b": [3, "bare"]})


async def test_exception_can_be_caught_by_every_replica_and_is_raised_once_and_as_itself() -> None:
    error = KeyError("merge")

    def fail() -> None:
        if replica() == 1:
            raise error

    async def merge(strategy: Any) -> None:
        await strategy.run(fail)

    async def program() -> None:
        with pytest.raises(KeyError):
            await here().merge_call(merge)
        assert await here().all_reduce("SUM", 1) == 3
        await here().merge_call(merge)

    strategy = mirrored(3)
    with pytest.raises(KeyError) as caught:
        await strategy.run(program)
    assert caught.value is error
    assert len(error.__notes__) == 3  # one for each run
    await still_works(strategy)


async def test_collective_inside_the_merge_function_is_refused_with_both_lines() -> None:
    async def merge(strategy: Any, context: Any) -> None:
        await context.values[0].barrier()

    async def program() -> None:
        await here().merge_call(merge, (here(),))

    with pytest.raises(ReplicaContextError, match=r"combine per-replica values with `await strategy.reduce") as caught:
        await mirrored(2).run(program)
    line = program.__code__.co_firstlineno + 1
    note = next(note for note in caught.value.__notes__ if "merge function" in note)
    assert note.startswith("in the merge function of merge_call(merge) #0 at ")
    assert note.endswith(f"test_merge_and_join.py:{line} in program")
    assert "merge" in [entry.name for entry in caught.traceback]


# Joining: the others' collectives and errors meanwhile. The random programs join, too.


async def test_values_of_every_form_are_reduced_without_a_joined_replica() -> None:
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


async def test_collective_that_needs_a_value_of_every_replica_is_refused() -> None:
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


async def test_join_in_a_group_is_of_that_group() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        if replica() == 1:
            return await ctx.all_reduce("SUM", 1, name="all")
        group = ctx.new_group([2, 0])
        for _ in range(replica()):
            assert await group.all_reduce("SUM", 1) == 1
        return await group.join(), await ctx.all_reduce("SUM", 1, name="all")

    assert await results(3, program) == ((0, 3), 3, (0, 3))


async def test_join_must_be_awaited_before_the_next_collective() -> None:
    async def program(ctx: ReplicaContext) -> None:
        handle = ctx.join()
        for issue in (ctx.barrier, ctx.join) if replica() == 0 else ():
            with pytest.raises(ReplicaContextError, match="this replica has joined"):
                issue()
        await handle
        await ctx.barrier()

    await run(mirrored(2), program)


async def test_join_has_no_time_limit_and_leaves_nothing() -> None:
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


async def test_replica_that_is_cancelled_out_of_a_join_and_returns_has_abandoned_it() -> None:
    async def program(ctx: ReplicaContext) -> None:
        with CancelScope() as scope:
            if replica() == 1:
                scope.cancel()
            else:
                await turns()
            await ctx.join()

    error = await error_of(program)
    assert (error.report.reason, error.report.suspects) == ("abandoned", (1,))


@pytest.mark.filterwarnings("ignore:replica . never awaited join:RuntimeWarning")
async def test_replica_that_returns_without_awaiting_its_join_has_joined() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        if replica() == 0:
            ctx.join()
            return None
        return await ctx.all_reduce("SUM", 1), await ctx.join()

    assert await results(3, program) == (None, (2, 2), (2, 2))
