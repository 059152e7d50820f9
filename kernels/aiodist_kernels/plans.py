# SPDX-License-Identifier: Apache-2.0
"""Plans: all that is known of a reduction before its buffers come, found once and kept."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Final, get_args

import numpy as np

from aiodist_kernels import compiled_tier, policy
from aiodist_kernels.elements import ElementFold, element_fold
from aiodist_kernels.numpy_tier import Fold, fold_for, is_plain
from aiodist_kernels.recipes import recipe_for
from aiodist_kernels.reduce_op import ReduceOp
from aiodist_kernels.rules import Accumulate, DType, Rule, native_dtype, rule_for


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
        kernels: those that are ready, by `compiled_tier.form`, each after the bytes of one buffer from
            which it pays.
        small: the kernel for small values, when it is ready.
        small_to: bytes of one buffer up to which it serves; -1 while there is none.
        copied_to: up to which its result begins as a copy of the first buffer; -1 where that has another dtype.
    """

    rule: Rule
    fold: Fold
    elements: ElementFold
    ufunc: np.ufunc
    plain_below: int
    compiled_from: int
    kernels: dict[int, tuple[int, compiled_tier.Kernel]]
    small: Any = None
    small_to: int = -1
    copied_to: int = -1

    def kernel(self, count: int, nbytes: int) -> Any:
        """Return the kernel that should reduce `count` buffers of `nbytes` each, or None: NumPy."""
        least, kernel = self.kernels.get(compiled_tier.form(count), _NO_KERNEL)
        return kernel if nbytes >= least else None

    def add_kernel(self, count: int, kernel: compiled_tier.Kernel) -> None:
        """Let a kernel serve from now on, also while other threads reduce."""
        least = policy.compiled_from(self.rule, count)
        self.kernels[compiled_tier.form(count)] = least, kernel
        self.compiled_from = min(self.compiled_from, least)

    def add_small(self, kernel: Any) -> None:
        """Let the kernel for small values serve from now on, also while other threads reduce."""
        self.small = kernel
        self.copied_to = policy.COPIED_TO if self.rule.result == self.rule.dtype else -1
        self.small_to = policy.SMALL_TO


_NO_KERNEL: Final = (policy.NEVER, None)


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


plans: Final[dict[Accumulate, dict[ReduceOp, dict[DType, Plan]]]] = {
    how: {op: {} for op in ReduceOp} for how in get_args(Accumulate)
}
"""By `accumulate`, op and dtype: three small dictionaries are quicker asked than one by tuples."""


def find_plan(op: ReduceOp, dtype: DType, accumulate: Accumulate = "native") -> Plan:
    """Return the plan, made at the first call.

    Raises:
        TypeError: `op` is not defined for `dtype`.
        ValueError: unknown `accumulate`.
    """
    plan = _known(op, dtype, accumulate)
    if plan is None:
        rule = rule_for(op, dtype, accumulate)
        plain_below = policy.PLAIN_BELOW if is_plain(rule) else 0
        plan = Plan(rule, fold_for(rule), element_fold(rule), rule.ufunc, plain_below, policy.NEVER, {})
        plans[accumulate][op][dtype] = plan
    return plan


def _known(op: ReduceOp, dtype: DType, accumulate: Accumulate) -> Plan | None:
    try:
        return plans[accumulate][op][dtype]
    except KeyError:
        return None


def warm(specs: Iterable[KernelSpec]) -> None:
    """Compile kernels, in this thread: 0.2 seconds each, as much for an op and dtype, and 0.5 for the first.

    Give it to a worker thread; reductions that run meanwhile are served by NumPy, with the same bits.

    Args:
        specs: which kernels; those that exist already cost nothing.

    Raises:
        TypeError: an op is not defined for its dtype.
        ValueError: unknown op or `accumulate`.
        ImportError: Numba is not installed.
    """
    for spec in specs:
        plan = find_plan(ReduceOp(spec.op), native_dtype(np.dtype(spec.dtype)), spec.accumulate)
        kernel = compiled_tier.compile_for(plan.rule, spec.count)
        if kernel is not None:
            plan.add_kernel(spec.count, kernel)
        small = compiled_tier.compile_small_for(plan.rule)
        if small is not None:
            plan.add_small(small)


def is_ready(spec: KernelSpec) -> bool:
    """Say whether `warm` has compiled this kernel (never, where NumPy alone serves)."""
    plan = _known(spec.op, spec.dtype, spec.accumulate)
    return plan is not None and compiled_tier.form(spec.count) in plan.kernels


def pays_from(spec: KernelSpec) -> int:
    """Return the bytes of one buffer from which a kernel would beat NumPy; `policy.NEVER` where there is none.

    Raises:
        TypeError: the op is not defined for the dtype.
    """
    rule = find_plan(spec.op, spec.dtype, spec.accumulate).rule
    if spec.dtype != rule.dtype or recipe_for(rule, spec.count) is None:
        return policy.NEVER
    return policy.compiled_from(rule, spec.count)
