"""Plans on the host: every kind of collective has NumPy's results, at once and as work, in memory of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import IndexedSlices
from aiodist._arrays.leaves import LeafType
from aiodist._collectives import host, kinds, out
from aiodist._collectives.execution import executor
from aiodist._collectives.host import HostExecutor, fold_slices
from aiodist._collectives.kinds import Collective
from aiodist._collectives.out import Bounds, bounds, conflicting
from aiodist._collectives.work import Work
from aiodist_kernels import ReduceOp, plan_for, policy, reduce
from tests.collectives.reference import CASES, Case, spec_of
from tests.kernels import arrays
from tests.kernels.arrays import SINGLE, assert_same_bits


def results(found: Any, values: list[Any]) -> list[Any]:
    """Run an executor, also as work, and return the result of each position."""
    result = found.run(values)
    if isinstance(result, Work):
        result = result.carry_out()
    return [result] * len(values) if found.shared else result


@contextmanager
def work_for_threads(*, always: bool) -> Iterator[None]:
    """If ``always``, make work for worker threads of small results, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BLOCKING_FROM_MOVED", "LEAST_MOVED_BY_A_THREAD") if always else ():
            patch.setattr(policy, name, 1)
        patch.setattr(host, "COST_FROM", 0 if always else host.COST_FROM)
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=25)
@given(
    size=st.integers(1, 5),
    layout=st.sampled_from(["C", "F", "big-endian", "mixed"]),
    seed=st.integers(0, 99),
    large=st.booleans(),
    single=st.booleans(),
)
def test_every_kind(case: Case, size: int, layout: str, seed: int, *, large: bool, single: bool) -> None:
    columns = [case.inputs(size, np.dtype(dtype), layout, seed + k) for k, dtype in enumerate(("f4", "i2", "u1"))]
    rows: list[Any] = columns[0] if single else [list(row) for row in zip(*columns, strict=True)]
    with np.errstate(all="ignore"), work_for_threads(always=large):
        found = executor.__wrapped__(case.collective(rows[0], size), size)
        case.check(columns, results(found, rows), single=single)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_large_values_become_work(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 4 << 20)
    small, large = case.inputs(2, SINGLE), [np.tile(array, (64, 64, 16)) for array in case.inputs(2, SINGLE, seed=1)]
    assert not isinstance(HostExecutor(case.collective(small[0], 2), 2).run(small), Work)
    if case.kind is not kinds.ALL_GATHER:
        assert isinstance(HostExecutor(case.collective(large[0], 2), 2).run(large), Work)


@pytest.mark.parametrize("as_work", [False, True])
def test_scalars_numbers_and_slices_in_one_nest(as_work: bool) -> None:
    slices = [IndexedSlices(np.full((i + 1, 2), i, SINGLE), np.arange(i + 1), (4, 2)) for i in range(3)]
    values: list[Any] = [[np.float32(i), i, 0.5 * i, slices[i], np.full(3, i)] for i in range(3)]
    found = executor(Collective(kinds.ALL_REDUCE, ReduceOp.SUM, None, spec_of(values[0])), 3)
    with work_for_threads(always=as_work):
        scalar, integer, number, rows, array = results(found, values)[1]
    assert (scalar, integer, number) == (3, 3, 1.5)
    assert (type(scalar), type(integer), type(number)) == (np.float32, int, float)
    assert (rows.indices.tolist(), rows.values.tolist()) == ([0, 1, 2], [[3, 3], [3, 3], [2, 2]])
    assert array.tolist() == [3, 3, 3]


# Memory.


@pytest.mark.parametrize("case", CASES, ids=str)
def test_large_results_reuse_blocks(case: Case, made: list[int]) -> None:
    values = case.inputs(3, SINGLE)
    found = HostExecutor(case.collective(values[0], 3), 3)
    kept: list[Any] = []
    with np.errstate(all="ignore"):
        wanted = [array.copy() for array in case.wanted(values)]
        for _ in range(200):
            kept = [results(found, values), *kept[:2]]
    assert len(made) <= 5 * 3
    for got in kept:
        for result, expected in zip(got, wanted, strict=True):
            assert_same_bits(result, expected)
            with pytest.raises(ValueError, match="WRITEABLE"):
                result.flags.writeable = True


# Kernels.


@pytest.mark.parametrize("there_is_a_compiler", [True, False])
def test_first_large_reduction_waits_for_its_kernel_once(
    monkeypatch: pytest.MonkeyPatch, there_is_a_compiler: bool
) -> None:
    op, dtype, asked = ReduceOp.MAX, np.dtype(np.int16), []
    compile_for = policy.compile_for

    def watched(*args: Any) -> Any:
        asked.append(args)
        if not there_is_a_compiler:
            raise ImportError("Numba does not load")
        return compile_for(*args)

    monkeypatch.setattr(policy, "compile_for", watched)
    policy.plan_for.cache_clear()
    values = [[np.full(100_000, i, dtype), np.full(9, i, dtype), np.full(1 << 20, i, dtype)] for i in range(5)]

    def maximum() -> HostExecutor:
        return HostExecutor(Collective(kinds.ALL_REDUCE, op, None, spec_of(values[0])), 5)

    work = maximum().run(values)
    assert not asked, "compiled in the event loop's thread"
    assert all((leaf == 4).all() for leaf in work.carry_out())
    for again in (maximum(), maximum()):
        found = again.run(values)
        assert all((leaf == 4).all() for leaf in (found.carry_out() if isinstance(found, Work) else found))
    assert len(asked) == 1
    assert (plan_for(op, dtype, 5, "native").kernel is not None) is there_is_a_compiler


# Rows.


rows_of_replicas = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-8, 8)), max_size=6), min_size=1, max_size=4
)


@pytest.mark.parametrize("dtype", ["i2", "f2", "f4", ">f4", "f8", "c8"])
@given(parts=rows_of_replicas)
def test_rows_are_added_in_the_order_of_replicas(dtype: str, parts: list[list[tuple[int, int]]]) -> None:
    kind = np.dtype(dtype)
    slices = [
        IndexedSlices((np.array([[v] for _, v in part]).reshape(-1, 1) * 1000.1).astype(kind), [i for i, _ in part])
        for part in parts
    ]
    wide: Any = np.float32 if dtype == "f2" else kind.newbyteorder("=")
    totals: dict[int, Any] = {}
    for index, row in [pair for part in slices for pair in zip(part.indices.tolist(), part.values, strict=True)]:
        totals[index] = totals[index] + row.astype(wide) if index in totals else row.astype(wide)
    result = fold_slices(ReduceOp.SUM, slices)
    assert result.indices.tolist() == sorted(totals)
    assert result.dtype == kind.newbyteorder("=")
    for row, index in zip(result.values, sorted(totals), strict=True):
        assert_same_bits(row, totals[index].astype(result.dtype))


@pytest.mark.parametrize("accumulate", ["native", "float64"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
@pytest.mark.parametrize("dtype", [*arrays.FLOATS, *arrays.COMPLEX], ids=str)
def test_rows_with_equal_indices_are_reduced_like_arrays(op: ReduceOp, dtype: np.dtype, accumulate: Any) -> None:
    values = arrays.buffers(3, 5, (60, 4), dtype)  # with infinities and NaN, which must not warn
    slices = [IndexedSlices(array, np.arange(60)) for array in values]
    result = host.fold(op, slices, LeafType.INDEXED_SLICES, accumulate)
    assert_same_bits(result.values, reduce(op, values, accumulate=accumulate))


# Callers' buffers.


def asked(value: Any, op: ReduceOp = ReduceOp.SUM) -> Collective:
    return Collective(kinds.ALL_REDUCE, op, None, spec_of(value))


@pytest.mark.parametrize(
    ("buffers", "match"),
    [
        ([np.zeros(4)] * 2, "a buffer of its own for each leaf"),
        ([(whole := np.zeros(8))[:4], whole[4:]], None),
        ([(whole := np.zeros(7))[:4], whole[3:]], "a buffer of its own for each leaf"),
        ([(whole := np.zeros(8))[::2], whole[1::2]], None),
        ([np.lib.stride_tricks.as_strided(np.zeros(4), (4,), (0,)), np.zeros(4)], "whose elements overlap"),
        ([np.lib.stride_tricks.as_strided(np.zeros(4), (4,), (4,)), np.zeros(4)], "whose elements overlap"),
        ([np.lib.stride_tricks.as_strided(np.zeros(9), (2, 2), (8, 8)), np.zeros((2, 2))], "whose elements overlap"),
        ([np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (16, 24)), np.zeros((3, 3))], "whose elements overlap"),
        ([np.zeros(8)[::-2], np.zeros((4, 5))[:, 2]], None),
    ],
    ids=[
        *("one for two", "halves", "overlap", "interleaved", "one element", "half an element"),
        *("an axis", "an axis with gaps", "any strides"),
    ],
)
def test_overlapping_buffers_are_refused(buffers: list[np.ndarray], match: str | None) -> None:
    value = [np.ones(4), np.ones(4)] if buffers[0].ndim == 1 else [np.ones(buffers[0].shape)] * 2
    if match is None:
        assert out.checked(asked(value), value, buffers) == buffers
        return
    with pytest.raises(ValueError, match=match):
        out.checked(asked(value), value, buffers)


@pytest.mark.parametrize(
    ("value", "buffer", "error", "match"),
    [
        (np.ones(3), [1.0, 2.0, 3.0], TypeError, r"got \[1.0, 2.0, 3.0\]"),
        (np.ones(3), 1.0, TypeError, "out must hold arrays, where the value has arrays"),
        (2.5, np.zeros(()), TypeError, "out must hold arrays, where the value has arrays"),
        (np.ones(3), np.zeros(3, np.float32), TypeError, "the result's dtype float64, got float32"),
        (np.ones(3), np.zeros((3, 1)), ValueError, r"the result's shape \(3,\), got \(3, 1\)"),
        (np.ones(3), np.broadcast_to(np.zeros(()), 3), ValueError, "out must be writeable"),
    ],
)
def test_invalid_buffers_are_refused(value: Any, buffer: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        out.checked(asked(value), [value], [buffer])


def test_conflicting_memory() -> None:
    memory = np.zeros(20)
    a, b, c = memory[:5], memory[5:10], memory[10:15]

    def conflict(columns: list[list[np.ndarray]], targets: list[np.ndarray]) -> bool:
        inputs = {bounds(array, leaf) for leaf, column in enumerate(columns) for array in column}
        outs = [bounds(array, leaf) for leaf, array in enumerate(targets)]
        return conflicting(inputs.difference(outs), outs)

    assert not conflict([[a, a], [b, b]], [a, b])
    assert not conflict([[a, b], [a, b]], [c, memory[15:]])
    assert conflict([[a, a], [b, b]], [b, c])
    assert conflict([[a, a], [b, b]], [c, memory[4:9]])
    assert conflict([[a, a], [b, b]], [c, memory[12:17]])
    assert conflict([[a, a], [b, a]], [a, b])
    assert conflict([[a, a]], [memory[3:8]])
    assert not conflict([[a, a]], [a])
    assert not conflict([[a], [a[:0]]], [a, a[:0]])
    assert conflicting([Bounds(0, 20, 0)], [Bounds(0, 20, 0)])
    assert conflicting([], [Bounds(0, 20, 0), Bounds(0, 20, 0)])
    assert conflicting([Bounds(0, 100, 0), Bounds(20, 40, 1)], [Bounds(40, 60, 2)])
