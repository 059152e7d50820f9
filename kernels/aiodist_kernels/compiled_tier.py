# SPDX-License-Identifier: Apache-2.0
"""The compiled tier: which kernels exist, and how a kernel is given its buffers.

Nothing here compiles on the way to a result: `compile_for` does, when it is called, in whichever
thread calls it. A kernel is admitted only after it has given the bits of the NumPy tier for
values that tell implementations apart, on this machine; else NumPy goes on serving.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from aiodist_kernels import policy
from aiodist_kernels.arguments import Array
from aiodist_kernels.beside import considerately
from aiodist_kernels.layout import address
from aiodist_kernels.numpy_tier import fold_for
from aiodist_kernels.recipes import UNROLLED_COUNT, Recipe, components, recipe_for
from aiodist_kernels.rules import DType, Rule, is_bfloat16
from aiodist_kernels.warnings_alone import leaving_warnings_alone

Kernel = Any

Range = Callable[[int, int], None]
"""Reduces the elements [start, stop)."""

_compiled: Final[dict[Recipe, Kernel]] = {}
_small: Final[dict[tuple[Recipe, Rule], Any]] = {}
_small_code: Final[dict[Recipe, Any]] = {}
_refused: Final[set[Recipe]] = set()
_compiling: Final = threading.Lock()


def form(count: int) -> int:
    """Return the count that a kernel for `count` buffers is compiled for; 0 serves any."""
    return count if count <= UNROLLED_COUNT else 0


def compile_for(rule: Rule, count: int) -> Kernel | None:
    """Return the kernel for `count` buffers, compiling it if need be.

    Returns:
        None where there is none: one buffer, long double, or a processor on which the kernel gave
        other bits than NumPy.
    """
    recipe = recipe_for(rule, count)
    if recipe is None:
        return None
    with _compiling:
        if recipe not in _compiled and recipe not in _refused:
            with considerately(), leaving_warnings_alone():
                _compile(recipe, rule, count)
    return _compiled.get(recipe)


def compile_small_for(rule: Rule) -> Any:
    """Return the kernel for small values, of any number of buffers, compiling it if need be; None where there is none.

    It is a `kernels_small.SmallKernel`.
    """
    recipe = recipe_for(rule, UNROLLED_COUNT + 1)
    if recipe is None:
        return None
    with _compiling:
        if (recipe, rule) not in _small:
            with considerately(), leaving_warnings_alone():
                _small[recipe, rule] = _compile_small(recipe, rule)
    return _small[recipe, rule]


def bind(kernel: Kernel, rule: Rule, buffers: Sequence[Array], out: Array) -> Range | None:
    """Return what reduces the elements [start, stop) of `buffers` into those of `out`.

    Args:
        kernel: what `compile_for` returned for `rule` and the number of buffers.
        rule: the rule.
        buffers: contiguous, of native byte order, all in C or all in Fortran order. They, and `out`,
            must live as long as the function that is returned.
        out: contiguous in the same order; it may be one of the buffers.

    Returns:
        None if `out` overlaps a buffer otherwise, for then a write could spoil what is still to be read.
    """
    target = address(out)
    places = tuple([address(buffer) for buffer in buffers])
    if _spoils(target, out.nbytes, places, buffers[0].nbytes):
        return None
    given = places if len(places) <= UNROLLED_COUNT else np.array(places, np.intp)
    lanes = components(rule.dtype)
    streaming = policy.streams(out.nbytes) and out.flags.aligned

    def run(start: int, stop: int) -> None:
        kernel(target, given, start * lanes, stop * lanes, streaming)

    return run


def _spoils(target: int, result_bytes: int, places: tuple[int, ...], buffer_bytes: int) -> bool:
    end = target + result_bytes
    for place in places:
        if place < end and target < place + buffer_bytes and (place != target or buffer_bytes != result_bytes):
            return True
    return False


def _compile(recipe: Recipe, rule: Rule, count: int) -> None:
    from aiodist_kernels.kernels_cpu import compile_kernel

    kernel = compile_kernel(recipe)
    if _agrees(kernel, rule, count):
        _compiled[recipe] = kernel
    else:
        _refused.add(recipe)


def _compile_small(recipe: Recipe, rule: Rule) -> Any:
    from aiodist_kernels import kernels_small

    if not kernels_small.layout_is_known():
        return None
    kernel = _small_code.get(recipe) or kernels_small.compile_small(recipe)
    _small_code[recipe] = kernel
    return kernel if _small_agrees(kernel, rule) else None


def _small_agrees(kernel: Any, rule: Rule) -> bool:
    """Compare a kernel for small values with NumPy: arrays in a list and in a tuple, and single numbers."""
    buffers = [_probe(rule.dtype, seed) for seed in range(5)]
    elements = [[buffer[place] for buffer in buffers] for place in range(64)]
    for given in (buffers, tuple(buffers), *elements, *([np.asarray(n) for n in some] for some in elements)):
        arrays = [np.asarray(buffer) for buffer in given]
        with np.errstate(all="ignore"):
            wanted = fold_for(rule)(rule, arrays, None)
        got: Array = np.zeros(arrays[0].shape, rule.result)
        nbytes = arrays[0].nbytes if isinstance(given[0], np.ndarray) else -arrays[0].nbytes
        if not (kernel(given, got, nbytes) and _same_bits(got.reshape(-1), wanted.reshape(-1))):
            return False
    return True


def _agrees(kernel: Kernel, rule: Rule, count: int) -> bool:
    """Compare a kernel with NumPy, for two misalignments and both kinds of store."""
    buffers = [_probe(rule.dtype, seed) for seed in range(count)]
    with np.errstate(all="ignore"):
        wanted = fold_for(rule)(rule, buffers, None)
    lanes, size = components(rule.dtype), len(wanted)
    places = [address(buffer) for buffer in buffers]
    given = tuple(places) if count <= UNROLLED_COUNT else np.array(places, np.intp)
    for offset, streaming in ((0, False), (1, False), (0, True), (1, True)):
        got = np.zeros(size + offset, rule.result)[offset:]
        kernel(address(got), given, 0, size * lanes, streaming)
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
    same = one.view(kind) == other.view(kind)
    with np.errstate(invalid="ignore"):  # a signaling NaN is invalid to look at
        return bool(np.all(same | (np.isnan(one) & np.isnan(other))))
