"""Per-replica values: one component for each replica, and how results become them and arguments come out of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.host import is_foreign
from aiodist._arrays.slices import IndexedSlices
from aiodist._core.text import ids_briefly

_ALWAYS_OWN: Final = (np.ndarray, np.generic, IndexedSlices, Number, str, bytes)

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
        """The components' shape.

        Raises:
            AttributeError: they have no shape, or not the same one.
        """
        shape: tuple[int, ...] = self._common("shape")
        return shape

    @property
    def dtype(self) -> Any:
        """The components' dtype.

        Raises:
            AttributeError: they have no dtype, or not the same one.
        """
        return self._common("dtype")

    def _common(self, name: str) -> Any:
        kind, first = type(self).__name__, getattr(self._values[0], name, None)
        for replica_id, component in enumerate(self._values):
            one = getattr(component, name, None)
            if one is None:
                raise AttributeError(
                    f"this {kind} has no {name}: component {replica_id} is of type {type(component).__name__}"
                )
            if one != first:
                raise AttributeError(
                    f"the components of this {kind} have no common {name}: component 0's is {first}, component "
                    f"{replica_id}'s is {one}; look at value.values"
                )
        return first

    def _lines(self, show: Callable[[str, T], str], cut: str) -> list[str]:
        """Return a line for each component, equal neighbours in one; of many those of the first."""
        lines: list[str] = []
        begin, size = 0, len(self._values)
        while begin < size and len(lines) < _MOST_SHOWN:
            first, end = self._values[begin], begin + 1
            while end < size and _alike(first, self._values[end]):
                end += 1
            lines.append(show(f"{begin}" if end == begin + 1 else f"{begin}-{end - 1}", first))
            begin = end
        return [*lines, cut.format(size - begin)] if begin < size else lines

    def __repr__(self) -> str:
        lines = self._lines("  {}: {!r}".format, "  … {} more")
        return "\n".join([f"{type(self).__name__}:{{", *lines, "}"])

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        shown = [_formatted(component, spec) for component in self._values[:_MOST_SHOWN]]
        rest = [f"… {len(self._values) - _MOST_SHOWN} more"] if len(self._values) > _MOST_SHOWN else []
        return f"{type(self).__name__}({', '.join([*shown, *rest])})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        from html import escape

        rows = self._lines(
            lambda ids, component: f"<tr><th>{ids}</th><td><pre>{escape(repr(component))}</pre></td></tr>",
            "<tr><th>…</th><td>{} more</td></tr>",
        )
        head = f"<tr><th>replica</th><th>{type(self).__name__}</th></tr>"
        return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"

    # Type checkers find these uses by themselves.
    if not TYPE_CHECKING:

        def _refuse(self, *_: object, **__: object) -> NoReturn:
            raise TypeError(
                f"a {type(self).__name__} of {len(self._values)} components is not one array; pass it to strategy.run "
                "as an argument, combine it with `await strategy.reduce(op, value, axis)` or `await "
                "strategy.gather(value, axis)`, or look at its components: value.values"
            )

        __iter__ = __array__ = __array_ufunc__ = _refuse
        __len__ = __getitem__ = __contains__ = __bool__ = __float__ = __int__ = __index__ = _refuse
        __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _refuse
        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = _refuse
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __rmatmul__ = _refuse
        __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __divmod__ = _refuse
        __rand__ = __ror__ = __rxor__ = __rlshift__ = __rrshift__ = __rdivmod__ = _refuse
        __lt__ = __le__ = __gt__ = __ge__ = _refuse


class PerReplica(DistributedValues[T]):
    """A value that may differ between replicas. `Strategy.run` returns it, and gives each replica its component."""

    __slots__ = ()


class Mirrored(DistributedValues[T]):
    """A value that is equal on every replica, with a component for each."""

    __slots__ = ()


for _class in (DistributedValues, PerReplica, Mirrored):
    _class.__module__ = "aiodist"
del _class


def _alike(a: Any, b: Any) -> bool:
    """Whether two components are shown as one; what is no host array or plain value is so only if it is one object."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, (np.ndarray, np.generic, int, float, complex, str, bytes)):
        return False
    if not isinstance(a, np.ndarray):
        return bool(a == b or (a != a and b != b))  # noqa: PLR0124  (NaN is like NaN)
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype.hasobject:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124


def _formatted(component: Any, spec: str) -> str:
    if not isinstance(component, np.ndarray):
        return format(component, spec)
    if component.ndim == 0:
        return format(component.item(), spec)
    return np.array2string(component, separator=", ", formatter={"all": lambda item: format(item, spec)})


def split(value: Any, num_replicas: int) -> Sequence[Any]:
    """Return what each replica gets of ``value``: per-replica values at any depth give their components.

    A nest that holds none is passed as it is, the object itself.
    """
    if isinstance(value, DistributedValues):
        return _components(value, num_replicas)
    if value is None or type(value) is np.ndarray:
        return (value,) * num_replicas
    leaves, structure = nests.flatten_with_none(value)
    for leaf in leaves:
        if isinstance(leaf, DistributedValues):
            break
    else:
        return (value,) * num_replicas
    repeated = [
        _components(leaf, num_replicas) if isinstance(leaf, DistributedValues) else (leaf,) * num_replicas
        for leaf in leaves
    ]
    return [structure.unflatten(row) for row in zip(*repeated, strict=True)]


def _components(value: DistributedValues[Any], num_replicas: int) -> tuple[Any, ...]:
    if len(value.values) != num_replicas:
        raise ValueError(
            f"expected a per-replica value with {num_replicas} components, one for each replica, "
            f"got a {type(value).__name__} with {len(value.values)}"
        )
    return value.values


def _result(components: tuple[Any, ...]) -> Any:
    first = components[0]
    if type(first) is np.ndarray or isinstance(first, _ALWAYS_OWN) or is_foreign(first):
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
    type never depends on them. None, a leaf here, and any other object come back bare where every replica has the
    identical one. The value of a single replica comes back as it is.

    Args:
        values: one nest a replica, of equal structure; else there is a ValueError that has them as ``values``.
        what: what they are, for the error's text.
        replicas: the replicas' ids, likewise; None: they count from 0.
        of_leaf: makes one leaf of the replicas'.
    """
    first = values[0]
    if len(values) == 1 or (first is None and all(value is None for value in values)):
        return first
    if type(first) is np.ndarray and all(type(value) is np.ndarray for value in values):
        return of_leaf(tuple(values))
    flat = [nests.flatten_with_none(value) for value in values]
    columns, structures = [leaves for leaves, _ in flat], [structure for _, structure in flat]
    if structures.count(structures[0]) < len(structures):
        raise _different_structures(values, structures, what, range(len(values)) if replicas is None else replicas)
    return structures[0].unflatten(map(of_leaf, zip(*columns, strict=True)))


def regroup_arguments(values: Sequence[Any], replicas: Sequence[int]) -> Any:
    """Return one nest for an argument of a merge function; as `regroup`, but equal strings and bytes come back bare."""

    def argument(components: tuple[Any, ...]) -> Any:
        first = components[0]
        if type(first) in (str, bytes) and all(type(one) is type(first) and one == first for one in components):
            return first
        return _result(components)

    return regroup(values, "merge_call arguments", replicas, argument)


def regroup_data(values: Sequence[Any], what: str, replicas: Sequence[int] | None = None) -> Any:
    """Return one nest for values that each replica has its own of; as `regroup`, but only a None comes back bare."""
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


def check_awaited(value: Any, called: str) -> None:
    """Check that no leaf of a nest is a coroutine or the handle of a collective: nobody would await it any more.

    One that is found is closed, so that there is one complaint.
    """
    if isinstance(value, (np.ndarray, Number, str)) or value is None:
        return
    leaves, structure = nests.flatten_with_none(value)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Coroutine):
            text = repr(leaf)
            leaf.close()
            raise TypeError(
                f"{nests.leaf_paths(structure, called)[index]} is {text}, not its result; is `await` missing?"
            )
