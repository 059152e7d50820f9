"""Kinds of values that collectives take, and checks of results of any kind."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
from hypothesis import strategies as st

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
    """A subclass of dict that is not registered."""


class Ordered(OrderedDict[str, Any]):
    """A subclass of OrderedDict that is not registered."""


def numbers(replica_id: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Return small numbers, different on each replica, with exact sums."""
    count = int(np.prod(shape))
    return (np.arange(count, dtype=np.int64).reshape(shape) % 5 + 3 * replica_id + 1).astype(dtype)


DTYPES = [np.dtype(kind) for kind in ("f4", "f8", "f2", "i1", "u8", "i4", "c8", ">f4", "?")]
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda array: array,
    "strided": lambda array: np.repeat(array, 2, axis=0)[::-2],
    "Fortran": np.asfortranarray,
    "read-only": lambda array: np.broadcast_to(array, array.shape),
}
NUMBERS: list[Callable[[int], Any]] = [
    lambda r: np.array(r + 1.5),
    lambda r: np.float32(r + 1.5),
    lambda r: np.int16(r + 30000),
    lambda r: r + 2,
    lambda r: 10**30 + r,
    lambda r: r + 0.1,
]
ANYTHING: list[Callable[[int], Any]] = [
    lambda r: complex(r, 1),
    lambda r: r > 0,
    lambda r: np.bool_(r > 0),
    lambda r: np.array([f"of {r}", "x"]),
    lambda r: np.array(["2026-11-21"], "M8[D]") + np.timedelta64(r, "D"),
    lambda r: np.array([(r, r / 2)], [("a", "i4"), ("b", "f8")]),
]
SHAPES = [(6,), (6, 6), (12, 2), (6, 0), (0, 6)]  # can be cut for 1, 2 and 3 replicas


def makers(arrays_alone: bool, dtypes: Sequence[np.dtype], others: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Draw functions from a replica's id to its value: nests of every kind of container and leaf."""

    def array(dtype: np.dtype, shape: tuple[int, ...], layout: str) -> Callable[[int], np.ndarray]:
        return lambda r: LAYOUTS[layout](numbers(r, *shape, dtype=dtype))

    def nest(make: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        return lambda inner: lambda r: make([one(r) for one in inner])

    def named(kind: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
        return lambda values: kind(zip("zax", values, strict=False))

    leaves: Any = st.builds(array, st.sampled_from(dtypes), st.sampled_from(SHAPES), st.sampled_from(sorted(LAYOUTS)))
    if not arrays_alone:
        leaves |= st.sampled_from([*NUMBERS, *others])
    dicts: list[Any] = [dict, OrderedDict, Fields, Ordered, lambda items: defaultdict(list, items)]
    kinds: list[Any] = [list, tuple, *map(named, dicts)]
    of_two: list[Any] = [lambda two: Pair(*two), lambda two: Point(*two)]
    return st.recursive(
        leaves | st.just(lambda _: None),
        lambda inner: st.one_of(
            *(st.lists(inner, max_size=3).map(nest(kind)) for kind in kinds),
            *(st.lists(inner, min_size=2, max_size=2).map(nest(kind)) for kind in of_two),
        ),
        max_leaves=5,
    )


def leaves_of(value: Any) -> list[Any]:
    leaves: list[Any] = optree.tree_leaves(value, namespace=NAMESPACE)
    return leaves


def columnwise(fn: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Any:
    """Apply a function to the replicas' values of each leaf."""
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
    """Check that a result is read-only, and shares no memory with inputs."""
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
