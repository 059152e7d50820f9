"""`Strategy.reduce`, `gather` and `warmup`, compared with plain NumPy."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aiodist import CommunicationOptions, Mirrored, MirroredStrategy, PerReplica, ReduceOp, ReplicaContext
from aiodist._collectives.work import Work
from aiodist_kernels import plan_for, policy, warm
from tests.frameworks import toy
from tests.runtime.programs import mirrored, run, warned
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio

A, B = np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3) + 10


async def reduced(op: Any, value: Any, axis: Any = None, count: int = 2) -> Any:
    return await mirrored(count).reduce(op, value, axis)


NONE = np.zeros(0)
TINY = 1 + np.finfo(np.longdouble).eps
ALONG: dict[str, tuple[str, list[Any], Any, Any]] = {
    "mean of a ragged batch": ("MEAN", [np.arange(4.0), np.array([10.0]), NONE], 0, 3.2),
    "integer sums wrap": ("SUM", [np.full(2, 100, np.int8)] * 2, None, [-56, -56]),
    "integer means do not": ("MEAN", [np.full(2, 100, np.int8)] * 2, 0, 100),
    "half accumulates in single": ("SUM", [np.ones(4096, np.float16), np.ones(1, np.float16)], 0, np.float16(4097)),
    "long double keeps its bits": ("MEAN", [np.array([TINY]), np.array([TINY])], 0, TINY),
    "byte orders may differ": ("SUM", [np.ones(2, ">f4"), np.ones(2, "<f4")], None, [2, 2]),
    "numbers along no axis": ("SUM", [2**80, 1], (), 2**80 + 1),
    "infinities are results": ("MEAN", [np.array([np.inf, -np.inf]), np.ones(2)], 0, np.nan),
    "along several axes": ("PRODUCT", [A, A], [1, -2], 0),
    "numbers": ("SUM", [1, 2], None, 3),
    "left fold": ("SUM", [np.float32(1e8), np.float32(1), np.float32(-1e8)], None, 0),
}


@pytest.mark.parametrize(("op", "parts", "axis", "wanted"), ALONG.values(), ids=ALONG)
async def test_reduce_with_special_values_and_axes(op: str, parts: list[Any], axis: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(await reduced(op, PerReplica(parts), axis, len(parts)), wanted)


async def test_reduce_of_a_nest_keeps_types_of_leaves() -> None:
    scalars = PerReplica([np.float32(1), np.float32(2)])
    result = await reduced("SUM", {"a": PerReplica([1, 2]), "b": [PerReplica([A, B])], "c": scalars, "none": None})
    assert [type(result[key]) for key in ("a", "c", "none")] == [int, np.float32, type(None)]
    np.testing.assert_array_equal(result["b"][0], A + B)


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MEAN", "MIN", "MAX"])
async def test_reduce_of_plain_and_mirrored_values(op: str) -> None:
    counted = op in ("SUM", "PRODUCT")
    assert await reduced(op, Mirrored([2.0, 2.0])) == (4 if counted else 2)
    assert await reduced(op, 3.5, count=1) == 3.5
    if counted:
        with pytest.raises(ValueError, match=f"{op} expects a per-replica value; a plain value is the same on all"):
            await reduced(op, 3.5)
    else:
        assert await reduced(op, 3.5) == 3.5
        np.testing.assert_array_equal(await reduced(op, A), A)


async def test_gather_of_a_nest_with_ragged_components() -> None:
    value = {"x": PerReplica([A, A[:1]]), "y": [PerReplica([NONE, np.ones(2)])], "plain": "text", "none": None}
    result = await mirrored(2).gather(value, 0)
    np.testing.assert_array_equal(result["x"], np.concatenate([A, A[:1]]))
    assert result["y"][0].tolist() == [1, 1]
    assert (result["plain"], result["none"]) == ("text", None)
    mixed = await mirrored(2).gather(PerReplica([np.ones(2, ">f4"), np.ones(2, "<f4")]), 0)
    assert mixed.dtype.isnative
    alone = await mirrored(1).gather(PerReplica([A]), 0)
    np.testing.assert_array_equal(alone, A)
    assert not np.shares_memory(alone, A)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[np.ndarray], int]:
    """Draw the parts of a batch, ragged along an axis, and that axis."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(["f8", "i8", "i2", "c16", "u1", ">f4"]))
    parts = []
    for size in sizes:
        own = list(shape)
        own[axis] = size
        numbers = draw(hnp.arrays(np.int8, tuple(own)))
        parts.append(numbers.astype(dtype))
    return parts, axis


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=4), st.sampled_from(list(ReduceOp)))
def test_reduce_over_replicas_is_numpys(numbers: list[int], op: ReduceOp) -> None:
    parts = [np.full((2, 3), number, np.float32) for number in numbers]
    result = asyncio.run(mirrored(len(parts)).reduce(op.name.title(), PerReplica(parts), None))
    fold: Any = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PRODUCT": np.prod}[op.name]
    np.testing.assert_array_equal(result, fold(parts, axis=0), strict=True)
    assert not result.flags.writeable
    assert not any(np.shares_memory(result, part) for part in parts)


@given(batches(), st.sampled_from(["SUM", "MEAN", "MIN", "MAX", "gather"]))
def test_reduce_and_gather_along_an_axis_are_numpys(batch: tuple[list[np.ndarray], int], op: str) -> None:
    parts, axis = batch
    whole, value, strategy = np.concatenate(parts, axis), PerReplica(parts), mirrored(len(parts))
    if op == "gather":
        np.testing.assert_array_equal(asyncio.run(strategy.gather(value, axis)), whole, strict=True)
        return
    assume(op in ("SUM", "MEAN") or (whole.dtype.kind != "c" and whole.shape[axis]))
    local: Any = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max}[op]
    with np.errstate(all="ignore"), warned():  # of a mean of nothing
        wanted = local(whole, axis=axis, **({"dtype": whole.dtype} if op == "SUM" else {}))
    got = asyncio.run(strategy.reduce(op, value, axis))
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12, strict=True)


async def test_reduce_in_the_chosen_accumulator() -> None:
    wide = CommunicationOptions(accumulate="float64")
    parts = PerReplica([np.array([x], np.float32) for x in (1e8, 1, -1e8)])
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    native, widened = MirroredStrategy(devices), MirroredStrategy(devices, communication_options=wide)
    assert (await native.reduce("SUM", parts, None)).tolist() == [0]
    assert (await widened.reduce("SUM", parts, None)).tolist() == [1]
    assert (await widened.reduce("SUM", parts, 0)).tolist() == 1
    assert (await native.extended.reduce_to("SUM", parts, "CPU:0", wide)).tolist() == [1]


async def test_large_values_are_handled_in_worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, seen = mirrored(2), list[int]()
    value = {"a": [PerReplica([np.arange(50_000.0), np.arange(50_000.0) / 3])]}
    plain = Work.carry_out

    def spy(work: Work) -> Any:
        seen.append(threading.get_ident())
        return plain(work)

    monkeypatch.setattr(Work, "carry_out", spy)

    async def each() -> list[Any]:
        made = [strategy.reduce("SUM", value, None), strategy.gather(value, 0), strategy.reduce("MEAN", value, 0)]
        return [(await one)["a"][0] for one in made]

    warm([plan_for(op, np.dtype(float), 2, "native") for op in (ReduceOp.SUM, ReduceOp.MEAN)])
    on_loop = await each()
    assert not seen
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 8)
    for found, wanted in zip(await each(), on_loop, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert len(seen) == 3
    assert threading.get_ident() not in seen


@pytest.mark.parametrize("kind", ["U", "S", ">U9"])
async def test_strings_of_different_widths_are_gathered(kind: str) -> None:
    words = [np.array(some).astype(kind) for some in (["a"], ["bcd", "e"], [])]

    async def gathered(ctx: ReplicaContext) -> Any:
        return await ctx.all_gather({"w": words[ctx.replica_id_in_sync_group]}, 0)

    strategy, whole = mirrored(3), np.concatenate(words)
    wanted = whole.astype(whole.dtype.newbyteorder("="))
    for found in [
        await strategy.gather(PerReplica(words), 0),
        *[each["w"] for each in [*await run(strategy, gathered), *await Job(1, 2).values(gathered)]],
    ]:
        np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize("size", [3, 300_000])
async def test_results_of_tensors_are_tensors_with_memory_of_their_own(size: int) -> None:
    strategy, job = mirrored(3), Job(1, 2)
    parts = [toy.Tensor(np.full(size, float(k))) for k in range(3)]
    value = PerReplica(parts)

    async def over_workers(strategy: Any) -> Any:
        mine = parts[0] if strategy is job.strategies[0] else PerReplica(parts[1:])
        return await strategy.reduce("SUM", mine, None)

    mixed = await strategy.reduce("SUM", {"a": value, "b": [value, PerReplica([np.ones(2)] * 3)]}, None)
    several = (await strategy.extended.reduce_to("SUM", value, ["CPU:0", "CPU:1"])).values
    assert mixed["b"][1].tolist() == [3, 3]
    for total in (mixed["a"], mixed["b"][0], *several, *await job.everywhere(over_workers)):
        assert isinstance(total, toy.Tensor)
        assert total.array.sum() == 3 * size
        total.array += 1
    assert (await strategy.gather(value, 0)).shape == (3 * size,)
    assert (await strategy.reduce("MEAN", value, 0)).array == 1


async def test_warmup_compiles_kernels_and_changes_no_bit() -> None:
    strategy = mirrored(3)
    value = PerReplica([np.random.default_rng(k).standard_normal(1 << 18).astype(np.float32) for k in range(3)])
    before = await strategy.reduce("SUM", value, None)
    await strategy.warmup({"w": value}, np.float64())
    assert plan_for(ReduceOp.SUM, np.dtype(np.float32), 3, "native").kernel is not None
    assert before.tobytes() == (await strategy.reduce("SUM", value, None)).tobytes()
