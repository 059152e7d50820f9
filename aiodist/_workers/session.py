"""A session: one order of steps that several workers take together, over a communicator.

One class serves runs, calls outside of replicas, and groups of replicas on several workers. Its inputs are steps that
all local replicas have posted, and that all of them have joined or ended. It exchanges records, and passes what the
records of all workers say to a `Carrier`. The session is one generator of requests (`transport.Steps`), so it does not
know how requests are waited for.

**The rule.** Workers take steps one at a time. Each contributes a record whose digest covers all calls of the session
up to this one. If the digests are equal, all workers are at the same call and have made the same calls before; then
values are moved over the same communicator. If they differ, nothing is moved, now or later: every worker sees the
difference in the same records, and it is analysed.

**Callers.** The digest leaves out the callers of the function that contains the call. Next to it, the record has sums
of hashes of the callers of all calls at that place so far. Workers whose sums differ may be right. But if the sums
differ by as much as at an earlier call, the workers have gone through the same callers in another order, which is a
mismatch (`_core.callers`).

**Joining.** A worker's record says if some of its replicas have joined. If all have, it contributes no call, and takes
part in whatever steps the others take. In such a step the workers exchange which replicas take part, with what values.
Once all replicas of all workers have joined, the join itself is the common step.

**The end.** A worker whose replicas have all ended says so in its record. If all workers do, the session is over; if
one of them makes a call instead, that call can never be complete.

Rejected: agreeing on how to continue after a difference. Each worker would have to know how far every other has come,
only for programs that catch the error and make other calls. The error ends the strategy instead.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from aiodist._collectives.workers import Transfer
from aiodist._core.ledger import HISTORY
from aiodist._workers.record import ALIKE, NO_FLAGS, NONE, WRAP, Agreement, Callers, Notice, RecordBuffers
from aiodist._workers.transport import Communicator, Steps

_DIGEST: Final = (1 << 128) - 1
_FACTOR: Final = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""A session's digest is a polynomial in this, modulo 2**128, with the digests of its calls as coefficients: a tenth of
the time of hashing. As it is odd, sessions that were alike differ with certainty at the first call that differs."""
_SAME: Final = Agreement.ALIKE


class Site:
    """The callers of the calls at one place: their sums, and how these differed between workers at the latest calls."""

    def __init__(self) -> None:
        self.sums = self._apart = ALIKE
        self._calls: Sequence[dict[int, int]] = [{} for _ in ALIKE]  # by the difference before each, their numbers

    def came_in_order(self, number: int, sums: Callers, apart: Callers) -> bool:
        """Note a call that all workers have made; return whether their callers came in the same order."""
        self.sums = sums
        if apart == self._apart:  # the usual case
            return True
        in_order = True
        for now, before, calls in zip(apart, self._apart, self._calls, strict=True):
            if now != before:
                calls[before] = number
                if len(calls) > HISTORY:
                    del calls[next(iter(calls))]
                in_order = in_order and number - calls.get(now, -HISTORY) >= HISTORY  # a report could show no older one
        self._apart = apart
        return in_order


class Route(NamedTuple):
    """What is the same each time a call is repeated."""

    digest: int  # of the call
    flags: int = NO_FLAGS  # see `record`
    site: Site | None = None  # its place; None if its callers do not count
    callers: Callers = ALIKE  # hashes of its callers
    small: Any = None  # moves its values in the record; None if they are too large
    plan: Any = None  # moves its values behind the record, if the plan is known before the workers agree
    held: Any = None  # objects that must live as long, because their ids are the route's key


_JOINED: Final = Route(1)
_ENDED: Final = Route(2)


class Carrier(Protocol):
    """Carries out what the workers of a session agree on."""

    def move(self, session: Session, route: Route, slot: Any, flags: int, prepared: Any) -> Steps[None] | None:
        """Return the steps that move the values of a call that all replicas make; None if it is complete already.

        ``flags`` are worker 0's.
        """

    def move_without_some(self, session: Session, slot: Any) -> Steps[None]:
        """Move the values of a call that only replicas make that have not joined; the slot is None if all have here."""
        ...

    def finish_join(self, session: Session) -> Steps[None]:
        """Find out which replica joined last, and complete the join."""
        ...

    def diverged(self, session: Session) -> None:
        """Handle a difference: the workers are at different calls."""

    def over(self) -> None:
        """Handle the end: all replicas of all workers have ended."""


class Session:
    """One order of steps. Its name is the same on every worker, and unique among the communicator's sessions.

    Attributes:
        of: the carrier's own data.
        number: how many steps are complete.
        records: the buffers of the records.
        is_advancing: steps are in progress.
    """

    def __init__(self, name: str, communicator: Communicator, carrier: Carrier, of: Any = None) -> None:
        self.of = of
        self.number = 0
        self.communicator = communicator
        if communicator.records is None:
            communicator.records = RecordBuffers(communicator)
        self.records: RecordBuffers = communicator.records
        self._carrier = carrier
        self._chain = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
        self._queue: deque[tuple[Route, Any, Sequence[Any] | None]] = deque()
        self._joined = self._ended = self._over = self.is_advancing = False
        self._limit = sys.maxsize
        self._sites: defaultdict[Hashable, Site] = defaultdict(Site)

    def post(self, route: Route, slot: Any, values: Sequence[Any] | None = ()) -> None:
        """Queue a call that all local replicas have posted, with their values; None if some of them have joined."""
        self._queue.append((route, slot, values))

    def join(self) -> None:
        """Note that all local replicas have joined, after the queued steps."""
        self._joined = True

    def end(self) -> None:
        """Note that all local replicas have ended."""
        self._ended = True

    def freeze(self, number: int | None = None) -> None:
        """Contribute nothing from the step of that number on; None: from now on."""
        self._limit = min(self._limit, self.number if number is None else number)

    def site(self, place: Hashable) -> Site:
        """Return what is known of the calls at a place of the program."""
        return self._sites[place]

    @property
    def is_idle(self) -> bool:
        """Whether no step is in progress, and nothing is wrong."""
        return self._over or not (self.is_advancing or self.number >= self._limit)

    def advance(self) -> Steps[None]:  # noqa: C901, PLR0912, PLR0915  (the hot path, in one frame)
        """Take all steps that are possible now, unless another call is doing so."""
        if self.is_advancing:
            return
        self.is_advancing = True
        try:
            while not (self._over or self.number >= self._limit):
                slot = values = prepared = None
                if self._queue:
                    route, slot, values = self._queue.popleft()
                    notice = NONE if values is not None else Notice.ABSENT
                elif self._joined:
                    route, notice = _JOINED, Notice.JOINED
                elif self._ended:
                    route, notice = _ENDED, Notice.END
                else:
                    return
                chain = (self._chain * _FACTOR + route.digest) & _DIGEST
                site, callers = route.site, ALIKE
                if site is not None:
                    (a, b), (c, d) = site.sums, route.callers
                    callers = (a + c) & WRAP, (b + d) & WRAP
                nbytes = route.small.write(values) if route.small is not None and values is not None else 0
                request = self.records.post(chain, route.flags, callers, notice, nbytes)
                if route.plan is not None and values is not None:
                    prepared = Transfer(route.plan, values)  # while the records are in flight
                yield request
                if self.number >= self._limit:  # frozen meanwhile
                    return
                found = self.records.read()
                agreement = found.agreement
                if site is not None and agreement is _SAME:
                    in_order = site.came_in_order(self.number, callers, found.apart)
                    agreement = _SAME if in_order else Agreement.DIFFERENT
                if agreement is _SAME:
                    self._chain = chain
                    steps = self._carrier.move(self, route, slot, found.flags, prepared)
                    if steps is not None:
                        yield from steps
                    self.number += 1
                elif agreement is Agreement.WITHOUT_SOME:
                    self._chain = found.digest
                    yield from self._carrier.move_without_some(self, slot)
                    self.number += 1
                elif agreement is Agreement.ALL_JOINED:
                    self._chain = chain
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
