"""Every collective of a run, on every kind of value, on one and three replicas, against plain NumPy."""

from __future__ import annotations

import asyncio
import copy
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiodist_kernels as kernels
from aiodist import CollectiveMismatchError, CommunicationOptions, Reason, ReduceOp
from aiodist._collectives import kinds
from aiodist_kernels import policy
from tests.collectives.kinds_of_values import (
    ANYTHING,
    DTYPES,
    assert_equal,
    assert_own_and_read_only,
    columnwise,
    containers,
    leaves_of,
    makers,
    numbers,
)
from tests.collectives.reference import Case
from tests.runtime.programs import here, mirrored, on_each, replica, results

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:every leaf of this value is None")]


def fold(op: ReduceOp, column: Sequence[Any]) -> Any:
    """Reduce a leaf by the kernels, which have tests of their own."""
    if not isinstance(column[0], np.ndarray | np.generic):
        return kernels.reduce_numbers(op, column)
    total = kernels.reduce(op, list(map(np.asarray, column)))
    return total if isinstance(column[0], np.ndarray) else total[()]


def check(make: Any, count: int, call: Callable[[Any], Any], wanted: Callable[[Sequence[Any], int], Any]) -> None:
    """Run a collective and compare each replica's result with NumPy's, leaf by leaf.

    Args:
        make: makes a replica's value from its id.
        count: the number of replicas.
        call: makes the handle from a value.
        wanted: makes a replica's expected result of a leaf from all replicas' leaves and its id.
    """
    inputs = [make(replica_id) for replica_id in range(count)]
    before = copy.deepcopy(inputs)
    found = asyncio.run(results(count, lambda _: call(inputs[replica()])))
    for index, got in enumerate(found):
        assert_equal(got, columnwise(lambda column, index=index: wanted(column, index), inputs))  # type: ignore[misc]
        assert_own_and_read_only(got, inputs)
    for given_leaf, original in zip(leaves_of(inputs), leaves_of(before), strict=True):
        assert np.asarray(given_leaf).tobytes() == np.asarray(original).tobytes()
    seen = [id(one) for value in [*found, *inputs] for one in containers(value)]
    assert len(set(seen)) == len(seen)


counts = st.sampled_from([1, 3])


@pytest.mark.parametrize("op", list(ReduceOp))
@given(data=st.data(), count=counts)
def test_all_reduce(op: ReduceOp, data: st.DataObject, count: int) -> None:
    without = "c" if op in (ReduceOp.MIN, ReduceOp.MAX) else "b"  # the op is not defined for this kind
    dtypes, others = [d for d in DTYPES if d.kind != without], ANYTHING[1:3] if without == "c" else ANYTHING[:1]
    make = data.draw(makers(False, dtypes, others))
    check(make, count, lambda value: here().all_reduce(op, value), lambda column, _: fold(op, column))


@settings(max_examples=200)
@given(make=makers(False, DTYPES, ANYTHING), count=counts)
def test_broadcast(make: Any, count: int) -> None:
    check(make, count, lambda value: here().broadcast(value, count - 1), lambda column, _: column[-1])


KINDS = [
    Case(kinds.ALL_GATHER, None, 0),
    Case(kinds.ALL_GATHER, None, -1),
    Case(kinds.ALL_TO_ALL, None, (0, 0)),
    Case(kinds.REDUCE_SCATTER, ReduceOp.SUM, 0),
    Case(kinds.SCAN, ReduceOp.SUM),
]


@pytest.mark.parametrize("case", KINDS, ids=str)
@given(data=st.data(), count=counts)
def test_gather_exchange_scatter_and_scan(case: Case, data: st.DataObject, count: int) -> None:
    make = data.draw(makers(True, DTYPES[:-1] if case.op else DTYPES))  # there is no sum of bool
    check(make, count, lambda value: case.call(here(), value), lambda column, me: case.wanted(column)[me])


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_same_object_counts_once_per_replica(count: int) -> None:
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
        with pytest.raises(ValueError, match="WRITEABLE"):
            result.flags.writeable = True
        return [id(result)]

    assert len({one for (one,) in await on_each(3, program)}) == 1


async def test_subclass_of_a_number_counts_as_the_number() -> None:
    class Level(enum.IntEnum):
        HIGH = 2

    class Celsius(float): ...

    values: Any = [1, 0.5], [Level.HIGH, Celsius(2.5)]
    for found in await on_each(2, lambda: here().all_reduce("sum", values[replica()])):
        assert [(type(one), one) for one in found] == [(int, 3), (float, 3.0)]


async def test_records_with_other_fields_are_a_mismatch() -> None:
    values = np.zeros(2, [("a", ">i4"), ("b", "f4")]), np.zeros(2, [("a", "<i4"), ("c", "f4")])
    with pytest.raises(CollectiveMismatchError) as caught:
        await on_each(2, lambda: here().all_gather(values[replica()], 0))
    assert caught.value.report.reason is Reason.DTYPE
    assert "all_gather([('a', '<i4'), ('c', '<f4')][*], axis=0)" in str(caught.value)


async def test_dicts_in_another_order_are_the_same_nest() -> None:
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
@pytest.mark.parametrize("passed", [(0, 1, 2), (1,)])
async def test_out_is_filled_and_returned(
    passed: tuple[int, ...], off_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1 if off_loop else 1 << 40)

    async def program() -> Any:
        w, b, c = numbers(replica(), 200, 300), *np.arange(8.0).reshape(2, 4) + replica()
        out: Any = [np.zeros((400, 300), np.float32)[::2], [c, b]]  # in the memory of the other leaf
        result: Any = await here().all_reduce("SUM", [w, [b, c]], out=out if replica() in passed else None)
        assert (result is out) == (replica() in passed)
        assert result[0].flags.writeable == (replica() in passed)
        return result[0].tolist(), [leaf.tolist() for leaf in result[1]]

    w, (b, c) = sum(numbers(r, 200, 300) for r in range(3)), np.arange(8.0).reshape(2, 4) * 3 + 3
    assert await on_each(3, program) == ((w.tolist(), [b.tolist(), c.tolist()]),) * 3  # type: ignore[union-attr]


# options


@pytest.mark.parametrize("keyword", ["options", "experimental_hints"])
async def test_options_change_no_result_and_may_differ_between_replicas(keyword: str) -> None:
    async def program() -> Any:
        wide = CommunicationOptions(bytes_per_pack=replica(), timeout_seconds=60, implementation="RING")
        settings: dict[str, Any] = {keyword: wide} if replica() else {}
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
