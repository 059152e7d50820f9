"""`extended.update`: a function called on each component of a variable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiodist._arrays.host import Array, ArrayLike
from aiodist._arrays.values import select_replica
from aiodist._strategy.aggregation import equal, update_differs, updated
from aiodist._strategy.conversion import converted
from aiodist._strategy.variable import Variable


class VariableComponent(ArrayLike):
    """One component of a variable, as the function of an update sees it. Assignments to it are not awaited."""

    __slots__ = ("_components", "_replica_id", "_variable")

    def __init__(self, variable: Variable, components: list[Array], replica_id: int) -> None:
        self._variable = variable
        self._components = components
        self._replica_id = replica_id

    def __repr__(self) -> str:
        return f"<component {self._replica_id} of {self._variable!r}>"

    @property
    def name(self) -> str:
        """The variable's name."""
        return self._variable.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._variable.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return self._variable.dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimiser should change the variable."""
        return self._variable.trainable

    def read_value(self) -> Array:
        """Return the component, a read-only array."""
        return self._components[self._replica_id]

    def assign(self, value: Any) -> VariableComponent:
        """Give the component another value."""
        return self._assign("assign", value)

    def assign_add(self, value: Any) -> VariableComponent:
        """Add a value to the component."""
        return self._assign("assign_add", value)

    def assign_sub(self, value: Any) -> VariableComponent:
        """Subtract a value from the component."""
        return self._assign("assign_sub", value)

    def _assign(self, method: str, value: Any) -> VariableComponent:
        new = converted(value, self.shape, self.dtype, self.name)
        self._components[self._replica_id] = updated(method, self.read_value(), new)
        return self


class Update(NamedTuple):
    """What a variable becomes.

    Attributes:
        results: what the calls returned.
        before: the components that they have seen.
        components: the new ones.
    """

    results: list[Any]
    before: tuple[Array, ...]
    components: list[Array]

    def apply(self, variable: Variable) -> list[Any]:
        """Change the variable; return what the calls returned.

        Raises:
            RuntimeError: it was assigned to in the meantime.
            ValueError: the components of a mirrored variable would differ.
        """
        _check_unchanged(variable, self.before)
        components = self.components
        if variable._mirrored:
            _check_equal(variable.name, components)
            components = components[:1] * len(components)
        variable._put(components)
        return self.results


async def update_of(
    variable: Variable, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Update:
    """Call a function on each component, with its part of the arguments.

    Raises:
        RuntimeError: the variable was assigned to in the meantime.
    """
    before = variable.values
    components = list(before)
    size = len(components)
    results = []
    for replica_id in range(size):
        own_args, own_kwargs = select_replica(replica_id, (list(args), dict(kwargs)), size)
        result = fn(VariableComponent(variable, components, replica_id), *own_args, **own_kwargs)
        results.append(await result if inspect.isawaitable(result) else result)
    _check_unchanged(variable, before)
    return Update(results, before, components)


def _check_unchanged(variable: Variable, before: Sequence[Array]) -> None:
    if any(now is not then for now, then in zip(variable.values, before, strict=True)):
        raise RuntimeError(
            f"the variable {variable.name!r} was assigned to while it was updated; in the function of an update assign "
            "to the component that it is passed, and let other assignments wait"
        )


def _check_equal(name: str, components: Sequence[Array]) -> None:
    for replica_id, component in enumerate(components):
        if not equal(component, components[0]):
            raise update_differs(name, replica_id)
