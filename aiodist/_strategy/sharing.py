"""Variables of a strategy on several workers: they start from replica 0's value, wherever replica 0 is.

The creation of a variable is a collective that nobody awaits. In a replica it has its place among the replica's others,
so whoever awaits a later one finds the value there. Outside it is carried over by the next awaited call of the
strategy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aiodist._arrays.host import Array
from aiodist._arrays.leaves import Spec
from aiodist._arrays.values import PerReplica
from aiodist._collectives.host import frozen
from aiodist._collectives.kinds import ALL_GATHER, ALL_REDUCE, BROADCAST, Collective
from aiodist._core.call import Call
from aiodist._core.errors import ReplicaContextError
from aiodist._core.render import group_label
from aiodist._runtime.current import CrossReplica, current
from aiodist._runtime.requests import OverWorkers, Request
from aiodist._strategy.aggregation import update_differs
from aiodist._strategy.variable_enums import VariableAggregation
from aiodist._workers.channel import Channel
from aiodist._workers.moving import moved
from aiodist._workers.record import Found
from aiodist._workers.transport import Steps

if TYPE_CHECKING:
    from aiodist._runtime.context import ReplicaContext
    from aiodist._strategy.creation import Site
    from aiodist._strategy.update import Update
    from aiodist._strategy.variable import Variable

V = TypeVar("V", bound="Variable")
_DIGEST = 16


def _array(shape: Sequence[int], dtype: Any) -> Spec:
    return Spec((tuple(shape),), (dtype,), (None,), single=True)


def _call(kind: str, variable: Variable, subject: str | None, name: str | None) -> Call:
    return Call(
        kind, subject=subject, name=name, shapes=(variable.shape,), dtypes=(variable.dtype.name,), arrays=("array",)
    )


# Creation.


def created_outside(variable: V, value: Array, name: str | None, frame: FrameType) -> V:
    """Let all workers create a variable under the strategy's scope."""
    strategy = variable._strategy
    pending = strategy._begin(
        _call("Variable", variable, None, name), strategy._site_of(frame), partial(_create, variable, value)
    )
    variable._subject = f"outside {pending.number}"
    return variable


def _create(variable: Variable, value: Array, channel: Channel, found: Found) -> Steps[Any]:
    team = variable._strategy._team
    collective = Collective(BROADCAST, None, 0, _array(variable.shape, variable.dtype))
    result = yield from moved(
        channel, team.layout, collective, [value] * team.layout.local, found, team.threads, ordered=False
    )
    variable._put([frozen(result)] * team.layout.local)
    return variable


def created_in_replica(variable: Variable, context: ReplicaContext, value: Array, site: Site, frame: FrameType) -> None:
    """Let a replica create a variable, and all others with it."""
    name = variable.name if site.named else None
    key = "create", name
    if key not in variable._requests:
        member = context.member
        run = variable._strategy._run_numbers[member.group.ledger]
        variable._subject = f"run {run} {member.group.key} {member.sequence}"
        collective = Collective(BROADCAST, None, 0, _array(variable.shape, variable.dtype))
        put = partial(_put, variable)
        over = OverWorkers(collective, list, put)
        request = Request(collective, _call("Variable", variable, None, name), put, over_workers=over)
        variable._requests[key] = request
    handle = context.issue(frame, variable._requests[key], value, None)
    handle.detach()


def _put(variable: Variable, values: Sequence[Array], result: Any) -> Variable:
    first = result if isinstance(result, np.ndarray) else values[0]
    variable._put([frozen(first)] * variable._strategy._num_local_replicas)
    return variable


# Assignment in replicas.


def over_workers(
    variable: Variable, apply: Callable[[Any], Variable], differ: Callable[[int], Exception]
) -> OverWorkers:
    """Return how the workers make one value of what replicas assign to a mirrored variable.

    Args:
        variable: the variable.
        apply: assigns that value.
        differ: returns the error for replicas that assign different values though there is no aggregation, by the id of
            the first with another value than replica 0.
    """
    spec = _array(variable.shape, variable.dtype)
    op = variable.aggregation.reduce_op
    if op is not None:
        return OverWorkers(Collective(ALL_REDUCE, op, None, spec), list, lambda _, total: apply(total))
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return OverWorkers(Collective(BROADCAST, None, 0, spec), list, lambda _, first: apply(first))

    def finish(values: Sequence[Array], digests: Any) -> Variable:
        _check_equal(digests, differ)
        return apply(values[0])

    return OverWorkers(_OF_DIGESTS, partial(map_list, _digest), finish)


def map_list(fn: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Return what a function makes of each value."""
    return [None if value is None else fn(value) for value in values]


_OF_DIGESTS = Collective(ALL_GATHER, None, (0,), Spec(((None,),), (np.dtype(np.uint8),), (None,), single=True))


def _check_equal(digests: Any, differ: Callable[[int], Exception]) -> None:
    each = np.asarray(digests).reshape(-1, _DIGEST)
    odd = np.flatnonzero((each != each[0]).any(axis=1))
    if odd.size:
        raise differ(int(odd[0]))


def _digest(value: Array) -> Array:
    """Return the same bytes for arrays of one shape that hold the same values; one NaN is like another."""
    known = np.where(value != value, np.asarray(np.nan, value.dtype), value) if value.dtype.kind in "fcV" else value  # noqa: PLR0124
    zero = np.zeros((), value.dtype)
    plain = np.where(known == zero, zero, known)  # there are two zeros
    found = hashlib.blake2b(np.ascontiguousarray(plain).tobytes(), digest_size=_DIGEST).digest()
    return np.frombuffer(found, np.uint8)


# Outside of replicas.


def check_all_workers_are_here() -> None:
    """Check that this is not the merge function of a group, which only some workers run.

    Raises:
        ReplicaContextError: it is.
    """
    here = current.get()
    if isinstance(here, CrossReplica) and here.group is not None:
        raise ReplicaContextError(
            "what all workers do together was asked for in the merge function of "
            f"{group_label(here.group.record())}, which only the workers with members of it run; combine values in the "
            "group first, e.g.  await group.all_reduce(op, value)"
        )


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
    strategy: Any, make: Callable[[], Awaitable[Update]], variable: Any, frame: Any
) -> Update:
    """Make an update of a variable, and compare that of a mirrored one with the other workers'.

    Args:
        strategy: the strategy.
        make: makes this worker's.
        variable: the variable, as the user has given it.
        frame: where it was called.

    Raises:
        CollectiveError: the workers do not meet.
        ReplicaContextError: this is the merge function of a group, which only some workers run.
        ValueError: the components would differ.
        Exception: whatever ``make`` raises.
    """
    if not strategy._shares_variables or not getattr(variable, "_mirrored", True):
        return await make()
    check_all_workers_are_here()
    with strategy._noting_refusal("extended.update", frame):
        own = await make()
    call = _call("extended.update", variable, variable._subject, None)
    await strategy._perform(call, frame, partial(_compare, strategy._team, variable.name, own.components))
    return own


def _compare(team: Any, name: str, components: Sequence[Array], channel: Channel, found: Found) -> Steps[None]:
    digests = yield from moved(
        channel, team.layout, _OF_DIGESTS, [_digest(each) for each in components], found, team.threads, ordered=False
    )
    _check_equal(digests, partial(update_differs, name))
