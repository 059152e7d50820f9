"""Distributed values and `IndexedSlices`; how arguments are split per replica, and results regrouped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from numbers import Number
from typing import Any, Final, Generic, NoReturn, TypeVar

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.host import Array, as_numpy, check_unmasked, is_foreign
from aiodist._arrays.options import integer
from aiodist._core.text import count, ids_briefly

T = TypeVar("T")
_MOST_SHOWN = 20


class DistributedValues(Generic[T]):
    """A value with one component for each replica; base class of `PerReplica` and `Mirrored`.

    It is not iterable and has no arithmetic, because outside a replica it is not one array: these raise `TypeError`.
    Pass it to `Strategy.run`, which gives each replica its component, or combine the components with `Strategy.reduce`
    or `Strategy.gather`.

    Args:
        values: the components, in replica-id order.

    Raises:
        ValueError: there are no components.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[T]) -> None:
        self._values = tuple(values)
        if not self._values:
            raise ValueError(f"{type(self).__name__} needs one component for each replica, got none")

    @property
    def values(self) -> tuple[T, ...]:
        """The components, in replica-id order."""
        return self._values

    @property
    def shape(self) -> tuple[int, ...]:
        """The components' shape; raises AttributeError if they have none, or different ones."""
        shape: tuple[int, ...] = self._common("shape")
        return shape

    @property
    def dtype(self) -> Any:
        """The components' dtype; raises AttributeError if they have none, or different ones."""
        return self._common("dtype")

    def _common(self, name: str) -> Any:
        found = [getattr(component, name, None) for component in self._values]
        if any(one is None or one != found[0] for one in found):
            raise AttributeError(
                f"the components of this {type(self).__name__} have no common {name}; look at value.values"
            )
        return found[0]

    def __repr__(self) -> str:
        return "\n".join([f"{type(self).__name__}:{{", *(f"  {ids}: {text}" for ids, text in self._rows()), "}"])

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        shown = [_formatted(component, spec) for component in self._values[:_MOST_SHOWN]]
        left = len(self._values) - len(shown)
        return f"{type(self).__name__}({', '.join([*shown, *[f'… {left} more'] * bool(left)])})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        from html import escape

        rows = "".join(f"<tr><th>{ids}</th><td><pre>{escape(text)}</pre></td></tr>" for ids, text in self._rows())
        return f"<table><tr><th>replica</th><th>{type(self).__name__}</th></tr>{rows}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        """Return ids and components as text, with equal neighbours in one row, and at most twenty rows."""
        rows, end, size = [], 0, len(self._values)
        for _, run in islice(groupby(range(size), self._shown), _MOST_SHOWN):
            begin, end = end, end + len([*run])
            rows.append((f"{begin}-{end - 1}" if end - begin > 1 else f"{begin}", repr(self._values[begin])))
        return rows if end == size else [*rows, ("…", f"{size - end} more")]

    def _shown(self, replica_id: int) -> tuple[str, bytes | int]:
        """Return a key that differs for components that differ; a long array's repr leaves out most of it."""
        component: Any = self._values[replica_id]
        if isinstance(component, np.ndarray):
            return repr(component), component.tobytes()
        return repr(component), b"" if isinstance(component, (Number, np.generic, str, bytes)) else id(component)


class PerReplica(DistributedValues[T]):
    """A value that may differ between replicas. `Strategy.run` returns it, and gives each replica its component."""

    __slots__ = ()


class Mirrored(DistributedValues[T]):
    """A value that is equal on every replica, with a component for each."""

    __slots__ = ()


def _formatted(component: Any, spec: str) -> str:
    if not isinstance(component, np.ndarray):
        return format(component, spec)
    if component.ndim == 0:
        return format(component.item(), spec)
    return np.array2string(component, separator=", ", formatter={"all": lambda item: format(item, spec)})


def _refuse(value: DistributedValues[Any], *_: object, **__: object) -> NoReturn:
    components = count(len(value.values), "component")
    raise TypeError(
        f"a {type(value).__name__} of {components} is not one array; pass it to strategy.run as an argument, combine "
        "it with `await strategy.reduce(op, value, axis)` or `await strategy.gather(value, axis)`, or look at its "
        "components: value.values"
    )


# Set here, not defined in the class, so that type checkers report such uses.
_UNARY = ("iter", "len", "getitem", "contains", "array", "array_ufunc", "bool", "int", "float", "index", "neg", "pos")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
for _name in (*_UNARY, *_BINARY, *(f"r{name}" for name in _BINARY), "lt", "le", "gt", "ge"):
    setattr(DistributedValues, f"__{_name}__", _refuse)
for _class in (DistributedValues, PerReplica, Mirrored):
    _class.__module__ = "aiodist"
del _class


@dataclass(frozen=True, init=False, eq=False)
class IndexedSlices:
    """Rows of an array with their indices; all other rows are zero. An index may occur several times.

    `ReplicaContext.all_reduce`, `Strategy.reduce` and `StrategyExtended.reduce_to` add rows with the same index, and
    return `IndexedSlices` whose indices are ascending and distinct. Replicas may have different numbers of rows. It is
    never made dense implicitly; do that with `np.add.at(dense, slices.indices, slices.values)`.

    Attributes:
        values: the rows, an array with at least one axis. It is not copied.
        indices: an index of 0 or more for each row, one-dimensional, of an integer dtype; converted to int64.
        dense_shape: the shape of the whole array; None if it is unknown.

    Raises:
        TypeError: ``indices`` are not integers, or ``values`` is masked.
        ValueError: the numbers of indices and rows differ; an index is negative or beyond the shape; the rows have
            another shape than those of ``dense_shape``.
    """

    values: Array
    indices: Array
    dense_shape: tuple[int, ...] | None

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        check_unmasked(values, "as the values of IndexedSlices")
        rows, given = as_numpy(values), as_numpy(indices)
        if given.size == 0:
            given = given.astype(np.int64)
        if given.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got {given.dtype}")
        if not rows.ndim or given.shape != rows.shape[:1]:
            raise ValueError(
                f"expected one index for each row, got indices of shape {given.shape} for values of shape {rows.shape}"
            )
        given = given.astype(np.int64, copy=False)
        if given.size and given.min() < 0:
            raise ValueError(f"indices must be 0 or more, got {given.min()}")
        sizes = None if dense_shape is None else tuple([integer("each of dense_shape", size) for size in dense_shape])
        if sizes is not None and (not sizes or sizes[1:] != rows.shape[1:]):
            raise ValueError(f"dense_shape {sizes} must end with the shape of a row, {rows.shape[1:]}")
        if sizes is not None and given.size and given.max() >= sizes[0]:
            raise ValueError(f"indices must be below {sizes[0]}, the first size of dense_shape, got {given.max()}")
        vars(self).update(values=rows, indices=given, dense_shape=sizes)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the whole array; its first size is None if it is unknown."""
        return self.dense_shape or (None, *self.values.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "IndexedSlices do not turn into an array by themselves: pass .values and .indices, or write "
            "dense = np.zeros(slices.dense_shape, slices.dtype); np.add.at(dense, slices.indices, slices.values)"
        )

    __array_ufunc__ = __array__


IndexedSlices.__module__ = "aiodist"


# Splitting and regrouping.


def split(value: Any, num_replicas: int) -> Sequence[Any]:
    """Return each replica's ``value``: distributed values at any depth are replaced by their components.

    A nest without any is passed as it is, the same object.
    """
    if isinstance(value, DistributedValues):  # the commonest
        return components_of(value, num_replicas)
    leaves, structure = nests.flatten_with_none(value)
    if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
        return (value,) * num_replicas
    repeated = [
        components_of(leaf, num_replicas) if isinstance(leaf, DistributedValues) else (leaf,) * num_replicas
        for leaf in leaves
    ]
    return [structure.unflatten(row) for row in zip(*repeated, strict=True)]


def components_of(value: DistributedValues[Any], num_replicas: int) -> tuple[Any, ...]:
    """Return the components, and check their number."""
    if len(value.values) != num_replicas:
        raise ValueError(
            f"expected a per-replica value with {num_replicas} components, one for each replica, "
            f"got a {type(value).__name__} with {len(value.values)}"
        )
    return value.values


_ALWAYS_OWN: Final = (np.ndarray, np.generic, IndexedSlices, Number, str, bytes)


def _result(components: tuple[Any, ...]) -> Any:
    first = components[0]
    if isinstance(first, _ALWAYS_OWN) or is_foreign(first):
        return PerReplica(components)
    return PerReplica(components) if any(one is not first for one in components) else first


def regroup(
    values: Sequence[Any],
    what: str = "results",
    replicas: Sequence[int] | None = None,
    of_leaf: Callable[[tuple[Any, ...]], Any] = _result,
) -> Any:
    """Return one nest for the replicas' values, leaf by leaf; the inverse of `split`.

    Arrays, `IndexedSlices`, numbers, strings and bytes become `PerReplica` whatever their values, so that a result's
    type never depends on them. None, a leaf here, and any other object come back bare if every replica has the
    identical one. The value of a single replica comes back as it is.

    If the nests differ in structure, there is a ValueError that has them as ``values``, and names the replicas, by
    default from 0, and ``what`` they are.
    """
    first = values[0]
    if len(values) == 1 or (first is None and all(value is None for value in values)):
        return first
    if all(type(value) is np.ndarray for value in values):  # the commonest
        return of_leaf(tuple(values))
    flat = [nests.flatten_with_none(value) for value in values]
    columns, structures = [leaves for leaves, _ in flat], [structure for _, structure in flat]
    if structures.count(structures[0]) < len(structures):
        compared = list(map(nests.without_factories, structures))
        if compared.count(compared[0]) < len(compared):
            raise _different_structures(values, compared, what, range(len(values)) if replicas is None else replicas)
    return structures[0].unflatten(map(of_leaf, zip(*columns, strict=True)))


def regroup_arguments(values: Sequence[Any], replicas: Sequence[int]) -> Any:
    """Return one nest for an argument of a merge function; as `regroup`, but equal strings and bytes come back bare."""

    def argument(components: tuple[Any, ...]) -> Any:
        first = components[0]
        is_text = isinstance(first, (str, bytes)) and not isinstance(first, np.generic)
        equal = is_text and all(type(one) is type(first) and one == first for one in components)
        return first if equal else _result(components)

    return regroup(values, "merge_call arguments", replicas, argument)


def regroup_data(values: Sequence[Any], what: str, replicas: Sequence[int] | None = None) -> Any:
    """Return one nest for the replicas' data; as `regroup`, but only None comes back bare."""
    return regroup(
        values, what, replicas, lambda each: each[0] if all(one is None for one in each) else PerReplica(each)
    )


def _different_structures(
    values: Sequence[Any], structures: Sequence[nests.Structure], what: str, replicas: Sequence[int]
) -> ValueError:
    first = structures[0]
    other = next(structure for structure in structures if structure != first)
    here, there = (
        ids_briefly(replica for replica, structure in zip(replicas, structures, strict=True) if structure == one)
        for one in (first, other)
    )
    error = ValueError(
        f"the replicas' {what} must have the same structure: {nests.difference(first, other, 'value', here, there)}"
    )
    error.values = tuple(values)  # type: ignore[attr-defined]
    return error
