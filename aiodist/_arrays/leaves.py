"""The description of a leaf, and of a value, to a collective: shapes, dtypes, kinds, and the arrays that take part."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.device import DeviceType, device_type_of, framework_of
from aiodist._arrays.host import ArrayLike, HostType
from aiodist._arrays.values import DistributedValues, IndexedSlices
from aiodist._core.text import shortened


class LeafType:
    """The marks of leaves: what a leaf is, apart from its shape and dtype.

    The mark of another framework's array is its `HostType`, or its `DeviceType` if it is on a GPU.
    """

    NUMPY_ARRAY: Final = None
    NUMPY_SCALAR: Final = "scalar"
    PYTHON_NUMBER: Final = "number"
    INDEXED_SLICES: Final = "slices"


LeafMark: TypeAlias = str | HostType | DeviceType | None
Leaf: TypeAlias = tuple[tuple[Any, ...], Any, LeafMark, Any]

_NUMBERS = (int, float, complex, bool)


class Spec(NamedTuple):
    """The description of a replica's value: an item for each leaf."""

    shapes: tuple[tuple[int | None, ...], ...]  # a size is None if it may differ between replicas
    dtypes: tuple[Any, ...]  # for a Python number, its type
    marks: tuple[LeafMark, ...]
    single: bool = False  # the value is a leaf, not a nest

    def of(self, indices: Sequence[int]) -> Spec:
        """Return the spec of some of the leaves, as a nest."""
        return Spec(
            tuple([self.shapes[index] for index in indices]),
            tuple([self.dtypes[index] for index in indices]),
            tuple([self.marks[index] for index in indices]),
        )

    def columns(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Return values of this spec, one for each replica, leaf by leaf."""
        return [values] if self.single else list(zip(*values, strict=True))


def describe(value: Any) -> tuple[nests.Structure | None, Spec, Any]:
    """Return the structure, the spec, and the leaves of a value as they take part in a collective.

    A single leaf, the commonest value, has no structure, and is returned instead of a list. See `describe_leaf`.
    """
    if isinstance(value, (np.ndarray, np.generic, int, float, complex)) or hasattr(value, "__dlpack_device__"):
        return _single(value)
    leaves, structure = nests.flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _single(value)
    types = set(map(type, leaves))
    if types <= {np.ndarray}:
        return structure, _spec(leaves, LeafType.NUMPY_ARRAY), leaves
    if len(types) == 1:
        with suppress(TypeError):  # raised again below, with the leaf's path
            mark = device_type_of(leaves[0])
            if mark is not None and all(map(mark.is_on_gpu, leaves)):  # nests of hundreds of tensors are common
                arrays = list(map(mark.view, leaves))
                return structure, _spec(arrays, mark), arrays
    found = []
    for index, leaf in enumerate(leaves):
        try:
            found.append(describe_leaf(leaf))
        except TypeError as error:
            path = nests.leaf_paths(structure, "value")[index]
            raise TypeError(f"{path}: {error}") from None
    shapes, dtypes, marks, taking_part = zip(*found, strict=True)
    return structure, Spec(shapes, dtypes, marks), list(taking_part)


def _single(leaf: Any) -> tuple[None, Spec, Any]:
    shape, dtype, mark, taking_part = describe_leaf(leaf)
    return None, Spec((shape,), (dtype,), (mark,), single=True), taking_part


def _spec(arrays: Sequence[Any], mark: LeafMark) -> Spec:
    """Return the spec of a nest of arrays that all have the same mark."""
    return Spec(tuple([a.shape for a in arrays]), tuple([a.dtype for a in arrays]), (mark,) * len(arrays))


def describe_leaf(leaf: Any) -> Leaf:
    """Return a leaf's shape, dtype (for a Python number its type), mark, and what takes part in a collective.

    That is the leaf, the array that it reads as, a NumPy array over its memory, or its `DeviceArray`. For anything else
    there is a TypeError.
    """
    kind: Any = type(leaf)
    if kind is np.ndarray or kind is np.memmap:
        return leaf.shape, leaf.dtype, LeafType.NUMPY_ARRAY, leaf
    if isinstance(leaf, np.generic) and not isinstance(leaf, np.void):  # a record is mutable, unlike other scalars
        return (), leaf.dtype, LeafType.NUMPY_SCALAR, leaf
    if isinstance(leaf, _NUMBERS):
        number: Any = kind if kind in _NUMBERS else next(base for base in kind.__mro__ if base in _NUMBERS)
        return (), number, LeafType.PYTHON_NUMBER, number(leaf)  # a subclass, such as an IntEnum, counts as its base
    if kind is IndexedSlices:
        return leaf.shape, leaf.dtype, LeafType.INDEXED_SLICES, leaf
    if isinstance(leaf, ArrayLike):
        return describe_leaf(leaf.read_value())
    framework = framework_of(leaf)
    if framework is None:
        raise TypeError(_unsupported(leaf))
    array = framework.view(leaf)
    return array.shape, array.dtype, framework, array


def _unsupported(leaf: Any) -> str:
    kind, shown = type(leaf), shortened(repr(leaf), 60)
    if isinstance(leaf, np.ndarray):
        return (
            f"expected a plain NumPy array, got the subclass {kind.__module__}.{kind.__qualname__}, whose extra "
            "meaning a collective would lose; pass np.asarray(value)"
        )
    if isinstance(leaf, Awaitable):
        return f"expected a nest of arrays, NumPy scalars and Python numbers, got {shown}; is `await` missing?"
    if isinstance(leaf, DistributedValues):
        return (
            "expected a nest of arrays, NumPy scalars and Python numbers, got an object of type "
            f"{kind.__module__}.{kind.__qualname__}; pass it to strategy.run as an argument, and each replica gets its "
            "own component"
        )
    if kind in (tuple, list, dict):  # otherwise it would be a nest, not a leaf
        return (
            f"expected arrays, NumPy scalars or Python numbers as the components of a distributed value, got {shown}; "
            "pass a nest of distributed values instead, with one for each leaf"
        )
    register = f"; define it with @optree.dataclasses.dataclass(namespace={nests.NAMESPACE!r})"
    return (
        "expected a nest of arrays, NumPy scalars and Python numbers, got an object of type "
        f"{kind.__module__}.{kind.__qualname__}: {shown}{register if is_dataclass(leaf) else ''}"
    )


def is_array(mark: LeafMark) -> bool:
    """Return whether leaves with a mark take part as NumPy arrays, perhaps over another framework's memory."""
    return mark is None or isinstance(mark, HostType)
