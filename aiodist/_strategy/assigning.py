"""Assignments to variables: together in replicas, each its own component, or at once from outside.

What replicas assign to a mirrored variable meets in a collective like any other, of a kind that belongs to the variable
and the method (`Kind`): calls for two variables never combine, and a report names the variable.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist._arrays.host import Array
from aiodist._arrays.leaves import Spec
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import DistributedValues, Mirrored
from aiodist._collectives.kinds import ALL_REDUCE, Collective
from aiodist._collectives.work import Work
from aiodist._core.call import Call
from aiodist._runtime import requests
from aiodist._runtime.requests import Request
from aiodist._strategy.aggregation import aggregate, differ, parts, updated
from aiodist._strategy.changing import Change, settle
from aiodist._strategy.conversion import converted
from aiodist._strategy.variable_enums import VariableAggregation
from aiodist_kernels import policy

if TYPE_CHECKING:
    from aiodist._runtime.context import ReplicaContext
    from aiodist._strategy.variable import Variable


def in_replica(
    variable: Variable, context: ReplicaContext, method: str, value: Any, name: str | None, frame: FrameType
) -> Any:
    """Assign in a replica, and return what is to be awaited; see `Variable.assign`."""
    context.check(f"variable.{method}")
    array = _converted(variable, value)
    if variable._mirrored:
        return context.issue(frame, _request(variable, method, requests.checked_name(name)), array, None)
    components, own = variable._present(), context.member.position
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


def _request(variable: Variable, method: str, name: str | None) -> Request:
    """Return the request for what replicas assign by that method: calls for two variables never combine."""
    key = method, name
    if key not in variable._requests:
        op = variable.aggregation.reduce_op
        call = Call(
            f"{variable.name}.{method}",
            op=None if op is None else op.name,
            subject=variable._subject,
            name=name,
            shapes=(variable.shape,),
            dtypes=(variable.dtype.name,),
            arrays=("array",),
        )
        spec = Spec((variable.shape,), (variable.dtype,), (None,), single=True)
        collective = Collective(ALL_REDUCE, op, None, spec)
        over = None
        if variable._strategy is not None and variable._strategy._shares_variables:
            from aiodist._strategy import sharing

            over = sharing.over_workers(variable, partial(_apply, variable, method), partial(differ, variable.name))
        variable._requests[key] = Request(collective, call, partial(_meet, variable, method), over_workers=over)
    return variable._requests[key]


def _meet(variable: Variable, method: str, values: Sequence[Array], options: CommunicationOptions) -> Variable | Work:
    """Apply what the replicas assign: all of them have arrived."""
    settle(variable)
    if policy.blocks(values[0].nbytes * (len(values) + 2)):
        return Change(variable, method, values, options).work()
    _update_all(variable, method, aggregate(variable.aggregation, values, variable.name, options.accumulate))
    return variable


def _apply(variable: Variable, method: str, value: Any) -> Variable:
    """Apply what the replicas of all workers assign."""
    settle(variable)
    _update_all(variable, method, np.asarray(value))
    return variable


def _update_all(variable: Variable, method: str, value: Array) -> None:
    """Update the components of a mirrored variable, which are equal: one array serves all."""
    old = variable._present()
    variable._put([updated(method, old[0], value)] * len(old))


def across(variable: Variable, method: str, value: Any) -> None:
    """Assign outside replicas, at once; see `Variable.assign`."""
    settle(variable)
    size = len(variable._present())
    if variable._mirrored and variable._strategy is not None and variable._strategy._shares_variables:
        from aiodist._strategy import sharing

        sharing.check_assignable(variable, method, value)
    if isinstance(value, DistributedValues):
        _check_count(variable, value, size)
    if isinstance(value, Mirrored):
        value = value.values[0]  # a copy for each replica of one value, not what each of them would assign
    each = [_converted(variable, v) for v in (value.values if isinstance(value, DistributedValues) else (value,))]
    if variable._mirrored:
        first = 0 if variable._strategy is None else variable._strategy._span[0]
        _update_all(variable, method, aggregate(variable.aggregation, each, variable.name, first=first))
        return
    _check_sum(variable, method, size)
    if not isinstance(value, DistributedValues):
        each = _by_component(variable, method, each[0], size)
    variable._put([updated(method, *pair) for pair in zip(variable._present(), each, strict=True)])


def _check_sum(variable: Variable, method: str, size: int) -> None:
    if variable._strategy is None:  # one component, outside of any strategy: nothing is to be told apart
        return
    if variable.aggregation is VariableAggregation.SUM and method != "assign":
        raise ValueError(
            f"{method} outside a replica is not for the sync-on-read variable {variable.name!r}, whose aggregation is "
            f"SUM: with {size} components it cannot be told whether the value counts once or for each. "
            f"Call {method} in a replica, or assign(variable.read_value() ± value)"
        )


def _by_component(variable: Variable, method: str, value: Array, size: int) -> list[Array]:
    """Return what each component of a sync-on-read variable gets of a value that is assigned from outside."""
    if method != "assign":
        return [value] * size
    first, replicas = (0, size) if variable._strategy is None else variable._strategy._span
    return parts(variable.aggregation, value, replicas)[first : first + size]


def _check_count(variable: Variable, value: DistributedValues[Any], size: int) -> None:
    if len(value.values) != size:
        raise ValueError(
            f"the variable {variable.name!r} has {size} components, one for each replica, got a "
            f"{type(value).__name__} with {len(value.values)}"
        )


def _converted(variable: Variable, value: Any) -> Array:
    return converted(value, variable.shape, variable.dtype, variable.name)
