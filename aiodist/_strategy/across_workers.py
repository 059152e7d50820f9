"""The workers of a strategy: what all of them do together outside of replicas, and for variables.

A variable starts from replica 0's value, wherever replica 0 is. Its creation is a collective that nobody awaits. In a
replica it has its place among the replica's others, so whoever awaits a later one finds the value there; outside it is
carried over by the next awaited call of the strategy. Values that must be equal are compared by their digests.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from sys import _getframe
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import anyio
import anyio.lowlevel
import numpy as np

from aiodist._arrays.host import Array, HostType
from aiodist._arrays.leaves import Spec
from aiodist._collectives.host import frozen
from aiodist._collectives.kinds import ALL_GATHER, ALL_REDUCE, BROADCAST, Collective
from aiodist._core.call import LEAF, Call, OrderCheck
from aiodist._core.ledger import Path
from aiodist._data.distributed import without_rows
from aiodist._runtime.participant import Participant
from aiodist._runtime.requests import OverWorkers, Request, array_text, dtype_text
from aiodist._runtime.stacks import all_callers
from aiodist._strategy.extended import StrategyExtended, Update
from aiodist._strategy.reductions import Combination, Operand, Operation, combine_parts, on_host, parts_along, values_of
from aiodist._strategy.scope import Replicas, Share, require_all_workers
from aiodist._strategy.variable import Site, State, Variable, VariableAggregation, differ, state_of, update_differs
from aiodist._workers.bootstrap import in_one_thread, rendezvous
from aiodist._workers.exchange import Agreed
from aiodist._workers.team import Move, Pending, Team
from aiodist._workers.transport import Steps

_OWN: Final = ("aiodist._strategy", "aiodist._runtime", "aiodist._data")
_DIGEST: Final = 16
_DIGESTS: Final = Spec(((_DIGEST,),), (np.dtype(np.uint8),), (None,), single=True)
_OF_DIGESTS: Final = Collective(ALL_GATHER, None, (0,), _DIGESTS)


class CallSite(NamedTuple):
    """Where a call outside of replicas stands, as it was when it was made: its frame goes on while it is awaited."""

    code: CodeType  # the caller's code
    offset: int  # that of the call in it
    path: Path  # its callers, where calls are compared by them


class Workers(Replicas):
    """The replicas of a strategy on several workers, and what the workers do together outside of them.

    Args:
        communicator: as in `MultiWorkerMirroredStrategy`.
        extended: the strategy's devices and settings.
        ordered: reductions give the same bits for every layout.

    Attributes:
        communicator: connects the workers.
        run_numbers: by ledger, the number of each run's opening.
    """

    def __init__(self, communicator: Any, extended: StrategyExtended, *, ordered: bool) -> None:
        super().__init__(len(extended.devices))
        self._extended = extended
        self.run_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._lock: tuple[Any, anyio.Lock] | None = None
        order_check = extended.order_check
        self.communicator, self._joined = rendezvous(communicator, extended.devices, order_check, ordered=ordered)

    @property
    def team(self) -> Team:
        """The workers; the first use waits for simulated ones."""
        if self._joined is None:
            self._joined = in_one_thread(self.communicator)
        return self._joined

    @property
    def share(self) -> Share:
        """Which replicas run in this process."""
        layout = self.team.layout
        return Share(layout.replicas, layout.own, layout.workers, layout.rank, partial(_fill_up, self.team))

    @property
    def sharing(self) -> Workers | None:
        """The workers of variables that have components in other processes, too; None where none have."""
        return self if self.team.layout.workers > 1 else None

    @property
    def assigning(self) -> Workers | None:
        """What makes one value of what replicas assign: the workers, also a single one with ``reduction="ordered"``."""
        return self if self.team.ordered else self.sharing

    def close(self) -> None:
        """Leave the others."""
        if self._joined is not None:
            self._joined.close()

    # Calls that all workers make.

    def caller(self) -> CallSite:
        """Return where the innermost frame is now that is not the strategy's own."""
        frame: FrameType | None = _getframe(1)
        while frame is not None and frame.f_back is not None:
            if not frame.f_globals.get("__name__", "").startswith(_OWN):
                break
            frame = frame.f_back
        assert frame is not None
        return self._site_of(frame)

    def _site_of(self, frame: FrameType) -> CallSite:
        path = all_callers(frame) if self._extended.order_check is OrderCheck.CALL_PATH else ()
        return CallSite(frame.f_code, frame.f_lasti, path)

    def _begin(self, call: Call, site: CallSite, move: Move) -> Pending:
        """Post a call that all workers make, whose values ``move`` moves; nobody need await it."""
        require_all_workers()
        float64 = self._extended.communication_options.accumulate == "float64"
        return self.team.outside.begin(call, site.code, site.offset, site.path, move, float64=float64)

    @property
    def _in_order(self) -> anyio.Lock:
        """Held while a call is posted; a lock belongs to the event loop in which it is first used."""
        loop = anyio.lowlevel.current_token()
        if self._lock is None or self._lock[0] != loop:
            self._lock = loop, anyio.Lock()
        return self._lock[1]

    async def begin(
        self, call: Call, site: CallSite, move: Move, before: Callable[[], Awaitable[object]] | None = None
    ) -> Pending:
        """Post a call behind those that this worker's tasks made before."""
        lock = self._in_order
        try:
            lock.acquire_nowait()  # mostly nobody has it, and who is cancelled has made the call
        except anyio.WouldBlock:
            await lock.acquire()
        try:
            if before is not None:
                await before()
        finally:
            lock.release()
        return self._begin(call, site, move)

    async def _perform(
        self, call: Call, site: CallSite, move: Move, before: Callable[[], Awaitable[object]] | None = None
    ) -> Any:
        """Carry out a call that all workers make; see `begin`."""
        pending = await self.begin(call, site, move, before)
        return await self.team.awaited(pending, self._extended.communication_options.timeout_seconds)

    def combine(
        self,
        kind: str,
        site: CallSite,
        operation: Operation,
        values: Sequence[Any],
        destinations: Sequence[Sequence[str]] | None,
        replicas: Sequence[int],
    ) -> Coroutine[Any, Any, list[Any]]:
        """Check an operation over the replicas of all workers, and return what carries it out; see `Combination`.

        With several local replicas a plain value is that of each, and what is the same everywhere each worker makes by
        itself; unless some worker has a single replica, whose component nothing tells from such a value.

        Args:
            kind: what the workers call it.
            site: where it was made.
            operation: what is made of each leaf.
            values: the nests.
            destinations: for each nest, the devices that get a result.
            replicas: the ids of its replicas, over all workers.
        """
        devices, local = self._extended.devices, len(replicas)
        combination = Combination(operation, values, replicas, devices, destinations, bare=local == 1)
        bare = 1 in self.team.layout.counts
        alone = [leaf for leaf in combination.taken if len(leaf.operand.arrays) < local and not bare]
        together = [leaf for leaf in combination.taken if leaf not in alone]
        described = [leaf.operand for leaf in together]
        operands, down = on_host([_of_each(each, local) for each in described], devices)

        async def carry_out() -> list[Any]:
            call, move = _call(kind, operation, described), partial(_move, operation, operands)
            totals = await self._perform(call, site, move, down)  # values on GPUs are copied down first
            await combination.lift(together, totals)
            if alone:
                await combination.carry_out(alone)
            return combination.results()

        return carry_out()

    # Variables.

    def created_outside(self, state: State, value: Array, name: str | None, frame: FrameType) -> None:
        """Let all workers create a variable under the strategy's scope."""
        create = partial(_create, self.team.layout.local, state, value)
        pending = self._begin(state.spec.call("Variable", None, name), self._site_of(frame), create)
        state.subject = f"outside {pending.number}"

    def created_in_replica(self, state: State, here: Participant, value: Array, site: Site, frame: FrameType) -> None:
        """Let a replica create a variable, and all others with it."""
        name = state.spec.name if site.named else None
        key = "create", name
        if key not in state.requests:
            member = here.member
            state.subject = f"run {self.run_numbers[member.group.ledger]} {member.group.key} {member.sequence}"
            collective, put = _broadcast(state), partial(_put, state, self.team.layout.local)
            over = OverWorkers(collective, list, put)
            state.requests[key] = Request(collective, state.spec.call("Variable", None, name), put, over_workers=over)
        here.contribute(frame, state.requests[key], value)

    def over_workers(self, state: State, apply: Callable[[Any], Any]) -> OverWorkers:
        """Return how the workers make one value of what replicas assign to a mirrored variable, and apply it."""
        spec, op = state.spec, state.spec.aggregation.reduce_op
        if op is not None:
            return OverWorkers(Collective(ALL_REDUCE, op, None, state.spec.value), list, lambda _, total: apply(total))
        if spec.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return OverWorkers(_broadcast(state), list, lambda _, first: apply(first))

        def finish(values: Sequence[Array], digests: Any) -> Any:
            _check_equal(digests, partial(differ, spec.name))
            return apply(values[0])

        return OverWorkers(_OF_DIGESTS, _digests, finish)

    async def update(self, make: Callable[[], Awaitable[Update]], variable: Any, site: CallSite) -> Update:
        """Make this worker's update of a variable, and compare that of a mirrored one with the other workers'."""
        if isinstance(variable, Variable) and not state_of(variable).mirrored:
            return await make()
        require_all_workers()
        own = await make()
        state = state_of(variable)
        move = partial(_compare, state.spec.name, own.components)
        await self._perform(state.spec.call("extended.update", state.subject, None), site, move)
        return own


# Reductions, gatherings.


def _of_each(operand: Operand, count: int) -> Operand:
    """Return an operand with an array for each local replica, where one may stand for all; as one of NumPy's."""
    mark = None if isinstance(operand.mark, HostType) else operand.mark
    arrays = operand.arrays if len(operand.arrays) == count else [operand.arrays[0]] * count
    return operand._replace(arrays=arrays, mark=mark)


def _call(kind: str, operation: Operation, operands: Sequence[Operand]) -> Call:
    # Several axes, of a reduction, are sent as text: a pair of numbers is an all_to_all's.
    axes = [each[0] if len(each) == 1 else str(each) for operand in operands if (each := operand.axes) is not None]
    return Call(
        kind,
        op=None if operation.op is None else operation.op.name,
        axis=tuple(axes) or None,
        structure=f"[{', '.join([LEAF] * len(operands))}]",
        paths=tuple(f"[{place}]" for place in range(len(operands))),
        shapes=tuple(operand.shape for operand in operands),
        dtypes=tuple(dtype_text(operand.dtype, operation.kind) for operand in operands),
        arrays=tuple(array_text(operand.mark) for operand in operands),
    )


def _move(operation: Operation, operands: Sequence[Operand], agreed: Agreed) -> Steps[Sequence[Any]]:
    """Return the results of operands, once all workers have agreed on them."""
    if not operands:
        return []
    op = operation.op
    if op is not None and operands[0].axes is not None:  # an axis holds for every leaf
        # Each component is reduced along its axes here; what comes of them is folded in the order of all replicas.
        own = [parts_along(op, operand, agreed.accumulate) for operand in operands]
        told = yield from agreed.gather(own)
        columns = [[part for worker in told for part in worker[i]] for i in range(len(operands))]
        return [combine_parts(op, operand, column) for operand, column in zip(operands, columns, strict=True)]
    result = yield from agreed.move(operation.collective(operands), values_of(operands))
    return [result] if len(operands) == 1 else result


# Variables.


def _broadcast(state: State) -> Collective:
    return Collective(BROADCAST, None, 0, state.spec.value)


def _create(local: int, state: State, value: Array, agreed: Agreed) -> Steps[None]:
    result = yield from agreed.move(_broadcast(state), [value] * local)
    state.put([frozen(result)] * local)


def _put(state: State, local: int, values: Sequence[Array], result: Any) -> None:
    first = result if isinstance(result, np.ndarray) else values[0]
    state.put([frozen(first)] * local)


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


def _compare(name: str, components: Sequence[Array], agreed: Agreed) -> Steps[None]:
    digests = yield from agreed.move(_OF_DIGESTS, _digests(components))
    _check_equal(digests, partial(update_differs, name))


# Steps of a dataset, of which each worker has a pipeline of its own.

_WHO_HAS_ONE: Final = Call("next step of a dataset")
_PATTERNS: Final = Call("last steps of a dataset")


async def _fill_up(team: Team, batches: Sequence[Any]) -> Sequence[Any]:
    """Return this worker's batches of a step; one of no rows where only other workers have some; none at the end."""
    if team.layout.workers == 1:
        return batches

    def gathered(call: Call, own: Any) -> Awaitable[Any]:
        return team.awaited(team.outside.begin(call, _fill_up.__code__, 0, (), lambda agreed: agreed.gather(own)))

    have = await gathered(_WHO_HAS_ONE, bool(batches))
    if all(have) or not any(have):
        return batches
    patterns = await gathered(_PATTERNS, (bool(batches), without_rows(batches[0]) if batches else None))
    return batches or next([found] for has_batch, found in patterns if has_batch)
