"""IndexedSlices: rows combined by index in all_reduce, reduce and reduce_to, and never turned into an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist import CollectiveMismatchError, IndexedSlices, Mirrored, PerReplica, Reason
from tests.runtime.programs import here, mirrored, still_works

pytestmark = pytest.mark.anyio


def rows(values: Any, indices: Any, dense_shape: Any = (5, 2), dtype: Any = np.float32) -> IndexedSlices:
    return IndexedSlices(np.asarray(values, dtype).reshape(-1, 2), indices, dense_shape)


def listed(slices: Any) -> tuple[list[int], list[list[float]]]:
    assert isinstance(slices, IndexedSlices)
    return slices.indices.tolist(), slices.values.tolist()


PARTS = [rows([[1, 1], [2, 2], [4, 4]], [3, 0, 3]), rows([], []), rows([[10, 20]], [0])]


# In the collectives.


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", ([0, 3], [[12, 22], [5, 5]])), ("mean", ([0, 3], [[4, np.float32(22 / 3)], [np.float32(5 / 3)] * 2]))],
)
async def test_rows_are_combined_by_index(op: str, expected: Any) -> None:
    strategy = mirrored(3)
    value = PerReplica(PARTS)

    async def program(slices: IndexedSlices) -> Any:
        return await here().all_reduce(op, slices)

    results = strategy.experimental_local_results(await strategy.run(program, args=(value,)))
    assert [listed(result) for result in results] == [expected] * 3
    assert listed(await strategy.reduce(op, value, None)) == expected
    assert listed(await strategy.extended.reduce_to(op, value, "CPU:0")) == expected
    several = await strategy.extended.reduce_to(op, {"g": value}, ["CPU:0", "CPU:1"])
    assert isinstance(several["g"], Mirrored)
    assert [listed(component) for component in several["g"].values] == [expected] * 2
    assert results[0].dense_shape == (5, 2)
    assert results[0].dtype == np.float32
    assert not results[0].values.flags.writeable
    assert not results[0].indices.flags.writeable


async def test_dense_shape_is_compared_and_number_of_rows_is_not() -> None:
    strategy = mirrored(2)

    async def program(slices: IndexedSlices) -> Any:
        return await here().all_reduce("sum", slices)

    for other, reason in [
        (rows([1, 1], [0], dense_shape=(6, 2)), Reason.SHAPE),
        (rows([1, 1], [0], dense_shape=None), Reason.SHAPE),
        (IndexedSlices(np.ones((1, 3), np.float32), [0]), Reason.SHAPE),
        (rows([1, 1], [0], dtype=np.float64), Reason.DTYPE),
        (np.ones((5, 2), np.float32), Reason.DEVICE),
    ]:
        with pytest.raises(CollectiveMismatchError) as caught:
            await strategy.run(program, args=(PerReplica([PARTS[0], other]),))
        assert caught.value.report.reason is reason
        assert caught.value.report.replicas[0].call == "all_reduce(SUM, IndexedSlices(float32[5, 2]))"
        with pytest.raises(ValueError, match="must have the same"):
            await strategy.reduce("sum", PerReplica([PARTS[0], other]), None)
    await still_works(strategy)


async def test_unknown_shape() -> None:
    strategy = mirrored(2)

    result = await strategy.reduce("sum", PerReplica([rows([1, 2], [7], None), rows([1, 2], [9], None)]), None)
    assert listed(result) == ([7, 9], [[1, 2], [1, 2]])
    assert result.dense_shape is None


@pytest.mark.parametrize("op", ["min", "max", "product"])
async def test_other_ops_are_refused(op: str) -> None:
    strategy = mirrored(2)

    async def program() -> None:
        with pytest.raises(ValueError, match=f"by SUM or MEAN.*got {op.upper()}"):
            here().all_reduce(op, PARTS[0])
        with pytest.raises(TypeError, match="bool"):
            here().all_reduce("sum", rows([1, 1], [0], dtype=bool))
        with pytest.raises(TypeError, match="out must hold arrays"):
            here().all_reduce("sum", PARTS[0], out=np.zeros((5, 2), np.float32))
        await here().barrier()

    await strategy.run(program)
    with pytest.raises(ValueError, match="by SUM or MEAN"):
        await strategy.reduce(op, PerReplica(PARTS[:2]), None)
    with pytest.raises(ValueError, match="axis=None"):
        await strategy.reduce("sum", PerReplica(PARTS[:2]), 0)
    with pytest.raises(TypeError, match="gather does not take IndexedSlices"):
        await strategy.gather(PerReplica(PARTS[:2]), 0)


async def test_other_collectives_are_refused() -> None:
    async def program() -> None:
        context = here()
        arguments: dict[str, tuple[Any, ...]] = {"all_gather": (PARTS[0], 0), "broadcast": (PARTS[0],)}
        arguments |= {"reduce_scatter": ("sum", PARTS[0]), "all_to_all": (PARTS[0],)}
        for kind, given in arguments.items():
            with pytest.raises(TypeError, match=f"{kind} does not take IndexedSlices, all_reduce does"):
                getattr(context, kind)(*given)
        await context.barrier()

    await mirrored(2).run(program)


# The value itself.


def test_attributes() -> None:
    slices = IndexedSlices([[1.0, 2.0]], np.array([3], np.uint8), np.array([5, 2], np.int32))
    assert (slices.dense_shape, slices.shape, slices.indices.dtype) == ((5, 2), (5, 2), np.int64)
    assert IndexedSlices(np.zeros(0), []).shape == (None,)
    assert repr(slices) == "IndexedSlices(values=array([[1., 2.]]), indices=array([3]), dense_shape=(5, 2))"


def test_implicit_conversion_is_refused() -> None:
    with pytest.raises(TypeError, match="do not turn into an array by themselves"):
        np.asarray(PARTS[0])
    for use in (lambda s: np.ones(2) + s, lambda s: np.add(1, s), np.sum):
        with pytest.raises(TypeError, match="do not turn into an array by themselves"):
            use(PARTS[0])


@pytest.mark.parametrize(
    ("values", "indices", "shape", "error", "text"),
    [
        ([1.0], [0.5], None, TypeError, "indices must be integers"),
        ([1.0, 2.0], [0], None, ValueError, "one index for each row"),
        ([1.0], 0, None, ValueError, "one index for each row"),
        (1.0, [0], None, ValueError, "one index for each row"),
        ([1.0], [-1], None, ValueError, "indices must be 0 or more, got -1"),
        ([1.0], np.array([2**63], np.uint64), None, ValueError, "indices must be 0 or more"),
        ([1.0], [3], (3,), ValueError, "indices must be below 3"),
        ([[1.0]], [0], (3, 2), ValueError, r"must end with the shape of a row, \(1,\)"),
        ([1.0], [0], (), ValueError, "must end with the shape of a row"),
        ([1.0], [0], (3.5,), TypeError, "each of dense_shape must be an int, got 3.5"),
    ],
)
def test_invalid_parts(values: Any, indices: Any, shape: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        IndexedSlices(values, indices, shape)
