"""Kinds of values that a collective takes, and what must hold of a result, whatever the kind."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import optree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NAMESPACE = "aiodist"


@dataclasses.dataclass
class Point:
    """A dataclass that is registered with optree."""

    x: Any
    y: Any


_register: Any = optree.register_pytree_node  # typed for collections only
_register(Point, lambda p: ((p.x, p.y), None), lambda _, xy: Point(*xy), namespace=NAMESPACE)


class Pair(NamedTuple):
    left: Any
    right: Any


class Fields(dict[str, Any]):
    """A subclass of dict, which nobody has registered."""


class Ordered(OrderedDict[str, Any]):
    """One of OrderedDict."""


def numbers(replica_id: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Small numbers, others on each replica, in whose sums no bit is lost."""
    count = int(np.prod(shape))
    return (np.arange(count, dtype=np.int64).reshape(shape) % 5 + 3 * replica_id + 1).astype(dtype)


def strided(replica_id: int) -> np.ndarray:
    return numbers(replica_id, 12, 6)[::2, ::-3]


# Arrays with axes whose sizes are divisible by 1, 2 and 3.
ARRAYS: dict[str, Callable[[int], Any]] = {
    "float32": lambda r: numbers(r, 6, 6),
    "float64": lambda r: numbers(r, 6, dtype=np.float64),
    "float16": lambda r: numbers(r, 6, dtype=np.float16),
    "int8": lambda r: numbers(r, 6, dtype=np.int8) * 40,  # wraps
    "uint64": lambda r: numbers(r, 6, dtype=np.uint64),
    "complex64": lambda r: numbers(r, 6, dtype=np.complex64) * (1 + 2j),
    "empty": lambda r: np.zeros((0, 6), np.float32),
    "empty behind": lambda r: np.zeros((6, 0)),
    "strided": strided,
    "Fortran": lambda r: np.asfortranarray(numbers(r, 6, 12)),
    "big-endian": lambda r: numbers(r, 6, dtype=">f4"),
    "read-only": lambda r: _read_only(numbers(r, 6)),
    "dict": lambda r: {"b": numbers(r, 6), "a": numbers(r, 12, 2, dtype=np.int32)},
    "list": lambda r: [numbers(r, 6), numbers(r + 1, 6)],
    "tuple": lambda r: (numbers(r, 6),),
    "namedtuple": lambda r: Pair(numbers(r, 6), numbers(r, 6, 1)),
    "OrderedDict": lambda r: OrderedDict(z=numbers(r, 6), a=numbers(r, 6)),
    "defaultdict": lambda r: defaultdict(list, z=numbers(r, 6), a=numbers(r, 6)),
    "dict subclass": lambda r: [Fields(z=(Fields(x=numbers(r, 6)),), a=numbers(r, 6))],
    "OrderedDict subclass": lambda r: Ordered(z=numbers(r, 6), a=numbers(r, 6)),
    "dataclass": lambda r: Point(numbers(r, 6), {"deep": [numbers(r, 6)]}),
    "None": lambda r: None,
    "None inside": lambda r: {"a": None, "b": (numbers(r, 6), None)},
    "empty tuple": lambda r: (),
    "empty dict": lambda r: {},
    "empty list inside": lambda r: [[], numbers(r, 6), {}],
}

SCALARS: dict[str, Callable[[int], Any]] = {
    "0-d": lambda r: np.array(r + 1.5),
    "NumPy float32": lambda r: np.float32(r + 1.5),
    "NumPy int16": lambda r: np.int16(r + 30000),
    "int": lambda r: r + 2,
    "big int": lambda r: 10**30 + r,
    "float": lambda r: r + 0.1,
    "complex": lambda r: complex(r, 1),
    "nest of scalars": lambda r: {"int": r, "more": [float(r), np.float64(r), np.array(r)]},
}

BOOLS: dict[str, Callable[[int], Any]] = {
    "bool": lambda r: r > 0,
    "NumPy bool": lambda r: np.bool_(r > 0),
    "array of bool": lambda r: np.arange(6) > r,
}


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def leaves_of(value: Any) -> list[Any]:
    leaves: list[Any] = optree.tree_leaves(value, namespace=NAMESPACE)
    return leaves


def columnwise(fn: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Any:
    """Apply a function to each leaf's column over the replicas; NumPy's answer, leaf by leaf."""
    return optree.tree_map(lambda *column: fn(column), *values, namespace=NAMESPACE)


def native(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=")


def assert_equal(got: Any, wanted: Any) -> None:
    """Check structure, types, dtypes (in native byte order), shapes and values."""
    assert optree.tree_structure(got, namespace=NAMESPACE) == optree.tree_structure(wanted, namespace=NAMESPACE)
    for mine, theirs in zip(leaves_of(got), leaves_of(wanted), strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, np.ndarray | np.generic):
            assert (mine.dtype, mine.shape) == (native(theirs.dtype), theirs.shape)
            assert mine.dtype.isnative
            np.testing.assert_array_equal(mine, theirs.astype(native(theirs.dtype)))
        else:
            assert mine == theirs


def arrays_of(value: Any) -> list[np.ndarray]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, np.ndarray)]


def assert_own_and_read_only(result: Any, inputs: Iterable[Any]) -> None:
    """Check that nobody can change a result, by itself or through an input."""
    for array in arrays_of(result):
        assert not array.flags.writeable
        for given in arrays_of(list(inputs)):
            assert not np.shares_memory(array, given)


def containers(value: Any) -> list[Any]:
    """List the mutable containers in a nest."""
    found: list[Any] = []
    if isinstance(value, dict):
        found += [value, *(inner for item in value.values() for inner in containers(item))]
    elif isinstance(value, list | tuple):
        found += [value] if isinstance(value, list) else []
        found += [inner for item in value for inner in containers(item)]
    elif isinstance(value, Point):
        found += [value, *containers(value.x), *containers(value.y)]
    return found
