"""Calls that come again: what is known of them from before must not show in what they give.

The digest of a call is taken from a table where the same place has asked for the same before. Everything that the plan
depends on and the signature does not tell is varied here, at one place of the program.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import CommunicationOptions, ReduceOp, ReplicaContext
from tests.workers.simulated import Job, on_both_loops

pytestmark = pytest.mark.anyio
LAYOUTS = [(1, 1), (2, 1), (1, 1, 1)]
SIZES = {"in the record": 20, "in one segment": 3000, "in several": 300_000}
OPS = [ReduceOp.SUM, ReduceOp.MEAN]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def wide(numbers: list[float]) -> Any:
    return np.add.reduce(np.array(numbers, np.float64)).astype(np.float32)


@layouts
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_results_that_were_handed_out_stay_as_they_are(layout: tuple[int, ...], size: int) -> None:
    async def program(ctx: ReplicaContext) -> list[Any]:
        r = ctx.replica_id_in_sync_group
        value = np.empty(size, np.float32)
        kept = []
        for step in range(4):
            value[...] = step + r  # the caller's own again, as soon as the step is complete
            kept.append(await ctx.all_reduce(ReduceOp.SUM, value))
        with pytest.raises(ValueError, match="read-only"):
            kept[0][0] = 1
        value[...] = -1
        return kept

    n = sum(layout)
    for kept in await Job(*layout).values(program):
        for step, total in enumerate(kept):
            np.testing.assert_array_equal(total, np.full(size, n * step + n * (n - 1) // 2, np.float32))


@layouts
async def test_options_of_a_call_count_though_the_call_is_known(layout: tuple[int, ...]) -> None:
    brought = [1e8, 1.0, -1e8]

    async def program(ctx: ReplicaContext) -> list[float]:
        value = np.full(1000, brought[ctx.replica_id_in_sync_group], np.float32)
        found = []
        for accumulate in ("native", "float64", "native", "float64"):
            options = CommunicationOptions(accumulate=accumulate)
            found.append(float((await ctx.all_reduce(ReduceOp.SUM, value, options))[0]))
        return found

    own = brought[: sum(layout)]
    native = await Job(*layout).values(program)
    for found in native:
        assert found[1] == found[3] == wide(own)
        assert found[0] == found[2]


@layouts
async def test_first_replica_says_how_to_accumulate_though_the_call_is_known(layout: tuple[int, ...]) -> None:
    brought = [1e8, 1.0, -1e8]

    async def program(ctx: ReplicaContext) -> list[float]:
        r = ctx.replica_id_in_sync_group
        options = CommunicationOptions(accumulate="native" if r else "float64")
        value = np.full(1000, brought[r], np.float32)
        return [float((await ctx.all_reduce(ReduceOp.SUM, value, options))[0]) for _ in range(3)]

    n = sum(layout)
    assert await Job(*layout).values(program) == [[wide(brought[:n])] * 3] * n


@layouts
async def test_ops_dtypes_orders_and_nests_take_turns_at_one_place(layout: tuple[int, ...]) -> None:
    def cases(r: int) -> list[tuple[Any, Any]]:
        grid = np.arange(600.0).reshape(20, 30) + r
        return [
            (ReduceOp.SUM, grid),
            (ReduceOp.MEAN, grid),
            (ReduceOp.SUM, np.asfortranarray(grid)),
            (ReduceOp.MEAN, grid.astype(np.float32)),
            (ReduceOp.SUM, grid.astype(">f4")),
            (ReduceOp.SUM, grid.astype(np.longlong)),
            (ReduceOp.MAX, grid.astype(np.int64)),
            (ReduceOp.MEAN, grid.astype(np.int64)),
            (ReduceOp.SUM, grid.astype(np.float16)),
            (ReduceOp.SUM, {"a": grid, "b": [grid[0], grid[::2]]}),
            (ReduceOp.MEAN, {"a": grid.astype(np.float32), "b": np.ones(3, np.float32)}),
            (ReduceOp.SUM, {"a": grid, "b": grid.astype(np.float32)}),
            (ReduceOp.SUM, np.empty((0, 4))),
        ]

    def expected(op: ReduceOp, values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: expected(op, [value[key] for value in values]) for key in values[0]}
        if isinstance(values[0], list):
            return [expected(op, list(column)) for column in zip(*values, strict=True)]
        stacked = np.array(values)
        if op is ReduceOp.MEAN:
            return stacked.mean(axis=0, dtype=np.float64)
        return stacked.max(axis=0) if op is ReduceOp.MAX else stacked.sum(axis=0)

    async def program(ctx: ReplicaContext) -> list[Any]:
        return [await ctx.all_reduce(op, value) for _ in range(2) for op, value in cases(ctx.replica_id_in_sync_group)]

    n = sum(layout)
    by_replica = [cases(r) for r in range(n)]
    for found in await Job(*layout).values(program):
        for index, result in enumerate(found):
            case = index % len(by_replica[0])
            op = by_replica[0][case][0]
            _check(result, expected(op, [cases[case][1] for cases in by_replica]))


def _check(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            _check(found[key], expected[key])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            _check(one, other)
    else:
        np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=2e-3)
        assert found.shape == expected.shape
        assert not found.flags.writeable


def askew(value: Any) -> Any:
    """Return an array whose numbers lie a byte beside where the machine wants them, as of a file behind a header."""
    found = np.empty(value.nbytes + 1, np.uint8)[1:].view(value.dtype).reshape(value.shape)
    found[...] = value
    return found


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_numbers_need_not_lie_where_the_machine_wants_them(size: int, dtype: Any) -> None:
    async def program(ctx: ReplicaContext) -> list[Any]:
        r = ctx.replica_id_in_sync_group
        value = np.arange(size).astype(dtype) + r
        return [
            await ctx.all_reduce(ReduceOp.SUM, brought)
            for brought in (askew(value), value if r else askew(value), [askew(value)], [askew(value), askew(value)])
        ]

    total = 2 * np.arange(size) + 1
    for found in await Job(1, 1).values(program):
        for result in (*found[:2], *found[2], *found[3]):
            np.testing.assert_array_equal(result, total)


async def test_groups_and_runs_of_other_replicas_do_not_share_what_is_known() -> None:
    async def total(ctx: ReplicaContext, value: Any) -> float:
        return float((await ctx.all_reduce(ReduceOp.MEAN, value))[0])

    async def program(ctx: ReplicaContext) -> list[float]:
        r = ctx.replica_id_in_sync_group
        value = np.full(500, float(r))
        found = [await total(ctx, value)]
        for members in ([0, 1], [1, 2], [0, 1, 2, 3], [3, 0]):
            if r in members:
                found.append(await total(ctx.new_group(members), value))
            found.append(await total(ctx, value))
        return found

    everyone = 1.5
    expected = [
        [everyone, 0.5, everyone, everyone, everyone, everyone, everyone, everyone],
        [everyone, 0.5, everyone, 1.5, everyone, everyone, everyone, everyone],
        [everyone, everyone, 1.5, everyone, everyone, everyone, everyone],
        [everyone, everyone, everyone, everyone, everyone, 1.5, everyone],
    ]
    found = await Job(2, 1, 1).values(program)
    assert [sorted(one) for one in found] == [sorted(one) for one in expected]


async def test_strategies_of_other_layouts_do_not_share_what_is_known() -> None:
    async def program(ctx: ReplicaContext) -> float:
        return float((await ctx.all_reduce(ReduceOp.MEAN, np.full(500, float(ctx.replica_id_in_sync_group))))[0])

    for layout in [(1, 1), (1, 1, 1, 1), (2, 2), (1, 1)]:
        for options in ({}, {"reduction": "ordered"}, {"accumulate": "float64"}):
            job = Job(*layout, **options)
            for _ in range(2):
                assert set(await job.values(program)) == {(sum(layout) - 1) / 2}


@on_both_loops
@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.sampled_from([1, 40, 900]), st.sampled_from(list(ReduceOp)[:2]), st.booleans()), max_size=12)
)
def test_any_sequence_of_known_calls(loop: tuple[str, dict[str, Any]], steps: list[tuple[int, ReduceOp, bool]]) -> None:
    async def program(ctx: ReplicaContext) -> list[float]:
        r = ctx.replica_id_in_sync_group
        handles = []
        found = []
        for size, op, at_once in steps:
            handle = ctx.all_reduce(op, np.full(size, r + 1.0))
            if at_once:
                found.append(float((await handle)[0]))
            else:
                handles.append((len(found), handle))
                found.append(0.0)
        for place, handle in handles:
            found[place] = float((await handle)[0])
        return found

    async def check() -> None:
        expected = [3.0 if op is ReduceOp.SUM else 1.5 for _, op, _ in steps]
        assert await Job(1, 1).values(program) == [expected] * 2

    backend, options = loop
    anyio.run(check, backend=backend, backend_options=options)


async def test_a_replica_that_only_meets_lets_other_tasks_run() -> None:
    async def program(ctx: ReplicaContext) -> int:
        ended = anyio.Event()
        steps = 0

        async def beside() -> None:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beside)
            while not await ctx.all_reduce("MIN", int(ended.is_set())):
                steps += 1
        return steps

    for layout in [(1,), (1, 1)]:
        assert all(steps > 0 for steps in await Job(*layout).values(program))


class Label(enum.StrEnum):
    LOSS = "loss"


async def by_barrier(ctx: ReplicaContext, name: str) -> None:
    await ctx.barrier(name=name)


async def by_gather(ctx: ReplicaContext, name: str) -> None:
    await ctx.all_gather(np.ones(2), 0, name=name)


async def by_sum(ctx: ReplicaContext, name: str) -> None:
    for _ in range(2):
        assert (await ctx.all_reduce("SUM", np.ones(2), name=name)).tolist() == [2.0, 2.0]


async def by_group(ctx: ReplicaContext, name: str) -> None:
    await ctx.new_group([0, 1], name=name).barrier()


@pytest.mark.parametrize("meet", [by_barrier, by_gather, by_sum, by_group], ids=lambda meet: meet.__name__)
@pytest.mark.parametrize("other", [Label.LOSS, np.str_("loss")], ids=["enum", "numpy"])
async def test_equal_names_are_the_same_whatever_kind_of_string_they_are(
    other: str, meet: Callable[[ReplicaContext, str], Awaitable[None]]
) -> None:
    async def program(ctx: ReplicaContext) -> None:
        await meet(ctx, other if ctx.replica_id_in_sync_group else "loss")

    await Job(1, 1).values(program)
