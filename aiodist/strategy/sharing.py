"""Variables of a strategy on several workers: they start from replica 0's value, wherever replica 0 is.

The creation of a variable is a collective that nobody awaits. In a replica it has its place among the replica's others,
so whoever awaits a later one finds the value there. Outside it is carried over by the next awaited call of the
strategy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from aiodist._arrays.host import Array
from aiodist._arrays.values import PerReplica
from aiodist._core.errors import ReplicaContextError
from aiodist._core.report import Reason
from aiodist.collective.callsite import call_path
from aiodist.collective.kinds import Kind
from aiodist.collective.signature import Signature
from aiodist.replica.refusal import check_all_workers_are_here
from aiodist.strategy.aggregation import plan_equal, update_differs
from aiodist.workers.crossing import Plan, Span, frozen
from aiodist.workers.objects import Broadcast
from aiodist_kernels import Accumulate

if TYPE_CHECKING:
    from aiodist._runtime.context import ReplicaContext
    from aiodist.strategy.creation import Site
    from aiodist.strategy.update import Update
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


def check_assignable(variable: Variable, method: str, value: Any) -> None:
    """Check that what a mirrored variable is assigned outside of replicas can be the same on all workers.

    Raises:
        ReplicaContextError: this is the merge function of a group, which only some workers run.
        ValueError: it is a per-replica value, whose other components are elsewhere.
    """
    check_all_workers_are_here()
    if isinstance(value, PerReplica):
        raise ValueError(  # noqa: TRY004  (the type is right elsewhere, and this value is not)
            f"{method} outside a replica is not for a per-replica value where the mirrored variable {variable.name!r} "
            "has components on other workers, which it cannot wait for: the other replicas' values are there. Write "
            f"`variable.{method}(await strategy.reduce(op, value, axis=None))`, or {method} in a replica"
        )


async def update_together(
    strategy: Any, make: Callable[[], Awaitable[Update]], variable: Any, frame: FrameType
) -> Update:
    """Make an update of a variable, and compare that of a mirrored one with the other workers'.

    Args:
        strategy: the strategy.
        make: makes this worker's.
        variable: the variable, as the user has given it.
        frame: that which has called.

    Raises:
        CollectiveError: the workers do not meet.
        ReplicaContextError: this is the merge function of a group, which only some workers run.
        ValueError: the components would differ.
        Exception: whatever ``make`` raises.
    """
    if not strategy._shares_variables or not getattr(variable, "_mirrored", True):
        return await make()
    check_all_workers_are_here()
    team, place = strategy._team, (frame.f_code, frame.f_lasti)
    path = call_path(frame) if team.paths else None
    try:
        own = await make()
    except ReplicaContextError:
        raise
    except Exception as error:
        team.refuse((_UPDATE, *[None] * 7, path), *place, error)
        raise
    except BaseException:
        team.turn(_update_of(variable, path), *place).leave()
        raise
    await team.perform(_update_of(variable, path), *place, own)
    return own


def _update_of(variable: Variable, path: Any) -> Signature:
    kinds, name = variable._kinds, variable.name
    if "update" not in kinds:

        def plan(_: Signature, values: Sequence[Update], __: Accumulate, span: Span) -> Plan:
            return plan_equal(values[0].components, span, partial(update_differs, name))

        kinds["update"] = Kind(_UPDATE.name, _UPDATE.detail, None, across=plan, token=variable._token)
    return (kinds["update"], None, None, None, None, variable.shape, variable.dtype, None, path)


_UPDATE = Kind("extended.update", Reason.AXIS, None)
