"""Collectives give the same on several workers as on one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiodist
from aiodist import ReduceOp, ReplicaContext
from aiodist._strategy.scope import replicas_of
from aiodist._workers.exchange import SEGMENT
from tests.frameworks import toy
from tests.runtime.programs import mirrored, run, turns
from tests.workers.simulated import Job, on_uvloop_too

LAYOUTS = [(1,), (2, 2), (1, 3), (3, 1, 2, 2)]
DTYPES = [np.int8, np.uint32, np.int64, np.float16, np.float32, np.float64, np.complex64, np.complex128, np.longdouble]
pytestmark = pytest.mark.anyio


def whole(ctx: ReplicaContext, dtype: Any, size: int) -> np.ndarray:
    """Return small whole numbers, whose sums are exact in every order."""
    return np.random.default_rng(ctx.replica_id_in_sync_group).integers(0, 4, size).astype(dtype)


def same(a: Any, b: Any) -> None:
    """Compare two nests: types, keys, values, dtypes, and whether arrays are writeable."""
    assert type(a) is type(b)
    if isinstance(a, aiodist.IndexedSlices):
        np.testing.assert_array_equal(a.values, b.values)
        np.testing.assert_array_equal(a.indices, b.indices)
    elif isinstance(a, (list, tuple)):
        for left, right in zip(a, b, strict=True):
            same(left, right)
    elif isinstance(a, dict):
        same(list(a.items()), list(b.items()))
    else:
        np.testing.assert_array_equal(a, b)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.flags.writeable == b.flags.writeable


async def check(program: Any, layout: tuple[int, ...], **options: Any) -> None:
    expected = await run(mirrored(sum(layout)), program)
    same(await Job(*layout, **options).values(program), list(expected))


@pytest.mark.parametrize("options", [{}, {"reduction": "ordered"}], ids=str)
@pytest.mark.parametrize("size", [3, 1000, SEGMENT // 4 + 1], ids=["in the record", "beside it", "in segments"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_reductions(layout: tuple[int, ...], size: int, options: dict[str, str]) -> None:
    async def program(ctx: ReplicaContext) -> Any:
        found = []
        large = size > SEGMENT // 4  # for one kernel, because each must be compiled
        for dtype in (np.float32,) if large else DTYPES:
            for op in (ReduceOp.SUM,) if large else ReduceOp:
                if np.dtype(dtype).kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
                    continue
                found.append(await ctx.all_reduce(op, whole(ctx, dtype, size)))
        sizes = (SEGMENT // 4 - 1, SEGMENT // 4, 5) if large else (size,)
        found += await ctx.all_reduce("SUM", [whole(ctx, np.float32, each) for each in sizes])
        return found

    await check(program, layout, **options)


NESTS: list[Callable[[Any], Any]] = [lambda x: x, lambda x: [x, np.ones(300)]]


@on_uvloop_too
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_kinds_of_values(layout: tuple[int, ...]) -> None:
    async def program(ctx: ReplicaContext) -> Any:
        r = ctx.replica_id_in_sync_group
        slices = aiodist.IndexedSlices(np.full((r + 1, 2), r), np.arange(r + 1), (9, 2))
        nest = {"w": whole(ctx, np.float32, 700), "b": [whole(ctx, np.float64, 2), r + 10**15], "l": 0.5 * r}
        return [
            await ctx.all_reduce("MEAN", nest),
            await ctx.all_reduce("SUM", nest),
            await ctx.all_reduce("MAX", {"a": np.float32(r), "b": r == 1, "c": np.array([r == 0, True])}),
            await ctx.all_reduce("SUM", [r + 10**15, r, 0.5 * r, np.float32(r)]),
            await ctx.all_reduce("MAX", -(2**63)),
            *[await ctx.all_reduce("SUM", nest([0.1, 1e16, -1e16][r % 3])) for nest in NESTS],  # order matters
            await ctx.all_reduce("SUM", slices),
            await ctx.all_reduce("SUM", whole(ctx, ">f4", 5)),
            await ctx.all_reduce("MIN", np.array([np.nan if r == 1 else r, -0.0])),
            await ctx.all_reduce("SUM", ()),
            await ctx.all_reduce("SUM", np.broadcast_to(np.float64(r), (40, 50))),
            await ctx.all_reduce("SUM", np.zeros((0, 3))),
            await ctx.all_reduce("SUM", np.asfortranarray(np.arange(6.0).reshape(2, 3) * r)),
        ]

    await check(program, layout)


@pytest.mark.parametrize("size", [1, 300], ids=["in the record", "beside it"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_what_moves_values(layout: tuple[int, ...], size: int) -> None:
    n = sum(layout)

    async def program(ctx: ReplicaContext) -> Any:
        r = ctx.replica_id_in_sync_group
        mine = np.arange(2 * n * size).reshape(2, n * size) + 1000 * r
        day = np.datetime64("2026-11-23") + r
        anything = [np.array([f"{r}", "yz"]), np.array([day]), 2j * r, r == 1, np.zeros((0, 2)), np.array(r, ">i4")]
        return [
            await ctx.all_gather(np.full((2, r + size), r), -1),
            await ctx.all_gather({"a": np.full(r, r, np.int8), "b": [np.ones((1, 2))]}, 0),
            await ctx.broadcast({"a": mine, "b": r, "c": np.float16(r)}, n - 1),
            await ctx.broadcast(np.full(size, r), 0),
            await ctx.broadcast([anything, mine.T], n - 1),
            await ctx.reduce_scatter("SUM", mine, 1),
            await ctx.reduce_scatter("MEAN", {"a": mine.astype(np.float32)}, -1),
            await ctx.scan("SUM", {"a": mine, "b": r, "c": 0.5 * r, "d": np.float16(r)}),
            await ctx.all_to_all(mine, 1, 0),
            await ctx.all_to_all({"a": mine.T.copy(), "b": [np.arange(n) + r]}, 0, 0),
        ]

    await check(program, layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_merge_call_runs_once_for_each_worker_with_its_values(layout: tuple[int, ...]) -> None:
    job = Job(*layout)

    async def program(ctx: ReplicaContext) -> Any:
        async def merge(strategy: Any, mine: Any) -> Any:
            total = await strategy.reduce("SUM", mine, None)
            inner = strategy.experimental_local_results(await strategy.run(lambda: 1))[0]
            return total + inner

        before = ctx.all_reduce("SUM", 1)
        merged = ctx.merge_call(merge, (np.array([ctx.replica_id_in_sync_group]),))
        after = ctx.all_reduce("SUM", 2)
        return int((await merged)[0]), await after, await before

    n = sum(layout)
    assert await job.values(program) == [(n * (n - 1) // 2 + 1, 2 * n, n)] * n


async def test_merge_call_that_nobody_awaits_runs_when_the_others_come_later() -> None:
    merged: list[Any] = []

    async def program(ctx: ReplicaContext) -> None:
        await turns(2 * ctx.replica_id_in_sync_group)
        ctx.merge_call(lambda _, value: merged.append(value), (ctx.replica_id_in_sync_group,))

    with pytest.warns(RuntimeWarning, match="never awaited merge_call"):
        await Job(1, 1).values(program)
    assert sorted(merged) == [0, 1]


@pytest.mark.parametrize("nest", NESTS, ids=["in the record", "beside it"])
@pytest.mark.parametrize(("mine", "op"), [(2**63, "MIN"), (-(2**63) - 1, "MAX"), (2**62, "SUM")])
async def test_python_ints_fit_int64_or_every_worker_raises(mine: int, op: str, nest: Callable[[Any], Any]) -> None:
    async def program(ctx: ReplicaContext) -> Any:
        with pytest.raises(OverflowError, match="must fit int64"):
            await ctx.all_reduce(op, nest(mine if ctx.replica_id_in_sync_group % 2 else 2**62))
        largest = await ctx.broadcast(nest(2**63 - 1), 1)
        with pytest.raises(OverflowError, match="must fit int64"):
            await ctx.scan("SUM", nest(2**62))
        sums = await ctx.all_reduce("SUM", nest(-(2**61)))
        assert repr(largest).strip("[").startswith(str(2**63 - 1))
        assert repr(sums).strip("[").startswith(str(-(2**61) * ctx.num_replicas_in_sync))
        if ctx.replica_id_in_sync_group:
            with pytest.raises(OverflowError, match="must fit int64"):
                await ctx.all_reduce("MAX", nest(mine * 2))
        await ctx.join()

    async def outside(strategy: Any) -> Any:
        return await strategy.reduce(op, aiodist.PerReplica([mine] * replicas_of(strategy).local), None)

    for layout in [(1, 1), (2, 1)]:
        job = Job(*layout)
        await job.values(program)
        for outcome in await job.everywhere(outside):
            assert isinstance(outcome, OverflowError), outcome


async def test_first_replica_says_how_to_accumulate() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        first = ctx.replica_id_in_sync_group == 0
        options = aiodist.CommunicationOptions(accumulate="float64") if first else None
        return await ctx.all_reduce("SUM", np.full(1, 0.1 if first else 2.0**20, np.float32), options)

    for layout in [(1, 1, 1), (2, 1)]:
        await check(program, layout)


async def test_framework_arrays_are_returned() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        total = 0.0
        for size in (2, 200):  # in the record, and beside it
            found = await ctx.all_reduce("SUM", toy.Tensor(np.ones(size)))
            assert isinstance(found, toy.Tensor)
            found.array[...] += 1  # which no other replica sees
            total += found.array.sum()
            out = toy.Tensor(np.zeros(size))
            assert await ctx.all_reduce("SUM", toy.Tensor(np.ones(size)), out=out) is out
            assert set(out.array) == {3}
        return total

    for layout in [(1, 2), (1, 1, 1)]:
        assert await Job(*layout).values(program) == [800.0 + 8.0] * 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_reduce_and_gather_outside_of_replicas(layout: tuple[int, ...]) -> None:
    async def program(strategy: Any) -> Any:
        first, local = replicas_of(strategy).share.own.start, replicas_of(strategy).local
        values = [np.arange(3.0 * (r + 1)).reshape(-1, 3) + r for r in range(first, first + local)]
        ragged = aiodist.PerReplica(values) if local > 1 else values[0]
        firsts = aiodist.PerReplica([value[0] for value in values]) if local > 1 else values[0][0]
        return [
            await strategy.reduce("SUM", firsts, None),
            (await strategy.reduce("MEAN", {"a": firsts, "b": None}, None))["a"],
            *[await strategy.reduce(op, ragged, 0) for op in ReduceOp],
            await strategy.reduce("MEAN", ragged, (0, 1)),
            await strategy.gather(ragged, 0),
            await strategy.extended.reduce_to("SUM", firsts, "CPU:0"),
        ]

    expected = await program(aiodist.MirroredStrategy([f"CPU:{i}" for i in range(sum(layout))]))
    for found in await Job(*layout).everywhere(program):
        assert not isinstance(found, Exception), found
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other)


@pytest.mark.parametrize("layout", [(2, 2), (3, 1), (1, 1, 1, 1)], ids=str)
async def test_one_value_for_all_replicas_is_reduced(layout: tuple[int, ...]) -> None:
    value = np.arange(6.0).reshape(2, 3)

    async def program(strategy: Any) -> Any:
        nest = {"plain": value, "mirrored": aiodist.Mirrored([value] * replicas_of(strategy).local)}
        return [await strategy.reduce(op, nest, axis) for op in ("MEAN", "MIN", "MAX") for axis in (None, 0, (0, 1))]

    expected = await program(aiodist.MirroredStrategy([f"CPU:{i}" for i in range(sum(layout))]))
    for found in await Job(*layout).everywhere(program):
        same(found, expected)


# Repeated calls: what is kept of a call must not show in the results of the next.

FEW = [(1, 1), (2, 1), (1, 1, 1)]
SIZES = {"in the record": 20, "in one segment": 3000, "in several": 300_000}


@pytest.mark.parametrize("layout", FEW, ids=str)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_earlier_results_do_not_change(layout: tuple[int, ...], size: int) -> None:
    async def program(ctx: ReplicaContext) -> list[Any]:
        r = ctx.replica_id_in_sync_group
        value = np.empty(size, np.float32)
        kept = []
        for step in range(4):
            value[...] = step + r  # which the caller may change as soon as the step is complete
            kept.append(await ctx.all_reduce(ReduceOp.SUM, value))
        with pytest.raises(ValueError, match="read-only"):
            kept[0][0] = 1
        value[...] = -1
        return kept

    n = sum(layout)
    for kept in await Job(*layout).values(program):
        for step, total in enumerate(kept):
            np.testing.assert_array_equal(total, np.full(size, n * step + n * (n - 1) // 2, np.float32))


def askew(value: Any) -> Any:
    """Return an unaligned copy of an array, as of a file behind a header."""
    found = np.empty(value.nbytes + 1, np.uint8)[1:].view(value.dtype).reshape(value.shape)
    found[...] = value
    return found


VALUES: list[Callable[[np.ndarray], Any]] = [
    lambda grid: grid,
    np.asfortranarray,
    lambda grid: grid.astype(np.float32),
    lambda grid: grid.astype(">f4"),
    lambda grid: grid.astype(np.int64),
    lambda grid: grid[0].astype(np.float16),
    lambda grid: {"a": grid, "b": [grid[0], grid[::2]]},
    lambda grid: {"a": grid.astype(np.float32), "b": np.ones(3, np.float32)},
    lambda grid: grid[:0],
    askew,
    lambda grid: float(grid[0, 0]),
]
"""Values of whole numbers, whose sums are exact in any order."""


@settings(max_examples=25)
@given(
    layout=st.sampled_from([*FEW, (2, 2)]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(VALUES), st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX]), st.booleans(),
            st.sampled_from(["native", "float64"]), st.booleans(),
        ),
        max_size=10,
    ),
)  # fmt: skip
def test_any_sequence_of_calls_at_one_call_site(layout: tuple[int, ...], steps: list[Any]) -> None:
    async def program(ctx: ReplicaContext) -> list[Any]:
        grid = np.arange(600.0).reshape(20, 30) % 50 + ctx.replica_id_in_sync_group
        group = ctx.new_group(range(ctx.num_replicas_in_sync - 1, -1, -1))
        found: list[Any] = []
        for make, op, at_once, accumulate, in_group in steps:
            where, options = group if in_group else ctx, aiodist.CommunicationOptions(accumulate=accumulate)
            handle = where.all_reduce(op, make(grid), options)
            found.append(await handle if at_once else handle)
        return [found[i] if steps[i][2] else await found[i] for i in range(len(steps))]

    async def compare() -> None:
        same(await Job(*layout).values(program), list(await run(mirrored(sum(layout)), program)))

    anyio.run(compare)


async def test_a_replica_that_calls_again_and_again_lets_other_tasks_run() -> None:
    async def program(ctx: ReplicaContext) -> int:
        ended = anyio.Event()
        steps = 0

        async def beside() -> None:
            await turns(5)
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beside)
            while not await ctx.all_reduce("MIN", int(ended.is_set())):
                steps += 1
        return steps

    for layout in [(1,), (1, 1)]:
        assert all(steps > 0 for steps in await Job(*layout).values(program))
