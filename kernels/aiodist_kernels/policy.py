# SPDX-License-Identifier: Apache-2.0
"""Plans: what is known of a reduction before its buffers come, found once and kept; and the measured thresholds.

The thresholds say which tier serves, when a kernel is worth compiling, and when threads pay. They were measured by
`tests/benchmarks/cpu_reductions.py` and `cpu_event_loop.py`; docs/benchmarks/cpu-reductions.md has the figures. Bytes
are those of one buffer unless a name says otherwise.
"""

import dataclasses
import functools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from aiodist_kernels import compiled_tier
from aiodist_kernels.pool import KIB, MIB
from aiodist_kernels.rules import Accumulate, DType, ReduceOp, Rule, has_kernels, is_half, rule_for

if TYPE_CHECKING:
    from aiodist_kernels.kernels_cpu import Kernel

NEVER: Final = 1 << 62
"""More bytes than any buffer has."""

PAIRS_FROM: Final = 32 * MIB
"""Where a kernel beats NumPy in folding two buffers in their own dtype: where its stores should go past the caches."""

NATIVE_FROM: Final = 512 * KIB
"""The same for more buffers, where NumPy passes over the result again and again."""

WIDE_FROM: Final = 4 * KIB
"""The same for an accumulator that is wider than the buffers, where NumPy converts each of them first. To call a kernel
takes some 5 microseconds."""

COMPILED_FROM: Final = 64 * KIB
"""Bytes from which the first reduction that a kernel would serve waits for it to be compiled."""

MOST_BUFFERS: Final = 32
"""Kernels are compiled for each number of buffers up to here; NumPy serves more, of which nobody has large ones."""

BLOCKING_FROM_MOVED: Final = 64 * MIB
"""Bytes moved by one reduction from which an event loop's thread should not do it: some 3 to 8 milliseconds. A hop to a
worker thread takes 0.3 milliseconds on an idle machine and many on a busy one; two threads pay from here on."""

LEAST_MOVED_BY_A_THREAD: Final = 4 * MIB
"""Bytes that each worker thread should have to move, at least."""

SLOWNESS_OF_HALF_FLOATS: Final = 16
"""How many times longer than others NumPy takes for the bytes of float16 and bfloat16."""

SLOWNESS_OF_WIDE_FOLDS: Final = 4
"""The same, for other numbers that it folds in a wider accumulator."""

SLOWNESS_BY_ROWS: Final = 8
"""How many times longer than a dense reduction one by row index takes for its bytes."""


def blocks(moved: int) -> bool:
    """Return whether moving so many bytes is too much for an event loop's thread."""
    return moved >= BLOCKING_FROM_MOVED


def parts(moved: int, workers: int) -> int:
    """Return into how many pieces to cut a reduction that moves so many bytes."""
    return max(1, min(workers, moved // LEAST_MOVED_BY_A_THREAD))


def slowness(rule: Rule) -> int:
    """Return how many times longer than a copy of its bytes NumPy's fold takes."""
    if is_half(rule.dtype):
        return SLOWNESS_OF_HALF_FLOATS
    return 1 if rule.is_native else SLOWNESS_OF_WIDE_FOLDS


@dataclasses.dataclass(slots=True, eq=False)
class Plan:
    """How so many buffers of one dtype are reduced by one op.

    Attributes:
        rule: what the reduction means.
        count: the number of buffers.
        pays_from: bytes of one buffer from which a kernel beats NumPy; `NEVER` where there is none.
        kernel: it, once it is compiled.
        settled: it is compiled, or it turned out that there is none.
    """

    rule: Rule
    count: int
    pays_from: int
    kernel: "Kernel | None" = None
    settled: bool = False

    def kernel_for(self, nbytes: int) -> "Kernel | None":
        """Return the kernel that should reduce buffers of so many bytes, or None: NumPy."""
        return self.kernel if nbytes >= self.pays_from else None


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel that a program will need, for so many buffers."""

    op: ReduceOp
    dtype: DType
    count: int
    accumulate: Accumulate = "native"

    @property
    def plan(self) -> Plan:
        """The plan that the kernel serves."""
        return plan_for(self.op, self.dtype, self.count, self.accumulate)


@functools.cache
def plan_for(op: ReduceOp, dtype: DType, count: int, accumulate: Accumulate = "native") -> Plan:
    """Return the plan, made at the first call."""
    rule = rule_for(op, dtype, accumulate)
    if not 2 <= count <= MOST_BUFFERS or dtype != rule.dtype or not has_kernels(rule):
        return Plan(rule, count, NEVER)
    if not rule.is_native or is_half(rule.dtype):  # whose MIN and MAX NumPy takes one by one
        return Plan(rule, count, WIDE_FROM)
    return Plan(rule, count, PAIRS_FROM if count == 2 else NATIVE_FROM)


_compiling: Final = threading.Lock()


def warm(specs: Iterable[KernelSpec]) -> None:
    """Compile kernels, in this thread: some tenths of a second each, and a second more for the first.

    Give it to a worker thread; reductions that run meanwhile are served by NumPy, with the same bits.

    Args:
        specs: which kernels; those that exist already cost nothing.

    Raises:
        TypeError: an op is not defined for its dtype.
        ValueError: unknown op or `accumulate`.
        ImportError: Numba is not installed, or does not load.
    """
    for spec in specs:
        plan = plan_for(ReduceOp(spec.op), np.dtype(spec.dtype), spec.count, spec.accumulate)
        with _compiling:
            if not plan.settled and plan.pays_from < NEVER:
                plan.kernel = compiled_tier.compile_for(plan.rule, plan.count)
            plan.settled = True


def warm_if_possible(specs: Iterable[KernelSpec]) -> None:
    """Compile kernels as `warm` does; where Numba is missing NumPy goes on serving, and nobody tries again."""
    for spec in specs:
        try:
            warm([spec])
        except ImportError:
            spec.plan.settled = True


def is_due(spec: KernelSpec, nbytes: int) -> bool:
    """Return whether a reduction of buffers of `nbytes` should wait until its kernel has been compiled."""
    return nbytes >= COMPILED_FROM and not spec.plan.settled and nbytes >= spec.plan.pays_from


def is_ready(spec: KernelSpec) -> bool:
    """Return whether `warm` has compiled this kernel (never, where NumPy alone serves)."""
    return spec.plan.kernel is not None
