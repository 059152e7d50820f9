"""Cargo: what is carried over for a meeting, whatever becomes of the meeting itself.

Values on devices are brought down to the host before a plan is made of them, and results up again behind it. The loop
looks for what a device does for a tenth of a millisecond; then a worker thread sleeps until it is done.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from aiodist._arrays.leaves import has_device_arrays
from aiodist._collectives import device
from aiodist._collectives.work import Work
from aiodist._core.report import Reason
from aiodist.collective.kinds import collective_of
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import DETAIL, KIND, TYPES
from aiodist.replica.device_steps import made
from aiodist.workers.crossing import NOTHING, Plan, Span
from aiodist.workers.transfers import Hands, Steps, by_hand
from aiodist_kernels import Accumulate, policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiodist.collective.group import SyncGroup


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
        ferried = kind.computes is not None and types is not None and has_device_arrays(types)
        self.ferry = Ferry(meeting, group, span) if ferried else None

    def landed(self, accumulate: Accumulate, hands: Hands) -> Steps[Plan]:
        """Return what goes through the host where nobody is absent; what lies on devices has been brought down."""
        across = self.signature[KIND].across
        if across is None or self.absent is not None:
            return NOTHING
        if self.ferry is not None:
            self._landed = yield from made(self.ferry.landing(accumulate), hands)
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
        landed = yield from made(self.ferry.landing_one_by_one(), hands)
        return dict(zip(there, landed, strict=True))

    def launch(self, result: Any, hands: Hands) -> Steps[Any]:
        """Bring what belongs on devices up to them; return each replica's result, by position, where there is such."""
        if self.ferry is None:
            return result
        return (yield from _launched(self.ferry, self._values, result, hands))

    def hand_over(self, meeting: Rendezvous, result: Any) -> None:
        """Let the meeting have its result."""
        if self.ferry is None:
            meeting.take_from_afar(result)
        else:
            meeting.by_replica = True
            meeting.take(result)


class Ferry:
    """The way of one meeting's values down to the host, and of its results up again.

    Args:
        meeting: with device arrays among the values of the local replicas, which all have arrived or joined.
        group: the local replicas.
        span: the workers.
    """

    def __init__(self, meeting: Rendezvous, group: SyncGroup, span: Span) -> None:
        absent = meeting.absent or ()
        self._meeting, self._span, self._devices = meeting, span, group.devices
        self._collective = collective_of(meeting.signature)
        self._values = [None if position in absent else value for position, value in enumerate(meeting.values)]

    def landing(self, accumulate: Accumulate) -> Work:
        """Return the work that gives the values as on the host, folded with that accumulator where they can be."""
        present = sum(value is not None for value in self._values)
        return self._landing(accumulate, self._collective.op is not None and present > 1 and not self._span.ordered)

    def landing_one_by_one(self) -> Work:
        """Return the work that gives the values as on the host, of each replica its own."""
        return self._landing("native", False)

    def _landing(self, accumulate: Accumulate, folded: bool) -> Work:
        needed = None
        if self._meeting.signature[KIND].detail is Reason.SOURCE:
            worker, position = self._span.layout.worker_of(self._meeting.signature[DETAIL])
            needed = [position] if worker == self._span.layout.rank else []
        work = device.to_host(self._collective, self._values, self._devices, accumulate, folded=folded, needed=needed)

        def present() -> list[Any]:
            return [found for found, value in zip(work.result(), self._values, strict=True) if value is not None]

        return dataclasses.replace(work, result=present)

    def launching(self, result: Any) -> Work:
        """Return the work that gives each replica's result, by position."""
        outs = {position: found.leaves for position, found in (self._meeting.outs or {}).items()}
        if not self._meeting.signature[KIND].shared:
            rows = iter(result)
            result = [None if value is None else next(rows) for value in self._values]
        return device.from_host(self._collective, self._values, result, self._devices, outs)


def _launched(ferry: Ferry, values: Sequence[Any], result: Any, hands: Hands) -> Steps[Any]:
    if policy.blocks(sum(map(nbytes_of, values))):
        work = yield from by_hand(hands, ferry.launching, result)
    else:
        work = ferry.launching(result)
    return (yield from made(work, hands))


def nbytes_of(value: Any) -> int:
    """Return the size of what a replica brings: a leaf, or a list of leaves."""
    if isinstance(value, list):
        return sum(map(nbytes_of, value))
    return int(getattr(value, "nbytes", 0))
