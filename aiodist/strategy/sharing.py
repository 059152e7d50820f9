"""Variables of a strategy on several workers: they start from replica 0's value, wherever replica 0 is.

The creation of a variable is a collective that nobody awaits. In a replica it has its place among the replica's others,
so whoever awaits a later one finds the value there. Outside it is carried over by the next awaited call of the
strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from aiodist.collective.callsite import call_path
from aiodist.collective.kinds import Kind
from aiodist.collective.signature import Signature
from aiodist.vocabulary.arraylike import Array
from aiodist.vocabulary.reports import Reason
from aiodist.workers.crossing import Plan, Span, frozen
from aiodist.workers.transfers import Broadcast
from aiodist_kernels import Accumulate

if TYPE_CHECKING:
    from aiodist.replica.context import ReplicaContext
    from aiodist.strategy.creation import Site
    from aiodist.strategy.variable import Variable

V = TypeVar("V", bound="Variable")


def created_outside(variable: V, value: Array, name: str | None, frame: FrameType) -> V:
    """Let all workers create a variable under the strategy's scope."""
    team = variable._strategy._team
    path = call_path(frame) if team.paths and name is None else None
    meeting = team.begin(_signature(variable, name, path), frame.f_code, frame.f_lasti, value)
    variable._token = (*team.root_key, meeting.number)
    return variable


def created_in_replica(variable: Variable, context: ReplicaContext, value: Array, site: Site, path: Any) -> None:
    """Let a replica create a variable, and all others with it."""
    member, group = context._member, context._member.group
    name = variable.name if site.named else None
    variable._token = (*group.bridge.key, member.sequence)
    handle = group.arrive(member, _signature(variable, name, path), site.code, site.offset, value)
    handle._awaited = True  # nobody has to


def _signature(variable: Variable, name: str | None, path: Any) -> Signature:
    kinds = variable._kinds
    if "create" not in kinds:
        kinds["create"] = Kind("Variable", Reason.AXIS, None, across=partial(_plan, variable))
    return (kinds["create"], None, None, name, None, variable.shape, variable.dtype, None, path)


def _plan(variable: Variable, _: Signature, values: Sequence[Array], __: Accumulate, span: Span) -> Plan:
    """Plan to give all replicas the value of the first."""

    def finish(results: Sequence[Any]) -> Variable:
        variable._put([frozen(results[0])] * span.layout.local)
        return variable

    return Plan([Broadcast(values[0], 0, span.layout.rank, values[0].nbytes)], finish)


def check_readable(variable: Variable) -> None:
    """Check that a sync-on-read variable can be read outside of replicas.

    Raises:
        ValueError: it has components elsewhere.
    """
    strategy = variable._strategy
    if strategy is not None and strategy._shares_variables:
        raise ValueError(
            f"the sync-on-read variable {variable.name!r} has components on other workers, which a read cannot wait "
            "for; outside a replica write `await strategy.reduce(op, variable, axis=None)`, or look at variable.values"
        )
