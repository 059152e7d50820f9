"""Cargo: what is carried over for a meeting, whatever becomes of the meeting itself.

Values on devices are brought down to the host before a plan is made of them, and results up again behind it. The loop
looks for what a device does for a tenth of a millisecond; then a worker thread sleeps until it is done.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from aiodist.collective.device_crossing import Ferry
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import KIND, TYPES, has_device_arrays
from aiodist.collective.work import Work
from aiodist.workers.crossing import NOTHING, Plan, Span
from aiodist.workers.transfers import Hands, Steps, by_hand
from aiodist_kernels import Accumulate, policy

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup

_LOOKS_SECONDS: Final = 100e-6


class Cargo:
    """What is carried over for a meeting.

    Args:
        meeting: at which all local replicas mean the same.
        group: the local replicas.
        span: what kinds need to know of the workers.

    Attributes:
        signature: what is asked for.
        accumulate: the accumulator that the first local replica wants.
        absent: the positions of local replicas that have joined.
        ferry: takes what lies on devices down and up again; None where nothing does any more.
    """

    def __init__(self, meeting: Rendezvous, group: SyncGroup, span: Span) -> None:
        kind, types = meeting.signature[KIND], meeting.signature[TYPES]
        self.signature = meeting.signature
        self.accumulate: Accumulate = meeting.options.accumulate
        self.absent = meeting.absent
        self._values = self._landed = meeting.values
        self._span = span
        ferried = kind.on_devices is not None and types is not None and has_device_arrays(types)
        self.ferry = Ferry(meeting, group, span) if ferried else None

    def landed(self, accumulate: Accumulate, hands: Hands) -> Steps[Plan]:
        """Return what is to be exchanged where nobody is absent, what lies on devices having been brought down."""
        across = self.signature[KIND].across
        if across is None or self.absent is not None:
            return NOTHING
        if self.ferry is not None:
            self._landed = yield from _made(self.ferry.landing(accumulate), hands)
        plan: Plan = across(self.signature, self._landed, accumulate, self._span)
        return plan

    def one_by_one(self, hands: Hands) -> Steps[dict[int, Any]]:
        """Return, by position, what each local replica brings that is there, as far as it counts."""
        kind, absent = self.signature[KIND], self.absent or ()
        there = [position for position in range(len(self._values)) if position not in absent]
        if not kind.shared or kind.across is None:
            return dict.fromkeys(there)
        if self.ferry is None:
            return {position: self._values[position] for position in there}
        landed = yield from _made(self.ferry.landing_one_by_one(), hands)
        return dict(zip(there, landed, strict=True))

    def launch(self, result: Any, hands: Hands) -> Steps[Any]:
        """Bring what belongs on devices up to them; return each replica's result, by position, where there is such."""
        if self.ferry is None:
            return result
        if policy.blocks(sum(map(nbytes_of, self._values))):
            staged = yield from by_hand(hands, self.ferry.staged, result)
        else:
            staged = self.ferry.staged(result)
        return (yield from _made(self.ferry.launching(staged), hands))

    def hand_over(self, meeting: Rendezvous, result: Any) -> None:
        """Let the meeting have its result."""
        if self.ferry is None:
            meeting.take_from_afar(result)
        else:
            meeting.by_replica = True
            meeting.take(result)


class _Look:
    """A request that is complete when devices have done a work, or have been looked at long enough."""

    def __init__(self, work: Work) -> None:
        self._ready = work.ready
        self._until = perf_counter() + _LOOKS_SECONDS
        self.done = False

    def test(self) -> bool:
        """Return whether there is nothing more to look for."""
        self.done = self._ready is not None and self._ready()
        return self.done or perf_counter() > self._until


def _made(work: Work, hands: Hands) -> Steps[Any]:
    """Return what devices make; if nobody waits for it any more, they are waited for all the same: they use memory."""
    if work.ready is not None:
        look = _Look(work)
        try:
            yield look
        except GeneratorExit:
            _wait(work)
            raise
        if look.done:
            return work.result()
    yield from by_hand(hands, _wait, work)
    return work.result()


def _wait(work: Work) -> None:
    for calls in work.phases:
        for call in calls:
            call()


def nbytes_of(value: Any) -> int:
    """Return the size of what a replica brings: a leaf, or a list of leaves."""
    if isinstance(value, list):
        return sum(map(nbytes_of, value))
    return int(getattr(value, "nbytes", 0))
