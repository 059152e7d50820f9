"""What is no divergence: calls that look different and mean the same."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist import CommunicationOptions, Reason, ReduceOp, ReplicaContext
from tests.runtime.programs import Program, Relay, error_of, mirrored, replica, run

pytestmark = pytest.mark.anyio
SUM = ReduceOp.SUM


async def agreed(program: Program, order_check: str = "call_site") -> tuple[Any, ...]:
    return await run(mirrored(3, order_check), program)


# Places.


async def test_one_line_of_a_finally_block_is_one_place() -> None:
    async def program(ctx: ReplicaContext) -> int:
        total = 0
        for _ in range(1):
            try:
                if replica() == 0:
                    continue  # the compiler writes the block down once for each way out
                if replica() == 1:
                    break
                await anyio.lowlevel.checkpoint()
            finally:
                total = await ctx.all_reduce(SUM, 1)
        return total

    assert await agreed(program) == (3, 3, 3)


@pytest.mark.parametrize("files", [("a.py", "a.py"), ("a.py", "b.py")])
async def test_a_module_that_was_loaded_twice_is_one_place_and_two_files_are_two(files: tuple[str, str]) -> None:
    source = "async def program(ctx):\n    return await ctx.all_reduce('sum', 1)\n"
    spaces: list[dict[str, Any]] = [{}, {}]
    for space, file in zip(spaces, files, strict=True):
        exec(compile(source, file, "exec"), space)

    def program(ctx: ReplicaContext) -> Any:
        return spaces[replica() == 1]["program"](ctx)

    if files[0] == files[1]:
        assert await agreed(program) == (3, 3, 3)
    else:
        report = (await error_of(program)).report
        assert (report.reason, report.suspects) == (Reason.CALL_SITE, (1,))


async def two_branches(ctx: ReplicaContext, name: str | None = None) -> int:
    if replica() == 1:
        return int(await ctx.all_reduce(SUM, 1, name=name))
    return int(await ctx.all_reduce(SUM, 2, name=name))


async def helper(ctx: ReplicaContext, value: int) -> int:
    return int(await ctx.all_reduce(SUM, value))


async def through_a_helper(ctx: ReplicaContext) -> int:
    if replica() == 1:
        return await helper(ctx, 1)
    return await helper(ctx, 2)


async def group_in_two_places(ctx: ReplicaContext, name: str | None = None) -> int:
    group = ctx.new_group(range(3), name) if replica() == 1 else None
    return int(await (group or ctx.new_group(range(3), name)).all_reduce(SUM, 2 - (replica() == 1)))


def made(ctx: ReplicaContext) -> ReplicaContext:
    return ctx.new_group(range(3))


async def group_through_a_helper(ctx: ReplicaContext) -> int:
    group = made(ctx) if replica() == 1 else None
    return await helper(group or made(ctx), 2 - (replica() == 1))


@pytest.mark.parametrize(
    ("program", "order_check", "differs"),
    [
        (two_branches, "signature", False),
        (two_branches, "call_site", True),
        (functools.partial(two_branches, name="total"), "call_site", False),
        (functools.partial(two_branches, name="total"), "call_path", False),
        (through_a_helper, "call_site", False),
        (through_a_helper, "call_path", True),
        (group_in_two_places, "signature", False),
        (group_in_two_places, "call_site", True),
        (functools.partial(group_in_two_places, name="g"), "call_site", False),
        (functools.partial(group_in_two_places, name="g"), "call_path", False),
        (group_through_a_helper, "call_site", False),
        (group_through_a_helper, "call_path", True),
    ],
)
async def test_places_and_callers_are_compared_as_the_strategy_says(
    program: Program, order_check: str, differs: bool
) -> None:
    if differs:
        report = (await error_of(program, order_check=order_check)).report
        assert (report.reason, report.suspects) == (Reason.CALL_SITE, (1,))
    else:
        assert await agreed(program, order_check) == (5, 5, 5)


async def test_equal_call_paths_agree() -> None:
    async def program(ctx: ReplicaContext) -> list[int]:
        nested = [await helper(ctx, i) for i in range(2)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(helper, ctx, 1)  # the path of a child task begins in it
        return nested

    assert await agreed(program, "call_path") == ([0, 3],) * 3


# Values.


async def test_texts_do_not_depend_on_the_order_in_which_a_dict_was_filled() -> None:
    async def program(ctx: ReplicaContext, relay: Relay) -> None:
        value = {"a": 1, "b": 1} if replica() else {"b": 1, "a": 1}
        await relay.turn()
        pending = ctx.all_reduce(ReduceOp.MAX if replica() == 2 else SUM, value)
        relay.pass_on()
        await pending

    orders = itertools.permutations(range(3))
    assert len({str(await error_of(functools.partial(program, relay=Relay(order)))) for order in orders}) == 1


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
    found = await agreed(lambda ctx: call(ctx, replica()))
    assert [np.asarray(each).tolist() for each in found] == [result] * 3


class Merger:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, strategy: Any, value: Any) -> int:
        return scaled(self.factor, strategy, value)

    def merge(self, strategy: Any, value: Any) -> int:
        return scaled(self.factor, strategy, value)


def scaled(factor: int, strategy: Any, value: Any) -> int:
    return factor * int(sum(value.values))


@pytest.mark.parametrize(
    "make",
    [
        lambda factor: functools.partial(functools.partial(scaled), factor),
        lambda factor: Merger(factor).merge,
        Merger,
        lambda factor: lambda strategy, value: scaled(factor, strategy, value),
    ],
    ids=["partial", "bound method", "callable object", "closure"],
)
async def test_merge_functions_of_one_code_are_the_same_and_replica_0s_runs(make: Any) -> None:
    assert await agreed(lambda ctx: ctx.merge_call(make(10 + replica()), (replica(),))) == (30, 30, 30)
