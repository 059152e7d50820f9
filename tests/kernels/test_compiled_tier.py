# SPDX-License-Identifier: Apache-2.0
"""Kernels give the bits of the NumPy tier, and are used exactly when they are compiled and pay."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist_kernels import Accumulate, ReduceOp, cut, kernels_cpu, plan_for, policy, reduce, warm
from aiodist_kernels.numpy_tier import fold_for, quietly
from aiodist_kernels.policy import MOST_BUFFERS, NEVER
from aiodist_kernels.pool import KIB, MIB
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, COMPLEX, FLOATS, SINGLE, assert_same_bits
from tests.kernels.test_reduce import COMPILED

HALF = np.dtype(np.float16)
SUM, MEAN, MIN, MAX, PRODUCT = ReduceOp

WIDE: Accumulate = "float64"
KERNELS: list[tuple[ReduceOp, np.dtype, int, Accumulate]] = [
    *[(op, dtype, 3, "native") for op, dtype in COMPILED if op is not PRODUCT or dtype not in COMPLEX],
    *[(SUM, dtype, 3, WIDE) for dtype in FLOATS[:3]],
    (MEAN, BFLOAT16, 3, WIDE),
    (SUM, COMPLEX[0], 5, WIDE),
    (SUM, SINGLE, 17, "native"),
    (MEAN, SINGLE, 2, "native"),
    (MAX, SINGLE, MOST_BUFFERS, "native"),
]


def numpys(op: ReduceOp, buffers: list[np.ndarray], accumulate: Accumulate = "native") -> np.ndarray:
    """Reduce on the NumPy tier."""
    rule = plan_for(op, buffers[0].dtype, len(buffers), accumulate).rule
    return quietly(fold_for(rule, buffers[0].nbytes, len(buffers)), rule, buffers, None)


def compiled(op: ReduceOp, buffers: list[np.ndarray], out: np.ndarray, accumulate: Accumulate = "native") -> Any:
    """Return a function that reduces a range of elements on the compiled tier, for any size."""
    plan = plan_for(op, buffers[0].dtype, len(buffers), accumulate)
    warm([plan])
    assert plan.kernel is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "pays_from", 0)
        run = policy.bind(plan, buffers, out)
    assert run is not None
    return run


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: "-".join(map(arrays.name, kernel)))
@settings(max_examples=8)
@given(size=st.integers(0, 300), streaming=st.booleans(), misaligned=st.booleans(), seed=arrays.seeds)
def test_kernel_gives_the_bits_of_numpy(
    kernel: tuple[ReduceOp, np.dtype, int, Accumulate], *, size: int, streaming: bool, misaligned: bool, seed: int
) -> None:
    op, dtype, count, accumulate = kernel
    layout = "misaligned" if misaligned else "C"
    buffers = arrays.buffers(seed, count, (size,), dtype, layout)
    out = arrays.laid_out(np.zeros(size, plan_for(op, dtype, count, accumulate).rule.result), layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "STREAMING_FROM", 0 if streaming else NEVER)
        compiled(op, buffers, out, accumulate)(0, size)
    assert_same_bits(out, numpys(op, buffers, accumulate))


@pytest.mark.parametrize("op", [SUM, MAX, MEAN], ids=arrays.name)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
def test_every_half_precision_number(dtype: np.dtype, op: ReduceOp) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    buffers = [np.roll(every, 4097 * place) for place in range(2)]
    out = np.empty_like(every)
    compiled(op, buffers, out)(0, out.size)
    assert_same_bits(out, numpys(op, buffers))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each use of a kernel adds the number of its buffers."""
    calls: list[int] = []
    plain = policy.bind

    def spy(plan: Any, buffers: Any, out: Any) -> Any:
        run = plain(plan, buffers, out)
        calls.extend([len(buffers)] if run else [])
        return run

    monkeypatch.setattr(policy, "bind", spy)
    return calls


def test_kernel_serves_once_it_is_ready(served: list[int]) -> None:
    plan = plan_for(SUM, BFLOAT16, 7, "native")
    buffers = arrays.buffers(1, 7, (300, 500), BFLOAT16)
    pieces = cut(SUM, buffers, parts=2)
    assert plan.is_due(buffers[0].nbytes)
    assert not plan.is_due(4 * KIB)
    before = reduce(SUM, buffers)
    assert served == []
    warm([plan])
    assert plan.kernel is not None
    assert not plan.is_due(buffers[0].nbytes)
    assert_same_bits(reduce(SUM, buffers), before)
    assert served == [7]
    few = [buffer[0, :300] for buffer in buffers]
    assert_same_bits(reduce(SUM, few), before[0, :300])
    assert served == [7]
    for call in pieces.calls:
        call()
    assert_same_bits(pieces.result, before)
    assert served == [7] * (1 + len(pieces.calls))


@pytest.mark.parametrize("layout", arrays.LAYOUTS)
def test_layouts_served_by_a_kernel(served: list[int], layout: str) -> None:
    warm([plan_for(MEAN, SINGLE, 3, "native"), plan_for(MEAN, SINGLE.newbyteorder(">"), 3, "native")])
    buffers = arrays.buffers(4, 3, (300, 500), SINGLE)
    laid_out = [arrays.laid_out(buffer, layout, index) for index, buffer in enumerate(buffers)]
    assert_same_bits(reduce(MEAN, laid_out), numpys(MEAN, buffers))
    assert bool(served) is (layout in {"C", "F", "read-only", "misaligned", "memmap"})


def test_out_may_be_the_first_buffer_of_a_kernel(served: list[int]) -> None:
    warm([plan_for(SUM, HALF, 3, "native")])
    buffers = arrays.buffers(6, 3, (6000,), HALF)
    wanted = numpys(SUM, buffers)
    assert reduce(SUM, buffers, out=buffers[0]) is buffers[0]
    assert_same_bits(buffers[0], wanted)
    assert served


def test_kernel_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch, served: list[int]) -> None:
    monkeypatch.setattr(kernels_cpu, "compile_kernel", lambda *_: lambda *_: None)
    plan = plan_for(PRODUCT, HALF, 13, "native")
    warm([plan])
    assert plan.kernel is None
    assert not plan.is_due(MIB)
    assert reduce(PRODUCT, [np.ones(MIB, HALF)] * 13).all()
    assert served == []


def test_numpy_serves_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("aiodist_kernels.kernels_cpu")
    monkeypatch.setitem(sys.modules, "aiodist_kernels.kernels_cpu", None)
    plan = plan_for(SUM, HALF, 11, "native")
    with pytest.raises(ImportError):
        warm([plan])
    assert plan.is_due(MIB)
    warm([plan], required=False)
    assert not plan.is_due(MIB)
    assert reduce(SUM, [np.ones(MIB, HALF)] * 11)[-1] == 11


@pytest.mark.parametrize(
    ("op", "dtype", "count"),
    [(SUM, SINGLE, 1), (SUM, SINGLE, MOST_BUFFERS + 1), (SUM, np.dtype(np.longdouble), 3), (PRODUCT, COMPLEX[0], 3)],
    ids=str,
)
def test_some_reductions_have_no_kernel(op: ReduceOp, dtype: np.dtype, count: int) -> None:
    plan = plan_for(op, dtype, count, "native")
    warm([plan])
    assert plan.kernel is None
    assert not plan.is_due(MIB)
    assert reduce(op, [np.ones(9, dtype)] * count).tolist() == [count if op is SUM else 1] * 9


def test_reductions_alone_never_load_a_compiler() -> None:
    program = """
import sys, numpy, aiodist_kernels as kernels
for n in (2, 3, 40):
    for op in kernels.ReduceOp:
        kernels.reduce(op, [numpy.ones(100_000, "f4")] * n)
        kernels.cut(op, [numpy.ones(100_000, "f2")] * n, parts=2).calls[0]()
        kernels.reduce_numbers(op, [1.5] * n)
assert not {"numba", "llvmlite", "ml_dtypes"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": "kernels"}, timeout=50)
