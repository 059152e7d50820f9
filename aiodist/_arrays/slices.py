"""IndexedSlices: some rows of a tall array, as the gradient of an embedding has them."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from aiodist._arrays.host import Array
from aiodist_kernels.arguments import check_unmasked


class IndexedSlices:
    """Rows of an array, with the index of each; rows that are not named are zero. An index may come several times.

    `all_reduce`, `Strategy.reduce` and `StrategyExtended.reduce_to` add rows of the same index and give
    `IndexedSlices` again, with ascending indices that come once. Replicas may have different numbers of rows. Nothing
    makes an array of it but the caller: `np.add.at(dense, slices.indices, slices.values)`.

    Args:
        values: the rows, an array with at least one axis. It is not copied.
        indices: one index a row, integers of 0 or more.
        dense_shape: the shape of the whole array; None where it is not known.

    Raises:
        TypeError: indices or a shape that are no integers; masked values.
        ValueError: not one index for each row; a negative index or one beyond the shape; rows of another shape than
            ``dense_shape`` has.
    """

    __slots__ = ("_dense_shape", "_indices", "_values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        check_unmasked(values, "as the values of IndexedSlices")
        self._values: Array = np.asarray(values)
        self._indices = _indices(indices, self._values)
        self._dense_shape = None if dense_shape is None else _shape(dense_shape, self._values, self._indices)

    @property
    def values(self) -> Array:
        """The rows."""
        return self._values

    @property
    def indices(self) -> Array:
        """The index of each row, int64."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """The shape of the whole array; None where it is not known."""
        return self._dense_shape

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the whole array, as far as it is known."""
        return self._dense_shape or (None, *self._values.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        dtype: np.dtype[Any] = self._values.dtype
        return dtype

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self._values!r}, indices={self._indices!r}, dense_shape={self._dense_shape})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "IndexedSlices are not made an array of silently: pass .values and .indices, or write "
            "dense = np.zeros(slices.dense_shape, slices.dtype); np.add.at(dense, slices.indices, slices.values)"
        )

    __array_ufunc__ = _refuse


def _indices(indices: Any, values: Array) -> Array:
    given = np.asarray(indices)
    if given.size == 0:
        given = given.astype(np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, got {given.dtype}")
    if values.ndim == 0 or given.shape != values.shape[:1]:
        raise ValueError(
            f"expected one index for each row, got indices of shape {given.shape} for values of shape {values.shape}"
        )
    if given.size and given.min() < 0:
        raise ValueError(f"indices must be 0 or more, got {given.min()}")
    return given.astype(np.int64, copy=False)


def _shape(shape: Any, values: Array, indices: Array) -> tuple[int, ...]:
    listed: Any = np.asarray(shape).tolist()
    if not isinstance(listed, list) or not all(type(size) is int for size in listed):
        raise TypeError(f"dense_shape must hold integers, got {shape!r}")
    sizes: tuple[int, ...] = tuple(listed)
    if not sizes or sizes[1:] != values.shape[1:]:
        raise ValueError(f"dense_shape {sizes} must go on as the rows do, whose shape is {values.shape[1:]}")
    if indices.size and indices.max() >= sizes[0]:
        raise ValueError(f"indices must be below {sizes[0]}, the first size of dense_shape, got {indices.max()}")
    return sizes


IndexedSlices.__module__ = "aiodist"
