"""IndexedSlices: some rows of an array, such as the gradient of an embedding."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from aiodist._arrays.host import Array
from aiodist_kernels.arguments import check_unmasked


class IndexedSlices:
    """Rows of an array with their indices; all other rows are zero. An index may occur several times.

    `ReplicaContext.all_reduce`, `Strategy.reduce` and `StrategyExtended.reduce_to` add rows with the same index, and
    return `IndexedSlices` whose indices are ascending and distinct. Replicas may have different numbers of rows. It is
    never made dense implicitly; do that with `np.add.at(dense, slices.indices, slices.values)`.

    Args:
        values: the rows, an array with at least one axis. It is not copied.
        indices: an index of 0 or more for each row, one-dimensional, of an integer dtype.
        dense_shape: the shape of the whole array; None if it is not known.

    Raises:
        TypeError: ``indices`` or ``dense_shape`` are not integers, or ``values`` is masked.
        ValueError: the numbers of indices and rows differ; an index is negative or beyond the shape; the rows have
            another shape than those of ``dense_shape``.
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
        """The shape of the whole array; None if it is not known."""
        return self._dense_shape

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the whole array; its first size is None if it is not known."""
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
            "IndexedSlices do not turn into an array by themselves: pass .values and .indices, or write "
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
        raise ValueError(f"dense_shape {sizes} must end with the shape of a row, {values.shape[1:]}")
    if indices.size and indices.max() >= sizes[0]:
        raise ValueError(f"indices must be below {sizes[0]}, the first size of dense_shape, got {indices.max()}")
    return sizes


IndexedSlices.__module__ = "aiodist"
