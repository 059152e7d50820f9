"""strategy.reduce and strategy.gather, against plain NumPy."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aiodist import CommunicationOptions, Mirrored, MirroredStrategy, PerReplica, ReduceOp
from aiodist_kernels import KernelSpec, warm
from tests.runtime.programs import mirrored

pytestmark = pytest.mark.anyio

A, B = np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3) + 10


def per_replica(*components: Any) -> PerReplica[Any]:
    return PerReplica(components)


async def reduced(op: Any, value: Any, axis: Any = None, count: int = 2) -> Any:
    return await mirrored(count).reduce(op, value, axis)


@pytest.mark.parametrize(
    ("op", "wanted"),
    [("SUM", A + B), ("mean", (A + B) / 2), ("Min", A), (ReduceOp.MAX, B), ("product", A * B)],
    ids=str,
)
async def test_reduce_over_replicas(op: Any, wanted: np.ndarray) -> None:
    result = await reduced(op, per_replica(A, B))
    np.testing.assert_array_equal(result, wanted, strict=True)
    assert not result.flags.writeable
    assert not np.shares_memory(result, A)


@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: str(op.name))
async def test_reduce_along_axes(op: ReduceOp) -> None:
    local: Any = {
        ReduceOp.SUM: np.sum,
        ReduceOp.MEAN: np.mean,
        ReduceOp.MIN: np.min,
        ReduceOp.MAX: np.max,
        ReduceOp.PRODUCT: np.prod,
    }[op]
    axis: Any
    for axis in (0, 1, -1, (0,), (0, 1), (-1, 0), (), [1]):
        axes = axis if isinstance(axis, list | tuple) else (axis,)
        wanted = local(np.stack([A, B]), axis=(0, *(a % 2 + 1 for a in axes)))
        np.testing.assert_allclose(await reduced(op, per_replica(A, B), axis), wanted, rtol=1e-14)


@pytest.mark.parametrize(("op", "values"), [("MEAN", [np.inf, -np.inf]), ("SUM", [6e4, 6e4]), ("PRODUCT", [6e4, 6e4])])
async def test_infinity_and_nan_along_an_axis_are_results_without_a_warning(op: str, values: list[float]) -> None:
    result = await reduced(op, per_replica(np.array(values, np.float16), np.ones(2, np.float16)), 0)
    assert not np.isfinite(result)


async def test_mean_of_a_ragged_batch_divides_by_the_true_count() -> None:
    parts = np.arange(4.0), np.array([10.0]), np.zeros(0)
    result = await reduced("MEAN", per_replica(*parts), 0, count=3)
    assert result == np.mean(np.concatenate(parts)) == 3.2


async def test_ragged_along_the_axis_in_rows() -> None:
    parts = np.ones((3, 2)), np.full((1, 2), 5.0)
    assert (await reduced("MEAN", per_replica(*parts), 0)).tolist() == [2, 2]
    assert (await reduced("SUM", per_replica(*parts), 0)).tolist() == [8, 8]
    assert (await reduced("MAX", per_replica(*parts), 0)).tolist() == [5, 5]


async def test_empty_component_takes_no_part_in_min_and_max() -> None:
    assert await reduced("MIN", per_replica(np.zeros(0), np.array([3.0])), 0) == 3
    with pytest.raises(ValueError, match=r"MAX along axis .* needs at least one element"):
        await reduced("MAX", per_replica(np.zeros(0), np.zeros(0)), 0)


async def test_sum_and_mean_of_nothing() -> None:
    assert await reduced("SUM", per_replica(np.zeros(0), np.zeros(0)), 0) == 0
    assert np.isnan(await reduced("MEAN", per_replica(np.zeros(0), np.zeros(0)), 0))


@pytest.mark.parametrize(
    ("dtype", "op", "wanted"),
    [
        ("i4", "MEAN", "f8"),
        ("i4", "SUM", "i4"),
        ("u1", "SUM", "u1"),
        ("f2", "SUM", "f2"),
        ("f2", "MEAN", "f2"),
        ("f4", "MEAN", "f4"),
        ("c8", "MEAN", "c8"),
        (np.longdouble, "MEAN", np.longdouble),
        (">f4", "SUM", "f4"),
        ("?", "MAX", "?"),
    ],
)
@pytest.mark.parametrize("axis", [None, 0])
async def test_dtype_of_the_result(dtype: Any, op: str, wanted: Any, axis: Any) -> None:
    result = await reduced(op, per_replica(np.ones(3, dtype), np.ones(3, dtype)), axis)
    assert result.dtype == np.dtype(wanted)
    assert result.dtype.isnative


async def test_integer_sums_wrap_and_integer_means_do_not() -> None:
    value = per_replica(np.full(2, 100, np.int8), np.full(2, 100, np.int8))
    assert (await reduced("SUM", value)).tolist() == [-56, -56]
    assert await reduced("SUM", value, 0) == np.int8(400 - 512)
    assert await reduced("MEAN", value, 0) == 100


async def test_half_precision_accumulates_in_single() -> None:
    value = per_replica(np.full(4096, 1, np.float16), np.full(1, 1, np.float16))
    assert await reduced("SUM", value, 0) == np.float16(4097)
    assert await reduced("MEAN", value, 0) == 1


async def test_mean_of_longdouble_keeps_its_bits() -> None:
    tiny = np.finfo(np.longdouble).eps
    result = await reduced("MEAN", per_replica(np.array([1 + tiny]), np.array([1 + tiny])), 0)
    assert result == 1 + tiny


async def test_byte_orders_may_differ() -> None:
    value = per_replica(np.ones(2, ">f4"), np.ones(2, "<f4"))
    assert (await reduced("SUM", value)).tolist() == [2, 2]
    assert await reduced("SUM", value, 0) == 4
    assert str((await mirrored(2).gather(value, 0)).dtype) == "float32"


async def test_byte_orders_may_differ_where_a_kernel_serves() -> None:
    warm([KernelSpec(ReduceOp.MEAN, np.dtype("f4"), 2)])
    value = per_replica(np.ones(1000, "<f4"), np.full(1000, 3, ">f4"))
    assert set((await reduced("MEAN", value)).tolist()) == {2}


async def test_python_numbers_and_scalars_keep_their_type() -> None:
    assert await reduced("SUM", per_replica(1, 2)) == 3
    assert type(await reduced("SUM", per_replica(1, 2))) is int
    assert type(await reduced("MEAN", per_replica(1, 2))) is float
    assert type(await reduced("SUM", per_replica(np.float32(1), np.float32(2)))) is np.float32
    assert await reduced("MAX", per_replica(True, False)) is True


async def test_nests() -> None:
    result = await reduced("SUM", {"a": per_replica(1, 2), "b": [per_replica(A, B)], "none": None})
    assert result["a"] == 3
    np.testing.assert_array_equal(result["b"][0], A + B)
    assert result["none"] is None


async def test_plain_values() -> None:
    for op in ("MEAN", "MIN", "MAX"):
        assert await reduced(op, 3.5) == 3.5
    np.testing.assert_array_equal(await reduced("MEAN", A), A)
    for op in ("SUM", "PRODUCT"):
        with pytest.raises(ValueError, match=f"{op} expects a per-replica value; a plain value is the same on all"):
            await reduced(op, 3.5)
        assert await reduced(op, 3.5, count=1) == 3.5


async def test_mirrored_values_count_once_for_each_replica() -> None:
    value = Mirrored([2.0, 2.0])
    assert await reduced("SUM", value) == 4
    assert await reduced("PRODUCT", value) == 4
    assert await reduced("MEAN", value) == 2
    assert await reduced("MAX", value) == 2


async def test_left_fold_in_replica_order() -> None:
    parts = [np.float32(1e8), np.float32(1), np.float32(-1e8)]
    assert await reduced("SUM", PerReplica(parts), count=3) == (parts[0] + parts[1]) + parts[2]


BAD: list[tuple[str, Any, Any, Any, type[Exception], str]] = [
    ("unknown op", "AVG", per_replica(1, 2), None, ValueError, "expected a reduce op"),
    ("components", "SUM", per_replica(1, 2, 3), None, ValueError, "expected 2 components, one for each replica, got 3"),
    ("shapes", "SUM", per_replica(np.ones(2), np.ones(3)), None, ValueError, "same shape.*give the axis"),
    ("dtypes", "SUM", per_replica(np.ones(2), np.ones(2, "f4")), None, ValueError, "same dtype"),
    ("types", "SUM", per_replica(np.ones(()), np.float64(1)), None, ValueError, "same type"),
    ("bools", "SUM", per_replica(True, False), None, TypeError, "SUM of bool"),
    ("bool arrays along", "MEAN", per_replica(A > 0, B > 0), 0, TypeError, "MEAN of bool"),
    ("complex", "MAX", per_replica(1j, 2j), None, TypeError, "MAX of complex"),
    ("strings", "SUM", per_replica("a", "b"), None, TypeError, "got an object of type"),
    ("axis out of range", "SUM", per_replica(A, B), 2, ValueError, "axis must be from -2 to 1"),
    ("axis of a scalar", "SUM", per_replica(1, 2), 0, ValueError, "at least one axis"),
    ("axis twice", "SUM", per_replica(A, B), (0, -2), ValueError, "names an axis twice"),
    ("axis no int", "SUM", per_replica(A, B), 0.5, TypeError, "axis must be an int"),
    ("ragged elsewhere", "SUM", per_replica(A, A[:, :2]), 0, ValueError, "may differ along axis 0 only"),
    ("ranks", "SUM", per_replica(A, A[0]), 0, ValueError, "may differ along axis 0 only"),
]


@pytest.mark.parametrize(
    ("op", "value", "axis", "error", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
async def test_bad_reduce(op: str, value: Any, axis: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        await reduced(op, value, axis)
    assert type(caught.value) is error


# gather


@pytest.mark.parametrize("axis", [0, 1, -1])
async def test_gather(axis: int) -> None:
    result = await mirrored(2).gather(per_replica(A, B), axis)
    np.testing.assert_array_equal(result, np.concatenate([A, B], axis), strict=True)
    assert not result.flags.writeable


async def test_gather_of_ragged_parts_and_nests() -> None:
    value = {"x": per_replica(A, A[:1]), "y": [per_replica(np.zeros(0), np.ones(2))], "plain": "text", "none": None}
    result = await mirrored(2).gather(value, 0)
    np.testing.assert_array_equal(result["x"], np.concatenate([A, A[:1]]))
    assert result["y"][0].tolist() == [1, 1]
    assert (result["plain"], result["none"]) == ("text", None)


async def test_gather_of_one_component_is_a_copy() -> None:
    result = await mirrored(1).gather(per_replica(A), 0)
    np.testing.assert_array_equal(result, A)
    assert not np.shares_memory(result, A)


@pytest.mark.parametrize(
    ("value", "axis", "error", "text"),
    [
        (per_replica(A, B, A), 0, ValueError, "expected 2 components"),
        (per_replica(A, B), 2, ValueError, "axis must be from -2 to 1"),
        (per_replica(1, 2), 0, ValueError, r"got a scalar; pass np\.array"),
        (per_replica(A, A[:, :1]), 0, ValueError, "may differ along axis 0 only"),
        (per_replica(A, A.astype("f4")), 0, ValueError, "float64.*float32"),
        (per_replica(A, "b"), 0, TypeError, "got an object of type"),
        (per_replica(A, B), None, TypeError, "axis must be an int"),
    ],
    ids=["components", "axis", "scalars", "sizes", "dtypes", "strings", "no axis"],
)
async def test_bad_gather(value: Any, axis: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        await mirrored(2).gather(value, axis)


# Properties, against NumPy.


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[np.ndarray], int]:
    """Draw the parts of a batch, ragged along an axis, and that axis."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([np.float64, np.int64, np.int16, np.complex128]))
    parts = []
    for size in sizes:
        own = list(shape)
        own[axis] = size
        numbers = draw(hnp.arrays(np.int8, tuple(own)))
        parts.append(numbers.astype(dtype))
    return parts, axis


@given(batches(), st.sampled_from(["SUM", "MEAN", "MIN", "MAX"]))
def test_reduce_along_an_axis_is_numpys(batch: tuple[list[np.ndarray], int], op: str) -> None:
    parts, axis = batch
    whole = np.concatenate(parts, axis)
    ordered = op in ("MIN", "MAX")
    if ordered and (whole.dtype.kind == "c" or not whole.shape[axis]):
        return
    got = asyncio.run(mirrored(len(parts)).reduce(op, PerReplica(parts), axis))
    local: Any = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max}[op]
    with np.errstate(all="ignore"):
        wanted = (
            local(whole, axis=axis, **({} if op != "SUM" else {"dtype": whole.dtype})) if whole.shape[axis] else got
        )
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)
    assert got.shape == np.sum(whole, axis=axis).shape


@given(batches())
def test_gather_is_numpys(batch: tuple[list[np.ndarray], int]) -> None:
    parts, axis = batch
    got = asyncio.run(mirrored(len(parts)).gather(PerReplica(parts), axis))
    np.testing.assert_array_equal(got, np.concatenate(parts, axis), strict=True)


@given(st.lists(hnp.arrays(np.float32, 3, elements=st.floats(-1e6, 1e6, width=32)), min_size=1, max_size=5))
def test_sum_over_replicas_is_a_left_fold(parts: list[np.ndarray]) -> None:
    got = asyncio.run(mirrored(len(parts)).reduce("SUM", PerReplica(parts), None))
    wanted = parts[0].copy()
    for part in parts[1:]:
        wanted = wanted + part
    assert got.tobytes() == wanted.tobytes()


async def test_accumulator_holds_here_too() -> None:
    wide = CommunicationOptions(accumulate="float64")
    parts = PerReplica([np.array([x], np.float32) for x in (1e8, 1, -1e8)])
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    native, widened = MirroredStrategy(devices), MirroredStrategy(devices, communication_options=wide)
    assert (await native.reduce("SUM", parts, None)).tolist() == [0]
    assert (await widened.reduce("SUM", parts, None)).tolist() == [1]
    assert (await widened.reduce("SUM", parts, 0)).tolist() == 1
    assert (await native.extended.reduce_to("SUM", parts, "CPU:0", wide)).tolist() == [1]
