"""What is no divergence: calls that look different and mean the same."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist import CommunicationOptions, Reason, ReduceOp, ReplicaContext
from tests.runtime.programs import Program, Relay, error_of, mirrored, run

pytestmark = pytest.mark.anyio
SUM = ReduceOp.SUM


async def agreed(program: Program, replicas: int = 3, order_check: str = "call_site") -> tuple[Any, ...]:
    return await run(mirrored(replicas, order_check), program)


async def test_one_line_of_a_finally_block_is_one_place() -> None:
    async def program(ctx: ReplicaContext) -> int:
        total = 0
        for _ in range(1):
            try:
                if ctx.replica_id_in_sync_group == 0:
                    continue  # the compiler writes the block down once for each way out
                if ctx.replica_id_in_sync_group == 1:
                    break
                await anyio.lowlevel.checkpoint()
            finally:
                total = await ctx.all_reduce(SUM, 1)
        return total

    assert await agreed(program) == (3, 3, 3)


async def test_a_module_that_was_loaded_twice_is_one_place() -> None:
    source = "async def program(ctx):\n    return await ctx.all_reduce('sum', 1)\n"
    first, second = types.ModuleType("twice"), types.ModuleType("twice")
    for module in (first, second):
        exec(compile(source, "twice.py", "exec"), module.__dict__)
    assert first.program.__code__ is not second.program.__code__
    assert await agreed(lambda ctx: (first, second)[ctx.replica_id_in_sync_group % 2].program(ctx)) == (3, 3, 3)


async def test_equal_code_of_two_files_is_two_places() -> None:
    source = "async def program(ctx):\n    return await ctx.all_reduce('sum', 1)\n"
    spaces: list[dict[str, Any]] = [{}, {}]
    for space, file in zip(spaces, ("one.py", "two.py"), strict=True):
        exec(compile(source, file, "exec"), space)
    error = await error_of(lambda ctx: spaces[ctx.replica_id_in_sync_group == 1]["program"](ctx))
    assert (error.report.reason, error.report.suspects) == (Reason.CALL_SITE, (1,))


async def test_texts_do_not_tell_in_what_order_a_dict_was_filled() -> None:
    async def program(ctx: ReplicaContext, turns: Relay) -> None:
        odd = ctx.replica_id_in_sync_group == 2
        value = {"a": 1, "b": 1} if ctx.replica_id_in_sync_group else {"b": 1, "a": 1}
        await turns.turn()
        pending = ctx.all_reduce(ReduceOp.MAX if odd else SUM, value)
        turns.pass_on()
        await pending

    texts = set()
    for order in itertools.permutations(range(3)):
        texts.add(str(await error_of(functools.partial(program, turns=Relay(order)))))
    assert len(texts) == 1


@pytest.mark.parametrize("order_check", ["call_site", "call_path", "signature"])
async def test_a_name_joins_two_branches(order_check: str) -> None:
    async def program(ctx: ReplicaContext) -> int:
        if ctx.replica_id_in_sync_group == 1:
            total: int = await ctx.all_reduce(SUM, 1, name="total")
        else:
            total = await ctx.all_reduce(SUM, 2, name="total")
        await (ctx.barrier(name="end") if total else ctx.barrier(name="end"))  # noqa: RUF034
        return total

    assert await agreed(program, order_check=order_check) == (5, 5, 5)


async def helper(ctx: ReplicaContext, value: int) -> int:
    return int(await ctx.all_reduce(SUM, value))


async def two_branches(ctx: ReplicaContext) -> int:
    if ctx.replica_id_in_sync_group == 1:
        return int(await ctx.all_reduce(SUM, 1))
    return int(await ctx.all_reduce(SUM, 2))


async def through_a_helper(ctx: ReplicaContext) -> int:
    if ctx.replica_id_in_sync_group == 1:
        return await helper(ctx, 1)
    return await helper(ctx, 2)


@pytest.mark.parametrize(
    ("program", "same", "differs"),
    [(two_branches, "signature", "call_site"), (through_a_helper, "call_site", "call_path")],
)
async def test_places_and_callers_are_compared_as_the_strategy_says(program: Program, same: str, differs: str) -> None:
    assert await agreed(program, order_check=same) == (5, 5, 5)
    error = await error_of(program, order_check=differs)
    assert (error.report.reason, error.report.suspects) == (Reason.CALL_SITE, (1,))


async def test_equal_call_paths_agree() -> None:
    async def program(ctx: ReplicaContext) -> list[int]:
        nested = [await helper(ctx, i) for i in range(2)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(helper, ctx, 1)  # the path of a child task begins in it
        return nested

    assert await agreed(program, order_check="call_path") == ([0, 3],) * 3


def merge(strategy: Any, value: Any) -> int:
    return sum(np.size(component) for component in value.values)


CHOICES = [None, CommunicationOptions(bytes_per_pack=7), CommunicationOptions(timeout_seconds=1000.0)]
SHAPES = [np.zeros(2), np.zeros((1, 3), np.int8), np.float32(0)]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (lambda ctx, me: ctx.all_gather(np.zeros((1, 2)), -1 if me else 1), [[0] * 6]),  # an axis, from either end
        (lambda ctx, me: ctx.all_reduce(SUM, 1, CHOICES[me]), 3),
        (lambda ctx, me: ctx.merge_call(merge, (SHAPES[me],)), 6),
    ],
    ids=["axis", "options", "shapes and dtypes of a merge's arguments"],
)
async def test_what_means_the_same_or_is_not_compared(call: Any, result: Any) -> None:
    found = await agreed(lambda ctx: call(ctx, ctx.replica_id_in_sync_group))
    assert [np.asarray(each).tolist() for each in found] == [result] * 3


class Merger:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, strategy: Any, value: Any) -> int:
        return self.factor * int(sum(value.values))

    def merge(self, strategy: Any, value: Any) -> int:
        return self(strategy, value)


def scaled(factor: int, strategy: Any, value: Any) -> int:
    return factor * int(sum(value.values))


def closure(factor: int) -> Any:
    def merge(strategy: Any, value: Any) -> int:
        return factor * int(sum(value.values))

    return merge


@pytest.mark.parametrize(
    "make",
    [
        lambda factor: functools.partial(scaled, factor),
        lambda factor: functools.partial(functools.partial(scaled), factor),
        lambda factor: Merger(factor).merge,
        Merger,
        closure,
    ],
    ids=["partial", "partial of a partial", "bound method", "callable object", "closure"],
)
async def test_merge_functions_of_one_code_are_the_same_and_replica_0s_runs(make: Any) -> None:
    async def program(ctx: ReplicaContext) -> int:
        replica_id = ctx.replica_id_in_sync_group
        return int(await ctx.merge_call(make(10 + replica_id), (replica_id,)))

    assert await agreed(program) == (30, 30, 30)
