"""Every collective of a run, on every kind of value, on one and three replicas, against plain NumPy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import aiodist_kernels as kernels
from aiodist import CommunicationOptions, ReduceOp
from aiodist_kernels import policy
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
from tests.runtime.programs import here, mirrored, on_each, replica, results

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:every leaf of this value is None")]

COUNTS = (1, 3)
NUMBERS = {**ARRAYS, **SCALARS}


def fold(op: ReduceOp, column: Sequence[Any]) -> Any:
    """Reduce a leaf's column; kernels are held to exact arithmetic by tests of their own."""
    if not isinstance(column[0], np.ndarray | np.generic):
        return kernels.reduce_numbers(op, column)
    total = kernels.reduce(op, list(map(np.asarray, column)))
    return total if isinstance(column[0], np.ndarray) else total[()]


async def check(make: Any, call: Any, wanted: Any) -> None:
    """Run a collective on some replicas and compare every result with the one wanted.

    Args:
        make: from a replica's id to the value that it passes.
        call: from that value to the handle.
        wanted: from all values to all results, by NumPy.
    """
    for count in COUNTS:
        inputs = [make(replica_id) for replica_id in range(count)]
        before = copy.deepcopy(inputs)
        found = await results(count, lambda _, inputs=inputs: call(inputs[replica()]))  # type: ignore[misc]
        for got, expected in zip(found, wanted(inputs), strict=True):
            assert_equal(got, expected)
            assert_own_and_read_only(got, inputs)
        for given, original in zip(leaves_of(inputs), leaves_of(before), strict=True):
            assert np.asarray(given).tobytes() == np.asarray(original).tobytes()
        seen = [id(one) for value in [*found, *inputs] for one in containers(value)]
        assert len(set(seen)) == len(seen)


def parts(i: int, count: int) -> Callable[[Sequence[Any]], Any]:
    """Return what puts the i-th parts of a column together."""
    return lambda column: np.concatenate([np.split(array, count)[i] for array in column])


def ops_of(name: str) -> list[ReduceOp]:
    """List the ops that are defined for a kind of value."""
    if name in BOOLS:
        return [ReduceOp.MIN, ReduceOp.MAX]
    return [op for op in ReduceOp if "complex" not in name or op not in (ReduceOp.MIN, ReduceOp.MAX)]


@pytest.mark.parametrize("name", [*NUMBERS, *BOOLS])
async def test_all_reduce(name: str) -> None:
    for op in ops_of(name):
        await check(
            {**NUMBERS, **BOOLS}[name],
            lambda value, op=op: here().all_reduce(op, value),
            lambda values, op=op: [columnwise(lambda column: fold(op, column), values)] * len(values),
        )


@pytest.mark.parametrize("name", [*NUMBERS, *BOOLS, "strings", "dates", "records"])
async def test_broadcast(name: str) -> None:
    others: dict[str, Any] = {
        "strings": lambda r: np.array([f"of {r}", "x"]),
        "dates": lambda r: np.array(["2026-11-21"], "M8[D]") + np.timedelta64(r, "D"),
        "records": lambda r: np.array([(r, r / 2)], [("a", "i4"), ("b", "f8")]),
    }
    await check(
        {**NUMBERS, **BOOLS, **others}[name],
        lambda value: here().broadcast(value, min(1, here().num_replicas_in_sync - 1)),
        lambda values: [values[min(1, len(values) - 1)]] * len(values),
    )


@pytest.mark.parametrize("name", ARRAYS)
async def test_gathers_scatters_and_exchanges(name: str) -> None:
    for axis in (0, -1):
        await check(
            ARRAYS[name],
            lambda value, axis=axis: here().all_gather(value, axis),
            lambda values, axis=axis: [columnwise(lambda column: np.concatenate(column, axis), values)] * len(values),
        )
    await check(
        ARRAYS[name],
        lambda value: here().all_to_all(value),
        lambda values: [columnwise(parts(i, len(values)), values) for i in range(len(values))],
    )
    await check(
        ARRAYS[name],
        lambda value: here().reduce_scatter("sum", value),
        lambda values: [
            columnwise(lambda column, i=i: np.split(fold(ReduceOp.SUM, column), len(values))[i], values)  # type: ignore[misc]
            for i in range(len(values))
        ],
    )


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


async def test_host_result_is_shared_and_nothing_makes_it_writeable() -> None:
    async def program() -> Any:
        result = await here().all_reduce("SUM", np.ones(2))
        with pytest.raises(ValueError, match="read-only"):
            result[0] = 5
        with pytest.raises(ValueError, match="WRITEABLE"):
            result.flags.writeable = True
        return [id(result)]

    assert len({one for (one,) in await on_each(3, program)}) == 1


async def test_dicts_that_were_filled_in_another_order_are_the_same_nest() -> None:
    for value in (1, np.float32(1), np.ones(())):
        found = await results(
            2,
            lambda ctx, value=value: ctx.all_reduce("SUM", dict.fromkeys("ab" if replica() else "ba", value)),  # type: ignore[misc]
        )
        assert list(map(list, found)) == [["b", "a"], ["a", "b"]]
        assert found == ({"a": 2, "b": 2},) * 2


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


@pytest.mark.parametrize("off_loop", [False, True])
@pytest.mark.parametrize("given", [(0, 1, 2), (1,)])
async def test_out_gets_the_result_and_is_what_the_await_gives(
    given: tuple[int, ...], off_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1 if off_loop else 1 << 40)

    async def program() -> Any:
        value: dict[str, Any] = {"w": numbers(replica(), 200, 300), "b": [numbers(replica(), 4, dtype=np.int32)]}
        out: dict[str, Any] = {"w": np.zeros((400, 300), np.float32)[::2], "b": [value["b"][0]]}
        result = await here().all_reduce("SUM", value, out=out if replica() in given else None)
        assert (result is out) == (replica() in given)
        assert result["w"].flags.writeable == (replica() in given)
        return result["w"].tolist(), result["b"][0].tolist()

    w, b = sum(numbers(r, 200, 300) for r in range(3)), sum(numbers(r, 4, dtype=np.int32) for r in range(3))
    assert await results(3, lambda _: program()) == ((w.tolist(), b.tolist()),) * 3  # type: ignore[union-attr]


# options


@pytest.mark.parametrize("keyword", ["options", "experimental_hints"])
async def test_options_change_no_result_and_may_differ_between_replicas(keyword: str) -> None:
    async def program() -> Any:
        given = CommunicationOptions(bytes_per_pack=replica(), timeout_seconds=60, implementation="RING")
        settings: dict[str, Any] = {keyword: given} if replica() else {}
        return await here().all_reduce("SUM", 1, **settings)

    assert await on_each(3, program) == (3, 3, 3)


@pytest.mark.parametrize("where", ["call", "run", "strategy"])
async def test_accumulate_in_float64(where: str) -> None:
    values = np.array([1e8, 1, -1e8], np.float32)
    wide = CommunicationOptions(accumulate="float64")

    async def program() -> Any:
        return await here().all_reduce("SUM", values[replica()], wide if where == "call" else None)

    strategy = mirrored(3, communication_options=wide if where == "strategy" else None)
    result = await strategy.run(program, options=wide if where == "run" else None)
    assert result.values == (1, 1, 1)
