"""Cargo: what is carried over for a meeting, whatever becomes of the meeting itself.

Values on devices are brought down to the host before a plan is made of them, and results up again behind it; but those
that go from GPU to GPU, where the run has the use of NCCL. The loop looks for what a device does for a tenth of a
millisecond; then a worker thread sleeps until it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiodist.collective.device_crossing import Ferry
from aiodist.collective.portion import portion_of
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import KIND, STRUCTURE, TYPES, has_device_arrays
from aiodist.replica.device_steps import made
from aiodist.workers.crossing import NOTHING, Plan, Span
from aiodist.workers.transfers import Hands, Steps, by_hand
from aiodist_kernels import Accumulate, policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiodist.collective.group import SyncGroup
    from aiodist.collective.portion import Portion
    from aiodist.replica.flight import Flight
    from aiodist.workers.nccl_plane import Use


class Cargo:
    """What is carried over for a meeting.

    Args:
        meeting: at which all local replicas mean the same.
        group: the local replicas.
        span: what kinds need to know of the workers.
        use: the run's use of NCCL; None where it has none.

    Attributes:
        signature: what is asked for.
        accumulate: the accumulator that the first local replica wants.
        absent: the positions of local replicas that have joined.
        ferry: takes what lies on devices down and up again; None where nothing does any more.
    """

    def __init__(self, meeting: Rendezvous, group: SyncGroup, span: Span, use: Use | None = None) -> None:
        kind, types = meeting.signature[KIND], meeting.signature[TYPES]
        self.signature = meeting.signature
        self.accumulate: Accumulate = meeting.options.accumulate
        self.absent = meeting.absent
        self._values = self._landed = meeting.values
        self._accumulate: Accumulate = self.accumulate
        self._span = span
        ferried = kind.on_devices is not None and types is not None and has_device_arrays(types)
        self.ferry = Ferry(meeting, group, span) if ferried else None
        self._aloft: _Aloft | None = None
        if use is not None and self.ferry is not None and meeting.absent is None:
            from aiodist.workers.nccl_choice import places_for  # loaded where a run has the use of NCCL

            places = places_for(meeting.signature)
            self._aloft = _Aloft(meeting, group, span, use, places) if places else None

    def landed(self, accumulate: Accumulate, hands: Hands) -> Steps[Plan]:
        """Return what goes through the host where nobody is absent; what lies on devices has been brought down."""
        self._accumulate = accumulate
        across = self.signature[KIND].across
        if across is None or self.absent is not None:
            return NOTHING
        if self._aloft is not None:
            yield from self._aloft.land(accumulate, hands)
            return self._aloft.plan(accumulate)
        if self.ferry is not None:
            self._landed = yield from made(self.ferry.landing(accumulate), hands)
        plan: Plan = across(self.signature, self._landed, accumulate, self._span)
        return plan

    def fly(self, hands: Hands) -> Steps[None]:
        """Let what goes from GPU to GPU go there, with the accumulator that was landed with last.

        Raises:
            RuntimeError: NCCL has failed.
        """
        if self._aloft is not None:
            yield from self._aloft.fly(self._accumulate, hands)

    def stay(self) -> None:
        """Let nothing go from GPU to GPU: some replicas are absent."""
        self._aloft = None

    def one_by_one(self, hands: Hands) -> Steps[dict[int, Any]]:
        """Return, by position, what each local replica brings that is there, as far as it counts."""
        kind, absent = self.signature[KIND], self.absent or ()
        there = [position for position in range(len(self._values)) if position not in absent]
        if not kind.shared or kind.across is None:
            return dict.fromkeys(there)
        if self.ferry is None:
            return {position: self._values[position] for position in there}
        landed = yield from made(self.ferry.landing_one_by_one(), hands)
        return dict(zip(there, landed, strict=True))

    def launch(self, result: Any, hands: Hands) -> Steps[Any]:
        """Bring what belongs on devices up to them; return each replica's result, by position, where there is such."""
        if self.ferry is None:
            return result
        if self._aloft is not None:
            return (yield from self._aloft.launch(result, hands))
        return (yield from _launched(self.ferry, self._values, result, hands))

    def hand_over(self, meeting: Rendezvous, result: Any) -> None:
        """Let the meeting have its result."""
        if self.ferry is None:
            meeting.take_from_afar(result)
        else:
            meeting.by_replica = True
            meeting.take(result)


class _Aloft:
    """A meeting some of whose leaves go from GPU to GPU, and the others through the host.

    Args:
        meeting: the meeting.
        group: the local replicas.
        span: what kinds need to know of the workers.
        use: the run's use of NCCL.
        places: of the leaves that go from GPU to GPU.
    """

    def __init__(self, meeting: Rendezvous, group: SyncGroup, span: Span, use: Use, places: Sequence[int]) -> None:
        from aiodist.replica.flight import Flight

        self._single = meeting.signature[STRUCTURE] is None
        count = 1 if self._single else len(meeting.signature[TYPES])
        self._places = places
        self._rest = [place for place in range(count) if place not in set(places)]
        self._flight: Flight = Flight(portion_of(meeting, places), group, use, span.layout)
        self._flown: Mapping[int, Any] = {}
        self._span = span
        self._near: Portion | None = portion_of(meeting, self._rest) if self._rest else None
        self._ferry = None if self._near is None else Ferry(self._near, group, span)
        self._landed: Any = None

    def land(self, accumulate: Accumulate, hands: Hands) -> Steps[None]:
        """Bring down what lies on devices and goes through the host."""
        if self._ferry is not None and self._near is not None:
            self._landed = self._near.values
            if has_device_arrays(self._near.signature[TYPES]):
                self._landed = yield from made(self._ferry.landing(accumulate), hands)

    def plan(self, accumulate: Accumulate) -> Plan:
        """Return what is to be exchanged through the host."""
        if self._near is None:
            return NOTHING
        plan: Plan = self._near.signature[KIND].across(self._near.signature, self._landed, accumulate, self._span)
        return plan

    def fly(self, accumulate: Accumulate, hands: Hands) -> Steps[None]:
        """Reduce what goes from GPU to GPU."""
        self._flown = yield from self._flight.carry_out(accumulate, hands)

    def launch(self, result: Any, hands: Hands) -> Steps[dict[int, Any]]:
        """Return each replica's result, by position."""
        if self._ferry is None or self._near is None:
            return dict(self._flown)
        launched = yield from _launched(self._ferry, self._near.values, result, hands)
        return {position: self._together(row, launched[position]) for position, row in self._flown.items()}

    def _together(self, flown: Sequence[Any], launched: Sequence[Any]) -> list[Any]:
        found = dict(zip(self._places, flown, strict=True)) | dict(zip(self._rest, launched, strict=True))
        return [found[place] for place in range(len(found))]


def _launched(ferry: Ferry, values: Sequence[Any], result: Any, hands: Hands) -> Steps[Any]:
    if policy.blocks(sum(map(nbytes_of, values))):
        staged = yield from by_hand(hands, ferry.staged, result)
    else:
        staged = ferry.staged(result)
    return (yield from made(ferry.launching(staged), hands))


def nbytes_of(value: Any) -> int:
    """Return the size of what a replica brings: a leaf, or a list of leaves."""
    if isinstance(value, list):
        return sum(map(nbytes_of, value))
    return int(getattr(value, "nbytes", 0))
