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
from typing import Any

import numpy as np

from aiodist._arrays.host import Array
from aiodist._arrays.leaves import Spec
from aiodist._collectives.host import frozen
from aiodist._collectives.kinds import ALL_GATHER, ALL_REDUCE, BROADCAST, Collective
from aiodist._core.call import Call
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.requests import OverWorkers, Request
from aiodist._strategy.across_workers import CallSite, Workers
from aiodist._strategy.aggregation import VariableAggregation, differ, update_differs
from aiodist._strategy.creation import Site
from aiodist._strategy.extended import Update
from aiodist._strategy.scope import require_all_workers
from aiodist._strategy.state import State
from aiodist._strategy.variable import Variable, state_of
from aiodist._workers.channel import Channel
from aiodist._workers.exchange import moved
from aiodist._workers.record import Found
from aiodist._workers.team import Team
from aiodist._workers.transport import Steps

_DIGEST = 16


class OverAllWorkers:
    """What a strategy does for variables that have components on other workers: `state.Sharing`.

    Args:
        workers: the workers.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def created_outside(self, state: State, value: Array, name: str | None, frame: FrameType) -> None:
        """Let all workers create a variable under the strategy's scope."""
        move = partial(_create, self._workers.team, state, value)
        pending = self._workers.begin(_call("Variable", state, None, name), self._workers.site_of(frame), move)
        state.subject = f"outside {pending.number}"

    def created_in_replica(
        self, state: State, context: ReplicaContext, value: Array, site: Site, frame: FrameType
    ) -> None:
        """Let a replica create a variable, and all others with it."""
        name = state.spec.name if site.named else None
        key = "create", name
        if key not in state.requests:
            member = context.member
            run = self._workers.run_numbers[member.group.ledger]
            state.subject = f"run {run} {member.group.key} {member.sequence}"
            collective, put = _broadcast(state), partial(_put, state, self._workers.team.layout.local)
            call = _call("Variable", state, None, name)
            state.requests[key] = Request(collective, call, put, over_workers=OverWorkers(collective, list, put))
        context.issue(frame, state.requests[key], value, None).detach()

    def over_workers(self, state: State, apply: Callable[[Any], Any]) -> OverWorkers:
        """Return how the workers make one value of what replicas assign to a mirrored variable, and apply it."""
        spec = state.spec
        value, op = _array(spec.shape, spec.dtype), spec.aggregation.reduce_op
        if op is not None:
            return OverWorkers(Collective(ALL_REDUCE, op, None, value), list, lambda _, total: apply(total))
        if spec.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return OverWorkers(Collective(BROADCAST, None, 0, value), list, lambda _, first: apply(first))

        def finish(values: Sequence[Array], digests: Any) -> Any:
            _check_equal(digests, partial(differ, spec.name))
            return apply(values[0])

        return OverWorkers(_OF_DIGESTS, _digests, finish)

    async def update(self, make: Callable[[], Awaitable[Update]], variable: Any, site: CallSite) -> Update:
        """Make an update of a variable, and compare that of a mirrored one with the other workers'.

        Args:
            make: makes this worker's.
            variable: the variable, as the user has given it.
            site: where it was made.

        Raises:
            CollectiveError: the workers do not meet.
            ReplicaContextError: this is the merge function of a group, which only some workers run.
            ValueError: the components would differ.
            Exception: whatever ``make`` raises.
        """
        if isinstance(variable, Variable) and not state_of(variable).mirrored:
            return await make()
        require_all_workers()
        with self._workers.telling_refusal("extended.update", site):
            own = await make()
        state = state_of(variable)
        call = _call("extended.update", state, state.subject, None)
        move = partial(_compare, self._workers.team, state.spec.name, own.components)
        await self._workers.perform(call, site, move)
        return own


def _array(shape: Sequence[int], dtype: Any) -> Spec:
    return Spec((tuple(shape),), (dtype,), (None,), single=True)


def _broadcast(state: State) -> Collective:
    return Collective(BROADCAST, None, 0, _array(state.spec.shape, state.spec.dtype))


def _call(kind: str, state: State, subject: str | None, name: str | None) -> Call:
    shapes, dtypes = (state.spec.shape,), (state.spec.dtype.name,)
    return Call(kind, subject=subject, name=name, shapes=shapes, dtypes=dtypes, arrays=("array",))


def _create(team: Team, state: State, value: Array, channel: Channel, found: Found) -> Steps[None]:
    local = team.layout.local
    result = yield from moved(channel, team.plans, _broadcast(state), [value] * local, found, team.threads)
    state.put([frozen(result)] * local)


def _put(state: State, local: int, values: Sequence[Array], result: Any) -> None:
    first = result if isinstance(result, np.ndarray) else values[0]
    state.put([frozen(first)] * local)


# Comparing values without moving them.


_OF_DIGESTS = Collective(ALL_GATHER, None, (0,), Spec(((None,),), (np.dtype(np.uint8),), (None,), single=True))


def _check_equal(digests: Any, error: Callable[[int], Exception]) -> None:
    each = np.asarray(digests).reshape(-1, _DIGEST)
    odd = np.flatnonzero((each != each[0]).any(axis=1))
    if odd.size:
        raise error(int(odd[0]))


def _digests(values: Sequence[Array | None]) -> list[Array | None]:
    return [None if value is None else _digest(value) for value in values]


def _digest(value: Array) -> Array:
    """Return the same bytes for arrays of one shape that hold the same values; one NaN is like another."""
    known = np.where(value != value, np.asarray(np.nan, value.dtype), value) if value.dtype.kind in "fcV" else value  # noqa: PLR0124
    zero = np.zeros((), value.dtype)
    plain = np.where(known == zero, zero, known)  # there are two zeros
    found = hashlib.blake2b(np.ascontiguousarray(plain).tobytes(), digest_size=_DIGEST).digest()
    return np.frombuffer(found, np.uint8)


def _compare(team: Team, name: str, components: Sequence[Array], channel: Channel, found: Found) -> Steps[None]:
    own = _digests(components)
    digests = yield from moved(channel, team.plans, _OF_DIGESTS, own, found, team.threads)
    _check_equal(digests, partial(update_differs, name))
