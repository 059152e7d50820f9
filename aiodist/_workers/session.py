"""A session: one order of steps that several workers take together, as a state machine without engine, clock or loop.

One class serves a run, what is called outside of replicas, and a group of replicas that live on several workers. What
goes in: steps, as all local replicas have posted them (or that all have joined, or ended); what the workers' records
said; that a step's values have been moved. What comes out: the next record, and what follows from the records.

**The rule.** Workers take steps one at a time. Each contributes a record, whose digest stands for all calls of the
session up to this one. Equal digests: all are at the same call and were at all calls before, and values are moved.
Different ones: nothing is moved, now or later; every worker sees it in the same records, and has it analysed.

**Callers.** The digest leaves out who has called the function that the call stands in. The sums of the ways to all
calls at that place so far travel beside it. Workers whose sums are apart may be right; those that are as far apart as
they were some calls before have come by the same ways in another order, and that is a difference (`_core.callers`).

**Joining.** A worker some of whose replicas have joined says so, and one whose replicas have all joined contributes
without a call: it takes part in the others' steps, whatever they are. Where any worker says such a thing, all tell each
other which replicas are there and what they contribute. When all replicas of all workers have joined, the join itself
is the step that they have in common.

**The end.** A worker whose replicas have all ended contributes a record that says so. Where all do, the session is
over; where another makes a call, that call can never be complete. A group that has been used has been made by all its
members' workers; of others, the workers tell each other at the end.

What was rejected: to agree on what happens behind a difference, so that the session can go on. A worker would have to
know how far each other has got, and it served programs that catch the error and go on with other calls: the error ends
the strategy, and so the records need no repair.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from aiodist._workers.record import ALIKE, ALL_FREE, NO_FLAGS, Agreement, Callers, Found, Notice, Record

_END: Final = b"end"
_JOINED: Final = b"join"
_MOST_CALLS: Final = 64
_WRAP: Final = (1 << 64) - 1


class Step(NamedTuple):
    """A call that all local replicas have posted, or all that have not joined.

    Attributes:
        digest: 16 bytes that stand for the call.
        what: the caller's own: a slot, say.
        flags: see `record`.
        payload: a small value; empty where values are moved later, and where replicas are absent.
        absent: some local replicas have joined.
        site: stands for the place of the call, on this worker.
        callers: numbers that stand for the way to it; None where callers do not count.
    """

    digest: bytes
    what: Any = None
    flags: int = NO_FLAGS
    payload: bytes | memoryview = b""
    absent: bool = False
    site: Hashable = None
    callers: Callers | None = None


class State(enum.Enum):
    """Where a session is.

    Attributes:
        IDLE: nothing is under way.
        AGREEING: a record has been contributed.
        MOVING: values are being moved.
        OVER: all have ended.
        FROZEN: the workers have diverged, or one of them is in trouble: nothing is contributed any more.
    """

    IDLE = enum.auto()
    AGREEING = enum.auto()
    MOVING = enum.auto()
    OVER = enum.auto()
    FROZEN = enum.auto()


class _Site:
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


class Session:
    """One order of steps.

    Args:
        name: what the session is, the same on every worker, and no other session's that uses the same communicator.

    Attributes:
        number: how many steps all have agreed on and carried out.
        state: where it is.
        step: the step that is under way; None where there is none, or where this worker only takes part in others'.
        free: the channels that this worker has free, as its next records say.
    """

    def __init__(self, name: str) -> None:
        self.number = 0
        self.state = State.IDLE
        self.step: Step | None = None
        self.free = ALL_FREE
        self._chain = blake2b(name.encode(), digest_size=16).digest()
        self._queue: deque[Step] = deque()
        self._joined = self._ended = self._unsure = False
        self._limit: int | None = None
        self._sites: defaultdict[Hashable, _Site] = defaultdict(_Site)
        self._sums = ALIKE

    # What the local replicas do.

    def post(self, step: Step) -> None:
        """Take a step that local replicas have posted; the ones before it come first."""
        self._queue.append(step)

    def join(self) -> None:
        """Note that all local replicas have joined, behind the steps posted so far."""
        self._joined = True

    def end(self, *, unsure: bool = False) -> None:
        """Note that all local replicas have ended, behind the steps posted so far.

        Args:
            unsure: they have made groups of which it is not known that others have.
        """
        self._ended, self._unsure = True, unsure

    def freeze(self, number: int | None = None) -> None:
        """Contribute nothing any more from the step of that number on; None: from now on."""
        limit = self.number if number is None else number
        self._limit = limit if self._limit is None else min(limit, self._limit)
        if self.state in (State.IDLE, State.AGREEING) and self.number >= self._limit:
            self.state = State.FROZEN

    # What is agreed on.

    def next_record(self) -> Record | None:
        """Return the record to contribute now; None where there is none, or something is under way."""
        if self.state is not State.IDLE:
            return None
        if self._queue:
            step = self.step = self._queue.popleft()
            notice = Notice.ABSENT if step.absent else Notice.NONE
            sums = self._sums = ALIKE if step.callers is None else self._sites[step.site].with_call(step.callers)
            record = Record(self._after(step.digest), step.flags, notice, sums, self.free, step.payload)
        elif self._joined:
            record = Record(self._chain, notice=Notice.JOINED, free=self.free)
        elif self._ended:
            notice = Notice.END_UNSURE if self._unsure else Notice.END
            record = Record(self._after(_END), notice=notice, free=self.free)
        else:
            return None
        self.state = State.AGREEING
        return record

    def _after(self, digest: bytes) -> bytes:
        return blake2b(self._chain + digest, digest_size=16).digest()

    def take(self, found: Found) -> Agreement | None:
        """Take what the records of all workers say; return what follows, or None where the session is frozen."""
        if self.state is not State.AGREEING:
            return None
        agreement = found.agreement
        if agreement is Agreement.ALIKE and not self._came_in_order(found.apart):
            agreement = Agreement.DIFFERENT
        self.state = State.MOVING
        if agreement is Agreement.DIFFERENT:
            self.state = State.FROZEN
        elif agreement is Agreement.ENDED:
            self.state = State.OVER
        elif agreement is Agreement.ALL_JOINED:
            self._chain = self._after(_JOINED)
        elif agreement is not Agreement.ENDED_UNSURE:
            self._chain = found.digest
        return agreement

    def _came_in_order(self, apart: Callers) -> bool:
        step = self.step
        if step is None or step.callers is None:
            return True
        return self._sites[step.site].came_in_order(self._sums, apart)

    def moved(self) -> None:
        """Note that the step's values have been moved, or that the join is complete."""
        self.step = None
        self.number += 1
        frozen = self._limit is not None and self.number >= self._limit
        self.state = State.FROZEN if frozen else State.IDLE

    def compared(self, *, alike: bool) -> None:
        """Note whether all workers have made the same groups: only then is the session over."""
        self.state = State.OVER if alike else State.FROZEN

    def finish_join(self) -> None:
        """Note that all replicas of all workers have joined, and go on."""
        self._joined = False
        self.moved()
