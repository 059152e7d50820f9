"""Every collective, on every kind of value, on one, two and three replicas, against plain NumPy."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist import CommunicationOptions, ReduceOp
from tests.collectives.kinds_of_values import (
    ARRAYS,
    BOOLS,
    SCALARS,
    assert_equal,
    assert_own_and_read_only,
    columnwise,
    containers,
    leaves_of,
    numbers,
)
from tests.runtime.programs import here, on_each, replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.anyio

COUNTS = (1, 2, 3)
NUMBERS = {**ARRAYS, **SCALARS}
UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def fold(op: ReduceOp, column: Sequence[Any]) -> Any:
    """Reduce a leaf's column, from left to right, in its own dtype; Python numbers as Python does."""
    first = column[0]
    if op is ReduceOp.MEAN:
        return mean(column)
    if not isinstance(first, np.ndarray | np.generic):
        step: Any = {ReduceOp.SUM: _add, ReduceOp.PRODUCT: _multiply, ReduceOp.MIN: min, ReduceOp.MAX: max}[op]
        return functools.reduce(step, column)
    wide = np.float32 if first.dtype == np.float16 else first.dtype
    with np.errstate(over="ignore"):
        total = functools.reduce(UFUNCS[op], [np.asarray(leaf, wide) for leaf in column])
    return _like(first, np.asarray(total).astype(first.dtype.newbyteorder("=")))


def mean(column: Sequence[Any]) -> Any:
    first = column[0]
    if not isinstance(first, np.ndarray | np.generic):
        return functools.reduce(_add, column) / len(column)
    kind = first.dtype.kind
    wide = np.complex128 if kind == "c" else np.float64
    total = functools.reduce(np.add, [np.asarray(leaf, wide) for leaf in column])
    result = np.float64 if kind in "iu" else first.dtype.newbyteorder("=")
    return _like(first, np.asarray(total / len(column)).astype(result))


def _add(a: Any, b: Any) -> Any:
    return a + b


def _multiply(a: Any, b: Any) -> Any:
    return a * b


def _like(leaf: Any, array: np.ndarray) -> Any:
    return array if isinstance(leaf, np.ndarray) else array[()]


async def check(make: Any, call: Any, wanted: Any) -> None:
    """Run a collective on one, two and three replicas and compare every result with the one wanted.

    Args:
        make: from a replica's id to the value that it passes.
        call: from that value to the handle.
        wanted: from all values to all results, by NumPy.
    """
    for count in COUNTS:
        inputs = [make(replica_id) for replica_id in range(count)]
        before = copy.deepcopy(inputs)

        results = await each_on_its_own(count, lambda inputs=inputs: call(inputs[replica()]))
        for got, expected in zip(results, wanted(inputs), strict=True):
            assert_equal(got, expected)
            assert_own_and_read_only(got, inputs)
        for given, original in zip(inputs, before, strict=True):
            assert_equal_bytes(given, original)
        seen = [id(one) for result in [*results, *inputs] for one in containers(result)]
        assert len(set(seen)) == len(seen)


async def each_on_its_own(count: int, call: Any) -> list[Any]:
    """Return what the await gave to each replica, the very objects: not what `run` makes of them."""
    results: list[Any] = [None] * count

    async def program() -> None:
        results[replica()] = await call()

    await on_each(count, program)
    return results


def assert_equal_bytes(a: Any, b: Any) -> None:
    for mine, theirs in zip(leaves_of(a), leaves_of(b), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def part(i: int, count: int, reduce: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Return what gives the i-th part of a reduced column."""
    return lambda column: np.split(reduce(column), count)[i]


def parts(i: int, count: int) -> Callable[[Sequence[Any]], Any]:
    """Return what puts the i-th parts of a column together."""
    return lambda column: np.concatenate([np.split(array, count)[i] for array in column])


def ops_of(name: str) -> list[ReduceOp]:
    """List the ops that are defined for a kind of value."""
    unordered = "complex" in name
    return [op for op in ReduceOp if not (unordered and op in (ReduceOp.MIN, ReduceOp.MAX))]


@pytest.mark.parametrize("name", NUMBERS)
async def test_all_reduce(name: str) -> None:
    for op in ops_of(name):
        await check(
            NUMBERS[name],
            lambda value, op=op: here().all_reduce(op, value),
            lambda values, op=op: [columnwise(lambda column: fold(op, column), values)] * len(values),
        )


@pytest.mark.parametrize("name", BOOLS)
async def test_all_reduce_of_bools_means_all_and_any(name: str) -> None:
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        await check(
            BOOLS[name],
            lambda value, op=op: here().all_reduce(op, value),
            lambda values, op=op: [columnwise(lambda column: fold(op, column), values)] * len(values),
        )


@pytest.mark.parametrize("name", ARRAYS)
async def test_all_gather(name: str) -> None:
    for axis in (0, -1):
        await check(
            ARRAYS[name],
            lambda value, axis=axis: here().all_gather(value, axis),
            lambda values, axis=axis: [columnwise(lambda column: np.concatenate(column, axis), values)] * len(values),
        )


async def test_all_gather_of_ragged_arrays() -> None:
    await check(
        lambda r: {"rows": numbers(r, r, 2), "columns": numbers(r, 3, 2)},
        lambda value: here().all_gather(value, 0),
        lambda values: [columnwise(lambda column: np.concatenate(column, 0), values)] * len(values),
    )
    await check(
        lambda r: numbers(r, 2, 2 * r + 1),
        lambda value: here().all_gather(value, axis=-1),
        lambda values: [np.concatenate(values, 1)] * len(values),
    )


@pytest.mark.parametrize("name", [*NUMBERS, *BOOLS, "strings", "dates", "records"])
async def test_broadcast(name: str) -> None:
    others: dict[str, Any] = {
        "strings": lambda r: np.array([f"of {r}", "x"]),
        "dates": lambda r: np.array(["2026-11-21"], "M8[D]") + np.timedelta64(r, "D"),
        "records": lambda r: np.array([(r, r / 2)], [("a", "i4"), ("b", "f8")]),
    }
    make = {**NUMBERS, **BOOLS, **others}[name]
    for source in range(2):
        await check(
            make,
            lambda value, source=source: here().broadcast(value, min(source, here().num_replicas_in_sync - 1)),
            lambda values, source=source: [values[min(source, len(values) - 1)]] * len(values),
        )


@pytest.mark.parametrize("name", ARRAYS)
async def test_reduce_scatter(name: str) -> None:
    for op in ops_of(name):
        await check(
            ARRAYS[name],
            lambda value, op=op: here().reduce_scatter(op, value),
            lambda values, op=op: [
                columnwise(part(i, len(values), lambda column: fold(op, column)), values) for i in range(len(values))
            ],
        )


async def test_reduce_scatter_along_another_axis() -> None:
    await check(
        lambda r: numbers(r, 2, 6),
        lambda value: here().reduce_scatter("max", value, axis=-1),
        lambda values: np.split(np.max(values, axis=0), len(values), axis=1),
    )


@pytest.mark.parametrize("name", ARRAYS)
async def test_all_to_all(name: str) -> None:
    await check(
        ARRAYS[name],
        lambda value: here().all_to_all(value),
        lambda values: [columnwise(parts(i, len(values)), values) for i in range(len(values))],
    )


@pytest.mark.parametrize(("split", "concat"), [(0, 1), (1, 0), (-1, 0), (1, -1), (-2, -1)])
async def test_all_to_all_along_two_axes(split: int, concat: int) -> None:
    await check(
        lambda r: numbers(r, 6, 12),
        lambda value: here().all_to_all(value, split, concat),
        lambda values: [
            np.concatenate([np.split(a, len(values), split)[i] for a in values], concat) for i in range(len(values))
        ],
    )


async def test_barrier_gives_none() -> None:
    async def program() -> Any:
        return await here().barrier()

    for count in COUNTS:
        assert await on_each(count, program) == (None,) * count


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_same_object_passed_by_all_is_counted_for_each(count: int) -> None:
    shared = np.ones(3)

    async def program() -> Any:
        context = here()
        return (
            (await context.all_reduce("SUM", shared)).tolist(),
            await context.all_reduce("SUM", 7),
            (await context.all_reduce("SUM", {"x": shared, "y": shared}))["y"].tolist(),
            (await context.all_gather(shared, 0)).tolist(),
            (await context.all_reduce("PRODUCT", shared * 2)).tolist(),
        )

    wanted = ([count] * 3, 7 * count, [count] * 3, [1] * 3 * count, [2.0**count] * 3)
    assert await on_each(count, program) == (wanted,) * count
    assert shared.tolist() == [1, 1, 1]


async def test_host_result_is_shared_and_read_only() -> None:
    async def program() -> Any:
        result = await here().all_reduce("SUM", np.ones(2))
        with pytest.raises(ValueError, match="read-only"):
            result[0] = 5
        return [id(result)]

    assert len({one for (one,) in await on_each(3, program)}) == 1


async def test_input_changed_after_the_await_changes_no_result() -> None:
    async def program() -> Any:
        mine, context = np.full(6, replica() + 1.0), here()
        results = [
            await context.broadcast(mine),
            await context.all_gather(mine, 0),
            await context.all_reduce("MAX", mine),
            await context.all_to_all(mine),
            await context.reduce_scatter("SUM", mine),
        ]
        before = [result.tolist() for result in results]
        await context.barrier()
        mine[:] = -1
        await context.barrier()
        return before == [result.tolist() for result in results]

    for count in COUNTS:
        assert all(await on_each(count, program))


async def test_reduction_is_a_left_fold_whoever_comes_first() -> None:
    values = [np.float32(1e8), np.float32(1), np.float32(-1e8)]

    async def program() -> Any:
        return await here().all_reduce("SUM", values[replica()])

    assert await on_each(3, program) == ((values[0] + values[1]) + values[2],) * 3


async def test_mean_of_float32_is_taken_in_float64() -> None:
    values = np.array([2**24, 1, 1, 2**24], np.float32)

    async def program() -> Any:
        return await here().all_reduce("MEAN", values[replica() : replica() + 1])

    wanted = np.mean(values.astype(np.float64)).astype(np.float32)
    assert [one.tolist() for one in await on_each(4, program)] == [[wanted]] * 4


async def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    async def program() -> Any:
        return await here().all_reduce("SUM", np.full(2, 1 + replica(), ml_dtypes.bfloat16))

    for result in await on_each(3, program):
        assert result.dtype == ml_dtypes.bfloat16
        assert result.tolist() == [6, 6]


@pytest.mark.parametrize("op", ["SUM", "sum", "Sum", "sUm"])
async def test_op_by_its_name_in_any_case(op: str) -> None:
    async def program() -> Any:
        return await here().all_reduce(op, 1), (await here().reduce_scatter(op, np.ones(2))).tolist()

    assert await on_each(2, program) == ((2, [2]), (2, [2]))


async def test_dicts_that_were_filled_in_another_order_are_the_same_nest() -> None:
    for value in (1, np.float32(1), np.ones(())):
        results = await each_on_its_own(
            2, lambda value=value: here().all_reduce("SUM", dict.fromkeys("ab" if replica() else "ba", value))
        )
        assert results == [{"a": 2, "b": 2}] * 2


async def test_byte_orders_may_differ_between_replicas() -> None:
    async def program() -> Any:
        value = np.ones(2, ">f4" if replica() else "<f4")
        context = here()
        return [
            (str(one.dtype), one.tolist())
            for one in (
                await context.all_reduce("SUM", value),
                await context.all_gather(value, 0),
                await context.broadcast(value, 1),
                await context.all_to_all(value),
            )
        ]

    wanted = [("float32", [2, 2]), ("float32", [1] * 4), ("float32", [1, 1]), ("float32", [1, 1])]
    assert await on_each(2, program) == (wanted, wanted)


# out=


@pytest.mark.parametrize("count", COUNTS)
async def test_out_gets_the_result_and_is_what_the_await_gives(count: int) -> None:
    async def program() -> Any:
        value = {"w": numbers(replica(), 2, 3), "b": [numbers(replica(), 4, dtype=np.int32)]}
        out: dict[str, Any] = {"w": np.zeros((2, 3), np.float32), "b": [np.zeros(4, np.int32)]}
        result = await here().all_reduce("SUM", value, out=out)
        assert result is out
        assert result["w"].flags.writeable
        return out["w"].copy(), out["b"][0].copy()

    for w, b in await on_each(count, program):
        np.testing.assert_array_equal(w, sum(numbers(r, 2, 3) for r in range(count)), strict=True)
        np.testing.assert_array_equal(b, sum(numbers(r, 4, dtype=np.int32) for r in range(count)), strict=True)


async def test_out_may_be_the_value_itself() -> None:
    async def program() -> Any:
        value = np.full(3, replica() + 1.0)
        await here().all_reduce("SUM", value, out=value)
        return value.tolist()

    assert await on_each(3, program) == ([6, 6, 6],) * 3


async def test_out_of_one_replica_only() -> None:
    async def program() -> Any:
        out = np.zeros(2) if replica() else None
        result = await here().all_reduce("SUM", np.ones(2), out=out)
        assert result.flags.writeable == bool(replica())
        return result.tolist()

    assert await on_each(2, program) == ([2, 2], [2, 2])


async def test_out_of_a_mean_of_integers_is_float64() -> None:
    async def program() -> Any:
        out = np.zeros(2)
        await here().all_reduce("MEAN", np.full(2, replica()), out=out)
        return out.tolist()

    assert await on_each(2, program) == ([0.5, 0.5],) * 2


async def test_out_strided_fortran_and_big_endian() -> None:
    async def program() -> Any:
        value = numbers(replica(), 4, 4)
        first, second = np.zeros((8, 4), np.float32)[::2], np.asfortranarray(np.zeros((4, 4), np.float32))
        await here().all_reduce("SUM", value, out=first)
        await here().all_reduce("SUM", value, out=second)
        return first.tolist() == second.tolist() == (numbers(0, 4, 4) + numbers(1, 4, 4)).tolist()

    assert await on_each(2, program) is not None
    assert all(await on_each(2, program))


# options


@pytest.mark.parametrize("keyword", ["options", "experimental_hints"])
async def test_options_change_no_result(keyword: str) -> None:
    given: dict[str, Any] = {
        keyword: CommunicationOptions(bytes_per_pack=64, timeout_seconds=60, implementation="RING")
    }

    async def program() -> Any:
        return await here().all_reduce("SUM", 1, **given)

    assert await on_each(3, program) == (3, 3, 3)


async def test_options_may_differ_between_replicas() -> None:
    async def program() -> Any:
        given = CommunicationOptions(bytes_per_pack=replica()) if replica() else None
        return await here().all_reduce("SUM", 1, given)

    assert await on_each(3, program) == (3, 3, 3)


@pytest.mark.parametrize("where", ["call", "run", "strategy"])
async def test_accumulate_in_float64(where: str) -> None:
    values = np.array([1e8, 1, -1e8], np.float32)
    wide = CommunicationOptions(accumulate="float64")

    async def program() -> Any:
        return await here().all_reduce("SUM", values[replica()], wide if where == "call" else None)

    from tests.runtime.programs import mirrored

    strategy = mirrored(3, communication_options=wide if where == "strategy" else None)
    result = await strategy.run(program, options=wide if where == "run" else None)
    assert result.values == (1, 1, 1)


async def test_random_programs_repeat_bit_by_bit() -> None:
    async def program() -> Any:
        generator = np.random.default_rng(replica())
        total = np.zeros(5, np.float32)
        for _ in range(10):
            total += await here().all_reduce("MEAN", generator.standard_normal(5).astype(np.float32) * 1e5 + total)
        return total.tobytes()

    first = await on_each(3, program)
    assert await on_each(3, program) == first
    assert len(set(first)) == 1
