# SPDX-License-Identifier: Apache-2.0
"""Plans: all that is known of a reduction before its buffers come, found once and kept; and the measured thresholds.

The thresholds say which tier serves, when a kernel is worth compiling, and when threads pay. They were measured on two
cores of a server with 2 MiB of second-level cache each, by `tests/benchmarks/cpu_reductions.py`;
docs/benchmarks/cpu-reductions.md has the figures. Bytes are those of one buffer unless a name says otherwise.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Final, get_args

import numpy as np

from aiodist_kernels import compiled_tier
from aiodist_kernels.numpy_tier import Fold, fold_for, is_plain
from aiodist_kernels.pool import KIB, MIB
from aiodist_kernels.rules import Accumulate, DType, ReduceOp, Rule, is_half, native_dtype, recipe_for, rule_for
from aiodist_kernels.scalars import ElementFold, element_fold

NEVER: Final = 1 << 62
"""More bytes than any buffer has."""

PLAIN_BELOW: Final = 2 * MIB
"""Bytes below which a fold in the buffers' own dtype is its ufunc alone, called from buffer to buffer, unless a kernel
is quicker, with memory from the C library also for two arrays of 1 MiB: what a sum reads and writes has by then put the
interpreter out of the caches, so that to borrow a block takes 6 microseconds of 105. (`pool` has its own thresholds for
results that are larger, or come with others.)"""

NATIVE_FROM: Final = {2: 32 * MIB, 3: 512 * KIB}
"""Folds in the buffers' own dtype, of two buffers and of more. NumPy adds two buffers at
the limit of the machine, until stores should go past the caches; from three on it passes over the result again and
again."""

WIDE_FROM: Final = 2 * KIB
"""Folds in a wider accumulator, where NumPy converts each buffer apart. To call a kernel takes 2 microseconds, and one
more for each buffer, whose address NumPy tells no faster."""

COMPILED_FROM: Final = 64 * KIB
"""Bytes from which the first reduction that a kernel would serve waits for it to be compiled."""

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


def compiled_from(rule: Rule, count: int) -> int:
    """Return the bytes of one buffer from which a compiled kernel beats NumPy."""
    if not rule.is_native or is_half(rule.dtype):  # whose MIN and MAX NumPy takes one by one
        return WIDE_FROM
    return NATIVE_FROM[2 if count <= 2 else 3]


def blocks(moved: int) -> bool:
    """Return whether moving so many bytes is too much for an event loop's thread."""
    return moved >= BLOCKING_FROM_MOVED


def parts(moved: int, workers: int) -> int:
    """Return into how many pieces to cut a reduction that moves so many bytes."""
    return max(1, min(workers, moved // LEAST_MOVED_BY_A_THREAD))


@dataclasses.dataclass(slots=True)
class Plan:
    """How buffers of one dtype (and byte order) are reduced by one op.

    Attributes:
        rule: what the reduction means.
        fold: the NumPy tier's function for it.
        elements: the same for single numbers.
        ufunc: the rule's, at hand for small values.
        plain_below: bytes of one buffer below which its ufunc may be all there is to it; 0 for never.
        compiled_from: bytes of one buffer below which no kernel that is ready pays.
        kernels: by `compiled_tier.form`, the bytes of one buffer from which a kernel pays, and the kernel; None where
            it turned out that there is none.
    """

    rule: Rule
    fold: Fold
    elements: ElementFold
    ufunc: np.ufunc
    plain_below: int
    compiled_from: int
    kernels: dict[int, tuple[int, Any]]

    def kernel(self, count: int, nbytes: int) -> Any:
        """Return the kernel that should reduce `count` buffers of `nbytes` each, or None: NumPy."""
        least, kernel = self.kernels.get(compiled_tier.form(count), _NO_KERNEL)
        return kernel if nbytes >= least else None

    def add_kernel(self, count: int, kernel: Any) -> None:
        """Let a kernel serve from now on, also while other threads reduce; None: there is none."""
        least = NEVER if kernel is None else compiled_from(self.rule, count)
        self.kernels[compiled_tier.form(count)] = least, kernel
        self.compiled_from = min(self.compiled_from, least)


_NO_KERNEL: Final = (NEVER, None)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel that a program will need.

    Attributes:
        op: the reduce op.
        dtype: of the buffers.
        count: the number of buffers.
        accumulate: as in `reduce`.
    """

    op: ReduceOp
    dtype: DType
    count: int
    accumulate: Accumulate = "native"


known: Final[dict[Accumulate, dict[ReduceOp, dict[DType, Plan]]]] = {
    how: {op: {} for op in ReduceOp} for how in get_args(Accumulate)
}
"""The plans, by `accumulate`, op and dtype: three small dictionaries are quicker asked than one by tuples."""


def find_plan(op: ReduceOp, dtype: DType, accumulate: Accumulate = "native") -> Plan:
    """Return the plan, made at the first call.

    Raises:
        TypeError: `op` is not defined for `dtype`.
        ValueError: unknown `accumulate`.
    """
    try:
        return known[accumulate][op][dtype]
    except KeyError:
        rule = rule_for(op, dtype, accumulate)
        plain_below = PLAIN_BELOW if is_plain(rule) else 0
        plan = Plan(rule, fold_for(rule), element_fold(rule), rule.ufunc, plain_below, NEVER, {})
        known[accumulate][op][dtype] = plan
        return plan


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
        plan = find_plan(ReduceOp(spec.op), native_dtype(np.dtype(spec.dtype)), spec.accumulate)
        if compiled_tier.form(spec.count) not in plan.kernels:
            plan.add_kernel(spec.count, compiled_tier.compile_for(plan.rule, spec.count))


def warm_if_possible(specs: Iterable[KernelSpec]) -> None:
    """Compile kernels as `warm` does; where Numba is missing NumPy goes on serving, and nobody tries again."""
    for spec in specs:
        try:
            warm([spec])
        except ImportError:
            find_plan(spec.op, spec.dtype, spec.accumulate).add_kernel(spec.count, None)


def is_due(spec: KernelSpec, nbytes: int) -> bool:
    """Return whether a reduction of buffers of `nbytes` should wait until its kernel has been compiled.

    Raises:
        TypeError: the op is not defined for the dtype.
    """
    if nbytes < COMPILED_FROM or compiled_tier.form(spec.count) in find_plan(*_plan_of(spec)).kernels:
        return False
    return nbytes >= pays_from(spec)


def is_ready(spec: KernelSpec) -> bool:
    """Return whether `warm` has compiled this kernel (never, where NumPy alone serves)."""
    return find_plan(*_plan_of(spec)).kernels.get(compiled_tier.form(spec.count), _NO_KERNEL)[1] is not None


def pays_from(spec: KernelSpec) -> int:
    """Return the bytes of one buffer from which a kernel would beat NumPy; `NEVER` where there is none.

    Raises:
        TypeError: the op is not defined for the dtype.
    """
    rule = find_plan(*_plan_of(spec)).rule
    if spec.dtype != rule.dtype or recipe_for(rule, spec.count) is None:
        return NEVER
    return compiled_from(rule, spec.count)


def _plan_of(spec: KernelSpec) -> tuple[ReduceOp, DType, Accumulate]:
    return spec.op, spec.dtype, spec.accumulate
