# SPDX-License-Identifier: Apache-2.0
"""The compiled tier: which kernels exist, and how a kernel is given its buffers.

Nothing here compiles on the way to a result: `compile_for` does, when it is called, in whichever thread calls it. A
kernel is admitted only after it has given the bits of the NumPy tier for values that tell implementations apart, on
this machine; else NumPy goes on serving.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiodist_kernels.arguments import Array, same_order
from aiodist_kernels.numpy_tier import fold_for, quietly
from aiodist_kernels.rules import DType, Rule, components, is_bfloat16

if TYPE_CHECKING:
    from aiodist_kernels.kernels_cpu import Kernel

STREAMING_FROM: Final = 32 << 20
"""Bytes from which results are stored past the caches: the reader that follows would not find them there anyway, and
the memory they replace need not be read first."""

Range = Callable[[int, int], None]
"""Reduces the elements [start, stop)."""


def compile_for(rule: Rule, count: int) -> "Kernel | None":
    """Compile the kernel for `count` buffers; return None where it would give other bits than NumPy.

    Raises:
        ImportError: Numba is not installed, or does not load.
    """
    try:
        from aiodist_kernels import kernels_cpu
    except OSError as error:  # of the LLVM library that Numba loads
        raise ImportError(str(error)) from error
    kernel = kernels_cpu.compile_kernel(rule, count) if kernels_cpu.can_compile(rule) else None
    return kernel if kernel is not None and _agrees(kernel, rule, count) else None


def bind(kernel: "Kernel", rule: Rule, buffers: Sequence[Array], out: Array) -> Range | None:
    """Return what reduces the elements [start, stop) of `buffers` into those of `out`, which may be one of them.

    All must live as long as the function that is returned. None unless all lie without gaps in one order, and where
    `out` overlaps a buffer otherwise, for then a write could spoil what is still to be read.
    """
    if not same_order((*buffers, out)):
        return None
    target = out.ctypes.data
    places = tuple([buffer.ctypes.data for buffer in buffers])
    size, end = buffers[0].nbytes, target + out.nbytes
    if [place for place in places if place < end and target < place + size and (place, size) != (target, out.nbytes)]:
        return None
    lanes = components(rule.dtype)
    streaming = out.nbytes >= STREAMING_FROM and out.flags.aligned

    def run(start: int, stop: int) -> None:
        kernel(target, places, start * lanes, stop * lanes, streaming)

    return run


def _agrees(kernel: "Kernel", rule: Rule, count: int) -> bool:
    """Compare a kernel with NumPy, for two misalignments and both kinds of store."""
    buffers = [_probe(rule.dtype, seed) for seed in range(count)]
    wanted = quietly(fold_for(rule, buffers[0].nbytes, count), rule, buffers, None)
    lanes, size = components(rule.dtype), len(wanted)
    given = tuple([buffer.ctypes.data for buffer in buffers])
    for offset, streaming in ((0, False), (1, False), (0, True), (1, True)):
        got = np.zeros(size + offset, rule.result)[offset:]
        kernel(got.ctypes.data, given, 0, size * lanes, streaming)
        if not _same_bits(got, wanted):
            return False
    return True


def _probe(dtype: DType, seed: int) -> Array:
    """Return values of many magnitudes, with zeros, infinities and NaN where there are such."""
    generator = np.random.default_rng(seed)
    if dtype.kind in "biu":
        return generator.integers(0, 256, 391 * dtype.itemsize, np.uint8).view(dtype)
    numbers = generator.standard_normal(782) * 2.0 ** generator.integers(-30, 30, 782)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -1.0])
    numbers = np.where(generator.random(782) < 0.25, generator.choice(special, 782), numbers)
    with np.errstate(all="ignore"):
        if dtype.kind == "c":
            return numbers.astype(np.float32).astype(f"f{dtype.itemsize // 2}").view(dtype)
        return numbers[:391].astype(dtype)


def _same_bits(one: Array, other: Array) -> bool:
    """Compare bytes, with every NaN equal to every other."""
    if one.dtype.kind == "c":
        one, other = (a.view(f"f{a.dtype.itemsize // 2}") for a in (one, other))
    if one.dtype.kind != "f" and not is_bfloat16(one.dtype):
        return one.tobytes() == other.tobytes()
    kind = f"u{one.dtype.itemsize}"
    same: Any = one.view(kind) == other.view(kind)
    with np.errstate(invalid="ignore"):  # a signaling NaN is invalid to look at
        return bool(np.all(same | (np.isnan(one) & np.isnan(other))))
