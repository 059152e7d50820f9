# SPDX-License-Identifier: Apache-2.0
"""Plans: what is known about a reduction before its buffers exist, cached; its kernel; and the thresholds.

A kernel is used only if it gives the same bits as the NumPy tier, on this machine, for values that distinguish
implementations. A reduction never compiles: `warm` does, in the thread that calls it.

The thresholds decide which tier does a reduction, when compiling a kernel pays, and when threads pay. They were
measured: see docs/benchmarks/cpu-reductions.md. Bytes are those of one buffer unless a name says otherwise.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from aiodist_kernels.numpy_tier import fold_for, quietly
from aiodist_kernels.pool import KIB, MIB
from aiodist_kernels.rules import (
    Accumulate,
    Array,
    DType,
    ReduceOp,
    Rule,
    components,
    has_kernels,
    is_half,
    lane,
    rule_for,
)

if TYPE_CHECKING:
    from aiodist_kernels.kernels_cpu import Kernel

NEVER: Final = 1 << 62  # more bytes than any buffer has

PAIRS_FROM: Final = 32 * MIB
"""From here a kernel beats NumPy in folding two buffers in their own dtype, by stores that bypass the caches."""

NATIVE_FROM: Final = 512 * KIB  # the same for more buffers, where NumPy passes over the result again and again

WIDE_FROM: Final = 4 * KIB
"""The same for an accumulator wider than the buffers, which NumPy converts first. A kernel call takes 5 µs."""

COMPILED_FROM: Final = 64 * KIB  # from here the first reduction for a kernel waits until it is compiled

MOST_BUFFERS: Final = 32
"""Kernels are compiled for each number of buffers up to here; NumPy does more, which are hardly ever large."""

STREAMING_FROM: Final = 32 * MIB
"""From here results bypass the caches: a later reader would not find them there anyway, and the memory that they
overwrite need not be read first."""

BLOCKING_FROM_MOVED: Final = 64 * MIB
"""Bytes moved by one reduction, in 3 to 8 milliseconds, from which it should leave the event loop's thread. A hop to a
worker thread takes 0.3 milliseconds on an idle machine and many on a busy one; two threads pay from here on."""

LEAST_MOVED_BY_A_THREAD: Final = 4 * MIB
"""The smallest number of bytes to move that is worth a worker thread of its own."""

SLOWNESS_OF_HALF_FLOATS: Final = 16  # how many times longer NumPy takes per byte for float16 and bfloat16
SLOWNESS_OF_WIDE_FOLDS: Final = 4  # the same for other dtypes that it folds in a wider accumulator
SLOWNESS_BY_ROWS: Final = 8  # how many times longer a reduction by row index takes per byte than a dense one


def blocks(moved: int) -> bool:
    """Return whether moving that many bytes takes too long for an event loop's thread."""
    return moved >= BLOCKING_FROM_MOVED


def parts(moved: int, workers: int) -> int:
    """Return the number of pieces for a reduction that moves that many bytes."""
    return max(1, min(workers, moved // LEAST_MOVED_BY_A_THREAD))


# Plans.


@dataclasses.dataclass(slots=True, eq=False)
class Plan:
    """How a number of buffers of one dtype are reduced by one op."""

    rule: Rule
    count: int  # of buffers
    pays_from: int  # bytes of one buffer from which a kernel beats NumPy; `NEVER` if there can be none
    kernel: "Kernel | None" = None  # once it is compiled
    settled: bool = False  # the kernel is compiled, or cannot be used

    def kernel_for(self, nbytes: int) -> "Kernel | None":
        """Return the kernel that should reduce buffers of that many bytes; None for NumPy."""
        return self.kernel if nbytes >= self.pays_from else None

    def is_due(self, nbytes: int) -> bool:
        """Return whether a reduction of buffers of `nbytes` should wait until its kernel has been compiled."""
        return not self.settled and nbytes >= COMPILED_FROM and nbytes >= self.pays_from

    def cost(self, size: int) -> int:
        """Return about how many bytes could be moved in the time that it takes to reduce buffers of `size` elements."""
        nbytes, slowness = size * self.rule.dtype.itemsize, 1
        if self.kernel_for(nbytes) is None and not self.rule.is_native:
            slowness = SLOWNESS_OF_HALF_FLOATS if is_half(self.rule.dtype) else SLOWNESS_OF_WIDE_FOLDS
        return (nbytes * self.count + size * self.rule.result.itemsize) * slowness


@functools.cache
def plan_for(op: ReduceOp, dtype: DType, count: int, accumulate: Accumulate) -> Plan:
    """Return the plan of a reduction; raise a TypeError if `op` is not defined for `dtype`."""
    rule = rule_for(op, dtype, accumulate)
    if not 2 <= count <= MOST_BUFFERS or dtype != rule.dtype or rule.contiguous or not has_kernels(rule):
        return Plan(rule, count, NEVER)
    if not rule.is_native or is_half(rule.dtype):  # NumPy has no vector loops for MIN and MAX of 16-bit floats
        return Plan(rule, count, WIDE_FROM)
    return Plan(rule, count, PAIRS_FROM if count == 2 else NATIVE_FROM)


# Kernels.

_compiling: Final = threading.Lock()


def warm(plans: Iterable[Plan], *, required: bool = True) -> None:
    """Compile the kernels of plans in this thread: some tenths of a second each, and a second more for the first.

    Call it in a worker thread; meanwhile NumPy does reductions, with the same bits. Kernels that exist already cost
    nothing. If Numba does not load, there is an ImportError, or, if not `required`, NumPy remains in use for good.
    """
    for plan in plans:
        with _compiling:
            if not plan.settled and plan.pays_from < NEVER:
                try:
                    plan.kernel = compile_for(plan)
                except ImportError:
                    if required:
                        raise
            plan.settled = True


def compile_for(plan: Plan) -> "Kernel | None":
    """Compile the kernel of a plan; return None if its bits differ from NumPy's."""
    try:
        from aiodist_kernels import kernels_cpu
    except OSError as error:  # from loading LLVM
        raise ImportError(str(error)) from error
    if not kernels_cpu.can_compile(plan.rule):
        return None
    kernel = kernels_cpu.compile_kernel(plan.rule, plan.count)
    return kernel if _agrees(kernel, plan.rule, plan.count) else None


def bind(plan: Plan, buffers: Sequence[Array], out: Array) -> Callable[[int, int], None] | None:
    """Return a function that reduces the elements [start, stop) of `buffers` into `out`, which may be one of them.

    All arrays must live as long as that function. The result is None if NumPy should do it: if there is no kernel for
    this size, or the arrays are not contiguous in one order.
    """
    kernel = plan.kernel_for(buffers[0].nbytes)
    if kernel is None or not same_order((*buffers, out)):
        return None
    target = out.ctypes.data
    places = tuple([buffer.ctypes.data for buffer in buffers])
    lanes = components(plan.rule.dtype)
    streaming = out.nbytes >= STREAMING_FROM and out.flags.aligned

    def run(start: int, stop: int) -> None:
        kernel(target, places, start * lanes, stop * lanes, streaming)

    return run


def same_order(arrays: Sequence[Array]) -> bool:
    """Return whether all arrays are contiguous, all in C or all in Fortran order."""
    for array in arrays:
        if not array.flags.c_contiguous:
            return all(array.flags.f_contiguous for array in arrays)
    return True


def _agrees(kernel: "Kernel", rule: Rule, count: int) -> bool:
    """Compare a kernel with NumPy, for two misalignments and both kinds of store."""
    buffers = [_probe(rule.dtype, seed) for seed in range(count)]
    wanted = quietly(fold_for(rule, buffers[0].nbytes, count), rule, buffers, None)
    given = tuple([buffer.ctypes.data for buffer in buffers])
    for offset, streaming in ((0, False), (1, False), (0, True), (1, True)):
        got = np.zeros(len(wanted) + offset, rule.result)[offset:]
        kernel(got.ctypes.data, given, 0, len(wanted) * components(rule.dtype), streaming)
        if not _same_bits(got, wanted):
            return False
    return True


def _probe(dtype: DType, seed: int) -> Array:
    """Return values of many magnitudes, with zeros, infinities and NaN if the dtype has them."""
    generator = np.random.default_rng(seed)
    if dtype.kind in "biu":
        return np.frombuffer(generator.bytes(782 * dtype.itemsize), dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -1.0])
    numbers = generator.standard_normal(782) * 2.0 ** generator.integers(-30, 30, 782)
    numbers = np.where(generator.random(782) < 0.25, generator.choice(special, 782), numbers)
    return quietly(numbers.astype, lane(dtype)).view(dtype)


def _same_bits(one: Array, other: Array) -> bool:
    """Compare bytes, with all NaNs equal."""
    one, other = one.view(lane(one.dtype)), other.view(lane(other.dtype))
    kind = f"u{one.dtype.itemsize}"
    with np.errstate(invalid="ignore"):  # comparing a signaling NaN warns
        return bool(np.all((one.view(kind) == other.view(kind)) | (np.isnan(one) & np.isnan(other))))
