"""Assignments to variables: together in replicas, each its own component, or at once from outside.

What replicas assign to a mirrored variable meets in a collective like any other, of a kind that belongs to the variable
and the method (`Kind`): calls for two variables never combine, and a report names the variable.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from aiodist.collective.kinds import Kind
from aiodist.collective.signature import Signature
from aiodist.replica import refusal
from aiodist.strategy.aggregation import aggregate, parts, updated
from aiodist.strategy.conversion import converted
from aiodist.strategy.variable_enums import VariableAggregation
from aiodist.vocabulary.arraylike import Array
from aiodist.vocabulary.options import CommunicationOptions
from aiodist.vocabulary.reports import Reason
from aiodist.vocabulary.values import DistributedValues, Mirrored

if TYPE_CHECKING:
    from aiodist.replica.context import ReplicaContext
    from aiodist.strategy.variable import Variable


def in_replica(
    variable: Variable, context: ReplicaContext, method: str, value: Any, name: str | None, frame: FrameType
) -> Any:
    """Assign in a replica, and return what is to be awaited; see `Variable.assign`."""
    refusal.check_current(context, f"variable.{method}")
    array = _converted(variable, value)
    if variable._mirrored:
        op, path = variable.aggregation.reduce_op, context._path(frame, name)
        kind = _kind(variable, method)
        signature = (kind, op, None, name, None, variable.shape, variable.dtype, None, path)
        return context._issue(frame, signature, array)
    components, own = variable._present(), context.replica_id_in_sync_group
    components[own] = updated(method, components[own], array)
    return _Applied(variable)


class _Applied:
    """An assignment that no other replica takes part in: applied by the call, awaited like the others."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def __await__(self) -> Generator[Any, Any, Variable]:
        yield from ()
        return self._variable


def _kind(variable: Variable, method: str) -> Kind:
    """Return the variable's own kind of collective for that method."""
    kinds = variable._kinds
    if method not in kinds:
        kinds[method] = Kind(f"{variable.name}.{method}", Reason.AXIS, partial(_meet, variable, method))
    return kinds[method]


def _meet(
    variable: Variable, method: str, _: Signature, values: Sequence[Array], options: CommunicationOptions
) -> Variable:
    """Apply what the replicas assign: all of them have arrived."""
    _update_all(variable, method, aggregate(variable.aggregation, values, variable.name, options.accumulate))
    return variable


def _update_all(variable: Variable, method: str, value: Array) -> None:
    """Update the components of a mirrored variable, which are equal: one array serves all."""
    old = variable._present()
    variable._put([updated(method, old[0], value)] * len(old))


def across(variable: Variable, method: str, value: Any) -> None:
    """Assign outside replicas, at once; see `Variable.assign`."""
    size = len(variable._present())
    if isinstance(value, DistributedValues):
        components = _matching(variable, value, size)
        one = isinstance(value, Mirrored)  # a copy for each replica of one value, not what each of them would assign
        values = [_converted(variable, component) for component in (components[:1] if one else components)]
    else:
        values = [_converted(variable, value)]
    if variable._mirrored:
        _update_all(variable, method, aggregate(variable.aggregation, values, variable.name))
        return
    each = _by_component(variable, method, values, size)
    variable._put([updated(method, *pair) for pair in zip(variable._present(), each, strict=True)])


def _by_component(variable: Variable, method: str, values: list[Array], size: int) -> list[Array]:
    """Return what each component of a sync-on-read variable gets of a value that is assigned from outside."""
    if variable.aggregation is VariableAggregation.SUM and method != "assign":
        raise ValueError(
            f"{method} outside a replica is not for the sync-on-read variable {variable.name!r}, whose aggregation is "
            f"SUM: each component would change by the value, and their sum by {size} times as much. "
            f"Call {method} in a replica, or assign(variable.read_value() ± value)"
        )
    if len(values) == size:
        return values
    return parts(variable.aggregation, values[0], size) if method == "assign" else values * size


def _matching(variable: Variable, value: DistributedValues[Any], size: int) -> tuple[Any, ...]:
    if len(value.values) != size:
        raise ValueError(
            f"the variable {variable.name!r} has {size} components, one for each replica, got a "
            f"{type(value).__name__} with {len(value.values)}"
        )
    return value.values


def _converted(variable: Variable, value: Any) -> Array:
    return converted(value, variable.shape, variable.dtype, variable.name)
