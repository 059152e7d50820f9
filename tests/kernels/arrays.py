# SPDX-License-Identifier: Apache-2.0
"""Inputs for reductions: difficult values in every layout; and the comparison of bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SINGLE = np.dtype(np.float32)
FLOATS = [np.dtype(np.float16), BFLOAT16, SINGLE, np.dtype(np.float64)]
INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
COMPLEX: list[np.dtype] = [np.dtype(np.complex64), np.dtype(np.complex128)]
BOOL = np.dtype(bool)
ALL = [*FLOATS, *INTEGERS, *COMPLEX, BOOL]

LAYOUTS = ["C", "F", "strided", "reversed", "read-only", "big-endian", "misaligned", "mixed", "memmap"]


def values(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return random values of all magnitudes, one in eight of them special: zeros, infinities, NaN, extremes."""
    generator = np.random.default_rng(seed)
    if dtype.kind == "b":
        return generator.random(shape) < 0.5
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return generator.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        pair = np.empty(shape, dtype)
        pair.real, pair.imag = values(seed, shape, part), values(seed + 1, shape, part)
        return pair
    return _floats(generator, shape, dtype)


def _floats(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    scale = generator.choice([1.0, 2.0**-12, 2.0**8, 2.0 ** (info.minexp - 2)], shape)
    plain = generator.standard_normal(shape) * scale
    tiny, big = float(info.smallest_subnormal), float(info.max)
    special = generator.choice([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, big, -big], shape)
    with np.errstate(all="ignore"):
        return np.where(generator.random(shape) < 0.125, special, plain).astype(dtype)


def laid_out(array: np.ndarray, layout: str, index: int = 0) -> np.ndarray:
    """Return the same values in another layout; `index` is the buffer's index, for "mixed"."""
    if layout == "mixed":
        layout = ["C", "F", "strided", "reversed"][index % 4]
    if layout == "big-endian":
        return array.astype(array.dtype.newbyteorder(">")) if array.dtype != BFLOAT16 else array.copy()
    if layout == "misaligned":
        fresh = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    elif layout == "strided":
        fresh = np.empty((*array.shape, 3), array.dtype)[..., 1]
    elif layout == "reversed" and array.ndim:
        fresh = np.empty(array.shape, array.dtype)[::-1]
    else:
        fresh = np.empty(array.shape, array.dtype, order="F" if layout == "F" else "C")
    fresh[...] = array
    fresh.flags.writeable = layout != "read-only"
    return fresh.view(np.memmap) if layout == "memmap" else fresh


def buffers(seed: int, count: int, shape: tuple[int, ...], dtype: np.dtype, layout: str = "C") -> list[np.ndarray]:
    return [laid_out(np.asarray(values(seed + 7 * index, shape, dtype)), layout, index) for index in range(count)]


def bits(array: np.ndarray) -> np.ndarray:
    """Return the bits of every element, the same for all NaNs."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(f"f{flat.dtype.itemsize // 2}")
    numbers = flat.view(f"u{flat.dtype.itemsize}").copy()
    if flat.dtype.kind == "f" or flat.dtype == BFLOAT16:
        with np.errstate(invalid="ignore"):  # signaling NaNs warn
            numbers[np.isnan(flat)] = np.iinfo(numbers.dtype).max
    return numbers


def assert_same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    differ = np.flatnonzero(bits(got) != bits(wanted))
    assert not differ.size, (
        f"{differ.size} of {wanted.size} elements differ, first at {differ[0]}: "
        f"got {np.ravel(got)[differ[0] % got.size]!r}, wanted {np.ravel(wanted)[differ[0] % got.size]!r}"
    )


shapes = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4)])
layouts = st.sampled_from(LAYOUTS)
counts = st.integers(1, 19)
seeds = st.integers(0, 2**20)


def name(parameter: object) -> str:
    """Return a parameter's part of a test id."""
    return str(getattr(parameter, "name", parameter))
