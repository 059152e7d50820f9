"""A session: one order of steps that several workers take together, over a communicator.

One class serves a run, calls outside of replicas, and a group of replicas on several workers. Its inputs are steps that
all local replicas have posted, and the news that all local replicas have joined, or ended. Its outputs are records;
what the records of all workers say together is passed to a `Carrier`. The session is one generator that yields requests
(`transport.Steps`), so it does not know how a request is waited for.

**The rule.** Workers take steps one at a time. Each contributes a record, whose digest stands for all calls of the
session up to this one. If the digests are equal, all workers are at the same call and have made the same calls before;
then values are moved over the same communicator. If they differ, nothing is moved, now or later: every worker sees the
difference in the same records, and has it analysed.

**Callers.** The digest leaves out the callers of the function that contains the call. Beside it the record has a sum of
hashes of the callers of all calls at that place so far. Workers whose sums differ may be right. If they differ by as
much as some calls before, the workers went through the same callers in another order, which is a mismatch
(`_core.callers`).

**Joining.** A worker says in its record that some of its replicas have joined. If all of them have, it contributes no
call, and takes part in the others' steps, whatever they are. In such a step all workers tell each other which replicas
take part, and what these contribute. When all replicas of all workers have joined, the join itself is the common step.

**The end.** A worker whose replicas have all ended says so in its record. If all workers do, the session is over; if
one of them makes a call instead, that call can never be complete.

What was rejected: agreeing on how to go on after a difference. Each worker would have to know how far every other one
has got, only for programs that catch the error and make other calls. The error ends the strategy instead.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from aiodist._collectives.workers import Transfer
from aiodist._workers.record import ALIKE, NO_FLAGS, Agreement, Callers, Found, Notice, Record, RecordBuffers
from aiodist._workers.transport import Communicator, Steps

_END: Final = b"end"
_JOINED: Final = b"join"
_MOST_CALLS: Final = 64
_WRAP: Final = (1 << 64) - 1


class Site:
    """The ways to the calls at one place so far: their sums, and how far the workers were apart in the last ones."""

    def __init__(self) -> None:
        self.sums = ALIKE
        self.apart: Sequence[deque[int]] = ()

    def with_call(self, callers: Callers) -> Callers:
        """Return the sums, a further call included."""
        (a, b), (c, d) = self.sums, callers
        return (a + c) & _WRAP, (b + d) & _WRAP

    def came_in_order(self, sums: Callers, apart: Callers) -> bool:
        """Note a call that all workers have made; return whether they are in order."""
        self.sums = sums
        if not self.apart:
            if apart == ALIKE:  # as nearly always
                return True
            self.apart = [deque([0], _MOST_CALLS) for _ in ALIKE]
        in_order = True
        for now, before in zip(apart, self.apart, strict=True):
            if now != before[-1]:
                in_order = in_order and now not in before
                before.append(now)
        return in_order


class Route(NamedTuple):
    """What is the same each time a call comes again."""

    digest: bytes  # 16 bytes that stand for the call
    site: Site | None = None  # the place of the call; None where callers do not count
    callers: Callers | None = None  # numbers that stand for the way to it; None where callers do not count
    small: Any = None  # how its values travel in the record; None where they do not
    plan: Any = None  # how they are moved otherwise, where that is known before all have agreed
    held: Any = None  # what is held so that no other has its id


class Step(NamedTuple):
    """A call that all local replicas have posted, or all that have not joined."""

    route: Route
    what: Any  # the caller's own: a slot
    flags: int = NO_FLAGS  # see `record`
    values: Sequence[Any] | None = ()  # what the local replicas contribute; None where some of them have joined


class Carrier(Protocol):
    """What a session's steps are for."""

    def move(self, session: Session, step: Step | None, found: Found, prepared: Any) -> Steps[None] | None:
        """Return what moves the values of a step that all have agreed on; None where there is nothing left to do.

        There is no step where all of this worker's replicas have joined. Where some have, ``found`` says so.
        """

    def finish_join(self, session: Session) -> Steps[None]:
        """Find out which replica was the last to join, and let all go on."""
        ...

    def diverged(self, session: Session) -> None:
        """Hear that the workers are at different calls."""

    def over(self) -> None:
        """Hear that all replicas of all workers have ended."""


class Session:
    """One order of steps; its name is the same on every worker, and no other session's over that communicator.

    Attributes:
        of: what it is a session of, the carrier's own.
        number: how many steps all have agreed on and carried out.
        records: the buffers of the records.
        is_advancing: steps are under way.
    """

    def __init__(self, name: str, communicator: Communicator, carrier: Carrier, of: Any = None) -> None:
        self.of = of
        self.number = 0
        self.communicator = communicator
        if communicator.records is None:
            communicator.records = RecordBuffers(communicator)
        self.records: RecordBuffers = communicator.records
        self._carrier = carrier
        self._chain = blake2b(name.encode(), digest_size=16).digest()
        self._queue: deque[Step] = deque()
        self._joined = self._ended = self._over = self.is_advancing = False
        self._limit = sys.maxsize
        self._sites: defaultdict[Hashable, Site] = defaultdict(Site)

    # What the local replicas do.

    def post(self, step: Step) -> None:
        """Take a step that local replicas have posted."""
        self._queue.append(step)

    def join(self) -> None:
        """Note that all local replicas have joined, behind the steps posted so far."""
        self._joined = True

    def end(self) -> None:
        """Note that all local replicas have ended."""
        self._ended = True

    def freeze(self, number: int | None = None) -> None:
        """Contribute nothing any more from the step of that number on; None: from now on."""
        self._limit = min(self._limit, self.number if number is None else number)

    def site(self, place: Hashable) -> Site:
        """Return what is kept of the calls at a place of the program."""
        return self._sites[place]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing wrong."""
        return self._over or not (self.is_advancing or self.number >= self._limit)

    # What is agreed on.

    def advance(self) -> Steps[None]:  # noqa: C901, PLR0912  (the way of every step, in one frame)
        """Take what steps there are; at once where another call does that already."""
        if self.is_advancing:
            return
        self.is_advancing = True
        try:
            while not (self._over or self.number >= self._limit):
                step, prepared, nbytes = None, None, 0
                if self._queue:
                    step = self._queue.popleft()
                    record = self._record_of(step)
                    if step.route.small is not None and step.values is not None:
                        nbytes = step.route.small.write(step.values)
                elif self._joined:
                    record = Record(self._chain, notice=Notice.JOINED)
                elif self._ended:
                    record = Record(self._after(_END), notice=Notice.END)
                else:
                    return
                request = self.records.post(record, nbytes)
                if step is not None and step.route.plan is not None and step.values is not None:
                    prepared = Transfer(step.route.plan, step.values)  # while the records are on their way
                yield request
                if self.number >= self._limit:  # meanwhile
                    return
                found = self.records.read()
                agreement = found.agreement
                if agreement is Agreement.ALIKE and step is not None and step.route.callers is not None:
                    assert step.route.site is not None
                    if not step.route.site.came_in_order(record.callers, found.apart):
                        agreement = Agreement.DIFFERENT
                if agreement is Agreement.ALIKE or agreement is Agreement.WITHOUT_SOME:
                    self._chain = found.digest
                    steps = self._carrier.move(self, step, found, prepared)
                    if steps is not None:
                        yield from steps
                    self.number += 1
                elif agreement is Agreement.ALL_JOINED:
                    self._chain = self._after(_JOINED)
                    yield from self._carrier.finish_join(self)
                    self._joined = False
                    self.number += 1
                elif agreement is Agreement.ENDED:
                    self._over = True
                    self._carrier.over()
                else:
                    self.freeze()
                    self._carrier.diverged(self)
        finally:
            self.is_advancing = False

    def _record_of(self, step: Step) -> Record:
        route, sums = step.route, ALIKE
        if route.site is not None and route.callers is not None:
            sums = route.site.with_call(route.callers)
        digest = blake2b(self._chain + route.digest, digest_size=16).digest()
        return Record(digest, step.flags, Notice.NONE if step.values is not None else Notice.ABSENT, sums)

    def _after(self, digest: bytes) -> bytes:
        return blake2b(self._chain + digest, digest_size=16).digest()
