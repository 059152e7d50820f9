# SPDX-License-Identifier: Apache-2.0
"""Kernels give the bits of the NumPy tier, and serve exactly when they are ready and pay."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist_kernels import (
    Accumulate,
    KernelSpec,
    ReduceOp,
    compiled_tier,
    is_ready,
    kernels_cpu,
    kernels_small,
    pays_from,
    policy,
    reduce,
    reduce_scalars,
    warm,
)
from aiodist_kernels.numpy_tier import fold_for
from aiodist_kernels.plans import find_plan
from aiodist_kernels.policy import MIB
from aiodist_kernels.quiet import quietly
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, COMPLEX, FLOATS, assert_same_bits
from tests.kernels.test_reduce import DEFINED

SINGLE = np.dtype(np.float32)
HALF = np.dtype(np.float16)
SUM, MEAN, MIN, MAX, PRODUCT = ReduceOp

ONE_OF_EACH_KIND: list[np.dtype] = [HALF, SINGLE, np.dtype(np.int16), np.dtype(np.uint8), COMPLEX[0], np.dtype(bool)]
WIDE: Accumulate = "float64"
# Every rule with three buffers. Every other form takes a rule's steps as they are, so some rules show that
# it is right: each operation and, in the form for any number of buffers, each kind of number.
FORMS = [(SUM, 16), (MEAN, 2), (MIN, 8), (MAX, 16), (PRODUCT, 2), (SUM, 8)]
KERNELS: list[tuple[ReduceOp, np.dtype, int, Accumulate]] = [
    *[(op, dtype, 3, "native") for op, dtype in DEFINED],
    *[(op, dtype, 17, "native") for op, dtype in DEFINED if dtype == SINGLE],
    *[(MAX if dtype.kind == "b" else SUM, dtype, 17, "native") for dtype in ONE_OF_EACH_KIND if dtype != SINGLE],
    *[(op, dtype, 3, WIDE) for op in (SUM, MEAN, PRODUCT) for dtype in FLOATS],
    (SUM, BFLOAT16, 17, WIDE),
    (PRODUCT, COMPLEX[0], 17, WIDE),
    *[(op, SINGLE, count, "native") for op, count in FORMS],
    *[(SUM, dtype, count, "native") for dtype in FLOATS[:2] for count in (2, 16)],
]


def both_tiers(
    op: ReduceOp, buffers: list[np.ndarray], accumulate: Accumulate, out: np.ndarray, *, streaming: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Reduce on the compiled tier, whatever the policy says, and on the NumPy tier."""
    dtype, count = buffers[0].dtype, len(buffers)
    warm([KernelSpec(op, dtype, count, accumulate)])
    plan = find_plan(op, dtype, accumulate)
    _, kernel = plan.kernels[compiled_tier.form(count)]
    least = 0 if streaming else 1 << 62
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "STREAMING_FROM", least)
        run = compiled_tier.bind(kernel, plan.rule, buffers, out)
        assert run is not None
        run(0, out.size)
    return out, quietly(fold_for(plan.rule), plan.rule, buffers, None)


@pytest.mark.parametrize(("op", "dtype", "count", "accumulate"), KERNELS, ids=arrays.name)
@settings(max_examples=12)
@given(size=st.integers(0, 300), streaming=st.booleans(), misaligned=st.booleans(), seed=arrays.seeds)
def test_kernel_gives_the_bits_of_numpy(
    op: ReduceOp,
    dtype: np.dtype,
    count: int,
    accumulate: Accumulate,
    *,
    size: int,
    streaming: bool,
    misaligned: bool,
    seed: int,
) -> None:
    layout = "misaligned" if misaligned else "C"
    buffers = arrays.buffers(seed, count, (size,), dtype, layout)
    out = arrays.laid_out(np.zeros(size, find_plan(op, dtype, accumulate).rule.result), layout)
    assert_same_bits(*both_tiers(op, buffers, accumulate, out, streaming=streaming))


def small_kernel(op: ReduceOp, dtype: np.dtype, accumulate: Accumulate = "native") -> Any:
    warm([KernelSpec(op, dtype, 3, accumulate)])
    kernel = find_plan(op, dtype, accumulate).small
    assert kernel is not None
    return kernel


@pytest.mark.parametrize(("op", "dtype", "accumulate"), [(*k[:2], k[3]) for k in KERNELS if k[2] == 3], ids=arrays.name)
@settings(max_examples=12)
@given(
    count=st.one_of(arrays.counts, st.just(65)),
    shape=st.one_of(arrays.shapes, st.integers(0, 300).map(lambda size: (size,))),
    layout=arrays.layouts,
    container=st.sampled_from([list, tuple]),
    seed=arrays.seeds,
)
def test_small_kernel_gives_the_bits_of_numpy_or_does_nothing(
    op: ReduceOp,
    dtype: np.dtype,
    accumulate: Accumulate,
    *,
    count: int,
    shape: tuple[int, ...],
    layout: str,
    container: type,
    seed: int,
) -> None:
    kernel, rule = small_kernel(op, dtype, accumulate), find_plan(op, dtype, accumulate).rule
    buffers = arrays.buffers(seed, count, shape, dtype, layout)
    out = np.full(shape, 77).astype(rule.result)
    before = out.tobytes()
    done = kernel(container(buffers), out, out.size * dtype.itemsize)
    assert done == all(b.flags.c_contiguous and b.dtype is buffers[0].dtype for b in buffers)
    if done and dtype.newbyteorder(buffers[0].dtype.byteorder) == dtype:
        assert_same_bits(out, quietly(fold_for(rule), rule, buffers, None))
    elif not done:
        assert out.tobytes() == before


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=arrays.name)
@settings(max_examples=5)
@given(count=arrays.counts, seed=arrays.seeds)
def test_scalars_are_reduced_as_arrays(op: ReduceOp, dtype: np.dtype, count: int, seed: int) -> None:
    small_kernel(op, dtype)
    plan = find_plan(op, dtype)
    scalars = [buffer[0] for buffer in arrays.buffers(seed, count, (1,), dtype)]
    wanted = quietly(fold_for(plan.rule), plan.rule, [np.asarray(scalar) for scalar in scalars], None)
    with pytest.MonkeyPatch.context() as patch:
        for least in (policy.SMALL_TO, -1):
            patch.setattr(plan, "small_to", least)
            got = reduce_scalars(op, scalars)
            assert type(got) is plan.rule.result.type
            assert_same_bits(np.asarray(got), wanted)


def test_small_kernel_looks_before_it_reads() -> None:
    kernel, one = small_kernel(SUM, SINGLE), np.ones(4, SINGLE)
    out = np.zeros(4, SINGLE)
    odd: list[Any] = [
        [one, np.ones(5, SINGLE)],
        [one, np.ones((2, 2), SINGLE)],
        [one, np.ones(4)],
        [one, np.ones(8, SINGLE)[::2]],
        [one, np.float32(1)],
        [one, one.view(np.recarray)],
        [one.view(np.memmap)] * 2,
        [np.float32(1)] * 2,
        [np.ones(3, SINGLE)] * 2,
        [one, [1.0] * 4],
        [],
        [one] * 2000,
        {0: one, 1: one},
        np.ones((2, 4), SINGLE),
    ]
    for buffers in odd:
        assert not kernel(buffers, out, one.nbytes)
    for result in (np.zeros(8, SINGLE)[::2], np.float32(0), [0.0] * 4):
        assert not kernel([one, one], result, one.nbytes)
    for scalars in ([one, one], [np.float32(1), np.float64(1)], [np.float32(1), one]):
        assert not kernel(scalars, out, -4)
    assert not out.any()
    assert kernel([one, one], out, one.nbytes)
    assert out.tolist() == [2] * 4


@pytest.mark.parametrize("size", [4, 2000])
def test_files_in_memory_are_read_where_they_lie(size: int) -> None:
    small_kernel(SUM, SINGLE)
    files = [np.arange(size, dtype=SINGLE).view(np.memmap) for _ in range(3)]
    got = reduce(SUM, files)
    assert type(got) is np.ndarray
    assert got.tolist() == [3 * k for k in range(size)]


def test_small_kernel_holds_nothing() -> None:
    kernel, buffers, out = small_kernel(SUM, SINGLE), arrays.buffers(1, 3, (9,), SINGLE), np.zeros(9, SINGLE)
    before = [sys.getrefcount(thing) for thing in (buffers, out, *buffers)]
    for _ in range(100):
        assert kernel(buffers, out, out.nbytes)
    assert [sys.getrefcount(thing) for thing in (buffers, out, *buffers)] == before


def test_numpy_serves_where_objects_lie_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_small, "layout_is_known", lambda: False)
    monkeypatch.setattr(compiled_tier, "_small", {})
    assert compiled_tier.compile_small_for(find_plan(SUM, SINGLE).rule) is None


def test_small_kernel_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_tier, "_small", {})
    monkeypatch.setattr(compiled_tier, "_small_code", {})
    monkeypatch.setattr(kernels_small, "compile_small", lambda _recipe: lambda *_arguments: True)
    assert compiled_tier.compile_small_for(find_plan(SUM, SINGLE).rule) is None


@pytest.mark.parametrize("count", [2, 3, 17])
@pytest.mark.parametrize("op", [SUM, MAX, MEAN], ids=arrays.name)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
def test_every_half_precision_number(dtype: np.dtype, op: ReduceOp, count: int) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    others = [np.roll(every, 4097 * place) for place in range(1, count)]
    result, wanted = both_tiers(op, [every, *others], "native", np.empty_like(every))
    assert_same_bits(result, wanted)


@pytest.mark.parametrize("count", [2, 17])
def test_kernel_works_on_a_range_alone(count: int) -> None:
    buffers = arrays.buffers(2, count, (5000,), SINGLE)
    warm([KernelSpec(SUM, SINGLE, count)])
    plan = find_plan(SUM, SINGLE)
    out = np.full(5000, 77, SINGLE)
    _, kernel = plan.kernels[compiled_tier.form(count)]
    run = compiled_tier.bind(kernel, plan.rule, buffers, out)
    assert run is not None
    run(1001, 3007)
    assert (out[:1001] == 77).all()
    assert (out[3007:] == 77).all()
    assert_same_bits(out[1001:3007], reduce(SUM, [buffer[1001:3007] for buffer in buffers]))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of buffers each time a kernel serves."""
    calls: list[int] = []
    plain = compiled_tier.bind

    def spy(kernel: Any, rule: Any, buffers: Any, out: Any) -> Any:
        run = plain(kernel, rule, buffers, out)
        calls.extend([len(buffers)] if run else [])
        return run

    monkeypatch.setattr(compiled_tier, "bind", spy)
    return calls


LARGE = (300, 500)
"""Larger than what the kernels for small values serve."""


def test_kernel_serves_once_it_is_ready(served: list[int]) -> None:
    spec = KernelSpec(SUM, BFLOAT16, 7)
    buffers = arrays.buffers(1, 7, LARGE, BFLOAT16)
    assert buffers[0].nbytes >= pays_from(spec)
    assert not is_ready(spec)
    before = reduce(SUM, buffers)
    assert served == []
    warm([spec])
    assert is_ready(spec)
    assert_same_bits(reduce(SUM, buffers), before)
    assert served == [7]
    assert_same_bits(reduce(SUM, [buffer[:2] for buffer in buffers]), before[:2])
    assert served == [7]


@pytest.mark.parametrize(
    ("layout", "kernel_serves"),
    [
        ("C", True),
        ("F", True),
        ("read-only", True),
        ("misaligned", True),
        ("strided", False),
        ("mixed", False),
        ("big-endian", False),
    ],
)
def test_layouts_that_a_kernel_takes(served: list[int], layout: str, *, kernel_serves: bool) -> None:
    warm([KernelSpec(MEAN, SINGLE, 3), KernelSpec(MEAN, SINGLE.newbyteorder(">"), 3)])
    buffers = arrays.buffers(4, 3, LARGE, SINGLE)
    wanted = quietly(fold_for(find_plan(MEAN, SINGLE).rule), find_plan(MEAN, SINGLE).rule, buffers, None)
    laid_out = [arrays.laid_out(buffer, layout, index) for index, buffer in enumerate(buffers)]
    assert_same_bits(reduce(MEAN, laid_out), wanted)
    assert bool(served) is kernel_serves


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(("shift", "kernel_serves"), [(0, True), (1, False), (-1, False)])
def test_out_overlaps_an_input_of_a_kernel(served: list[int], place: int, shift: int, *, kernel_serves: bool) -> None:
    warm([KernelSpec(SUM, HALF, 3)])
    wanted = reduce(SUM, arrays.buffers(6, 3, (6000,), HALF))
    served.clear()
    memory = np.zeros(6002, HALF)
    buffers = arrays.buffers(6, 3, (6000,), HALF)
    memory[1:-1] = buffers[place]
    buffers[place] = memory[1:-1]
    out = memory[1 + shift : 6001 + shift]
    assert reduce(SUM, buffers, out=out) is out
    assert_same_bits(out, wanted)
    assert bool(served) is kernel_serves


def test_kernel_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch, served: list[int]) -> None:
    def compile_wrong(_recipe: Any) -> Any:
        return lambda *_arguments: None

    monkeypatch.setattr(kernels_cpu, "compile_kernel", compile_wrong)
    spec = KernelSpec(PRODUCT, HALF, 13)
    warm([spec])
    assert not is_ready(spec)
    assert reduce(PRODUCT, [np.ones(LARGE, HALF)] * 13).shape == LARGE
    assert served == []


@pytest.mark.parametrize(("dtype", "count"), [(SINGLE, 1), (np.dtype(np.longdouble), 3)], ids=str)
def test_some_reductions_have_no_kernel(dtype: np.dtype, count: int) -> None:
    spec = KernelSpec(SUM, dtype, count)
    warm([spec])
    assert not is_ready(spec)
    assert reduce(SUM, [np.ones(9, dtype)] * count).tolist() == [count] * 9


def test_warm_up_checks_its_specs() -> None:
    with pytest.raises(TypeError, match="SUM of bool"):
        warm([KernelSpec(SUM, np.dtype(bool), 2)])


def test_pairs_are_numpys_until_stores_stream() -> None:
    assert 16 * MIB < pays_from(KernelSpec(SUM, SINGLE, 2)) <= 64 * MIB


def test_reductions_alone_never_load_numba() -> None:
    program = """
import sys, numpy, aiodist_kernels as kernels
for n in (2, 3, 40):
    for op in kernels.ReduceOp:
        kernels.reduce(op, [numpy.ones(100_000, "f4")] * n)
        kernels.cut(op, [numpy.ones(100_000, "f2")] * n, parts=2).calls[0]()
        kernels.reduce_numbers(op, [1.5] * n)
spec = kernels.KernelSpec(kernels.ReduceOp.SUM, numpy.dtype("f4"), 2)
assert not kernels.is_ready(spec) and kernels.pays_from(spec) > 100
assert not {"numba", "llvmlite", "ml_dtypes"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": "kernels"}, timeout=50)
