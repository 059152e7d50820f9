"""Leaves: what the values of a nest are, and what of them takes part in a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from aiodist.vocabulary import device_frameworks, foreign_arrays, nests
from aiodist.vocabulary.arraylike import ArrayLike
from aiodist.vocabulary.device_arrays import DeviceType
from aiodist.vocabulary.foreign_arrays import ForeignType
from aiodist.vocabulary.indexed_slices import IndexedSlices


class LeafType:
    """What a leaf is, beside its shape and dtype. A NumPy array, the commonest, is marked by None.

    Another framework's array is marked by its `ForeignType`, or its `DeviceType` where it lies on a GPU.
    """

    NUMPY_ARRAY: Final = None
    NUMPY_SCALAR: Final = "NumPy scalar"
    PYTHON_NUMBER: Final = "Python number"
    INDEXED_SLICES: Final = "IndexedSlices"


_NUMBERS = (int, float, complex, bool)


LeafMark: TypeAlias = str | ForeignType | DeviceType | None
Leaf: TypeAlias = tuple[tuple[Any, ...], Any, LeafMark, Any]


def describe_leaf(leaf: Any) -> Leaf:  # noqa: PLR0911  (one return a type)
    """Return a leaf's shape, dtype (for a Python number its type), mark, and what of it takes part in a collective.

    The shape has None for a size that is not known; the mark is what `LeafType` says; what takes part is the leaf, the
    array that it reads as, or a NumPy array over its memory, or what `DeviceArray` tells of it.

    Raises:
        ImportError: it is a foreign array of bfloat16, and ml_dtypes is not installed.
        TypeError: it is no array, NumPy scalar, Python number or IndexedSlices.
    """
    kind: Any = type(leaf)
    if kind is np.ndarray or kind is np.memmap:
        return leaf.shape, leaf.dtype, LeafType.NUMPY_ARRAY, leaf
    likely = device_frameworks.likely_type_of(kind)
    if likely is not None and likely.is_on_gpu(leaf):  # asked first, as it is what device arrays are known by
        found = likely.view(leaf)
        return found.shape, found.dtype, likely, found
    if isinstance(leaf, np.generic) and not isinstance(leaf, np.void):  # a record is not immutable, as scalars are
        return (), leaf.dtype, LeafType.NUMPY_SCALAR, leaf
    if kind in _NUMBERS:
        return (), kind, LeafType.PYTHON_NUMBER, leaf
    if kind is IndexedSlices:
        return leaf.shape, leaf.dtype, LeafType.INDEXED_SLICES, leaf
    if isinstance(leaf, ArrayLike):
        return describe_leaf(leaf.read_value())
    on_device = device_frameworks.type_of(leaf)
    if on_device is not None:
        found = on_device.view(leaf)
        return found.shape, found.dtype, on_device, found
    foreign = foreign_arrays.type_of(leaf)
    if foreign is None:
        raise TypeError(_unsupported(leaf))
    array = foreign.view(leaf)
    return array.shape, array.dtype, foreign, array


def _unsupported(leaf: Any) -> str:
    kind = type(leaf)
    if isinstance(leaf, np.ndarray):
        return (
            f"expected a plain NumPy array, got the subclass {kind.__module__}.{kind.__qualname__}, whose extra "
            "meaning a collective would lose; pass np.asarray(value)"
        )
    register = f"; define it with @optree.dataclasses.dataclass(namespace={nests.NAMESPACE!r})"
    return (
        "expected a nest of arrays, NumPy scalars and Python numbers, got an object of type "
        f"{kind.__module__}.{kind.__qualname__}: {_short(leaf)}{register if is_dataclass(leaf) else ''}"
    )


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


class Spec(NamedTuple):
    """What a replica's value is, without its numbers: an item for each leaf.

    Attributes:
        shapes: their shapes. A size is None where it may differ between replicas.
        dtypes: their dtypes; the type of a Python number.
        marks: what they are beside that, see `LeafType`.
        single: the value is its only leaf, and no nest.
    """

    shapes: tuple[tuple[int | None, ...], ...]
    dtypes: tuple[Any, ...]
    marks: tuple[LeafMark, ...]
    single: bool = False

    def of(self, places: Sequence[int]) -> Spec:
        """Return the spec of some of the leaves, as a nest."""
        return Spec(*(tuple([items[place] for place in places]) for items in self[:3]))


def is_array(mark: LeafMark) -> bool:
    """Return whether leaves of that mark take part as NumPy arrays, be it over another framework's memory."""
    return mark is None or isinstance(mark, ForeignType)
