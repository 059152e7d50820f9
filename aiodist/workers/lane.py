"""A lane: one order of steps, the same on every worker, over a communicator of its own.

A lane counts the records that it has brought. Where workers part, the strategy ends: what is in the air then belongs to
the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiodist.workers.calls import digest as digest_of
from aiodist.workers.communicator import Communicator, Request
from aiodist.workers.crossing import NOTHING, Plan
from aiodist.workers.record import ALL_FREE, PAYLOAD, Flag, Notice, Opening
from aiodist.workers.transfers import Hands, Steps, Transfer

_BESIDE_ANOTHER = 256


class Disagreement(Exception):  # noqa: N818  (no error: what every worker has seen in the same buffer)
    """The workers have brought different digests, or the call has failed on some of them before its record."""


class Agreed(NamedTuple):
    """A step on which all workers have agreed.

    Attributes:
        plan: what is to be exchanged now.
        opening: the record's exchange, for what else it tells until the next one begins.
        plain: all records say the same, so that what they hold is of this plan.
        other: worker 0 wants another accumulator; the plan is to be made anew, with that.
        notice: the highest that a worker has given. Where replicas are absent, the plan is not to be carried out.
    """

    plan: Plan
    opening: Opening
    plain: bool = False
    notice: Notice = Notice.NONE
    other: bool = False


class Lane:
    """A lane as one worker sees it.

    Args:
        communicator: its own.
        index: its number, the same on every worker.

    Attributes:
        posted: how many records this worker has brought.
        opening: the exchange of records.
        in_exchange: this worker's record is with the others, who may carry the step out; it has not done so yet.
    """

    def __init__(self, communicator: Communicator, index: int) -> None:
        self.communicator = communicator
        self.index = index
        self.posted = 0
        self.opening = Opening(communicator)
        self._use = 0
        self.in_exchange = False

    def begin(self, *use: int) -> None:
        """Begin a use of the lane, in which nothing has been agreed on yet but which use it is: one or two numbers."""
        self._use = int.from_bytes(digest_of(use), "little") >> 1  # there is room for the number of a record
        self.in_exchange = False

    def agree(
        self,
        digest: bytes,
        plan: Plan = NOTHING,
        flags: int = Flag.NONE,
        free: int = ALL_FREE,
        notice: Notice = Notice.NONE,
    ) -> Steps[Agreed]:
        """Exchange records; return the plan to carry out.

        What must agree is the call, the use of the lane, and how many records have been brought to it. Those of this
        use have agreed, so that there is no need to speak of them.

        Args:
            digest: the call's.
            plan: the plan with the accumulator that this worker's first replica wants; worker 0's counts.
            flags: which accumulator that is.
            free: as in the record.
            notice: likewise.

        Raises:
            Disagreement: the workers do not mean the same.
        """
        transfers = plan.transfers
        length, payload = _payload(transfers) if transfers and self.opening.complete else (0, b"")
        opening = self.opening
        what = (self._use + self.posted) ^ int.from_bytes(digest, "little")
        yield self._post(what.to_bytes(16, "little"), length, free, flags, notice, payload)
        if opening.alike():
            return Agreed(plan, opening, plain=True)
        if not opening.agreed():
            raise Disagreement
        self._check_failures(opening)
        other = bool((opening.first_flags() ^ flags) & Flag.FLOAT64)
        return Agreed(plan, opening, notice=opening.notice(), other=other)  # the records may be of several plans

    def stand_by(self) -> Steps[bool]:
        """Take part in whatever step the others make next, for a worker whose replicas have all joined.

        Returns:
            Whether they make it; the call may have failed on all of them.

        Raises:
            Disagreement: the others do not mean the same.
        """
        opening = self.opening
        yield self._post(bytes(16), 0, ALL_FREE, Flag.NONE, Notice.JOINED, b"")
        if not (opening.alike() or opening.agreed()):
            raise Disagreement
        return not self._check_failures(opening)

    @staticmethod
    def _check_failures(opening: Opening) -> bool:
        """Return whether the call has failed on all workers that make it, each of which has raised its own error.

        Raises:
            Disagreement: on some of them alone.
        """
        some, everywhere = opening.failed()
        if some and not everywhere:
            raise Disagreement
        return some

    def _post(self, digest: bytes, *what: Any) -> Request:
        self.posted += 1
        self.in_exchange = True
        return self.opening.post(digest, *what)

    def carry_out(self, agreed: Agreed, hands: Hands) -> Steps[list[Any]]:
        """Exchange what was agreed on; return the results of the plan's transfers."""
        results: list[Any] = []
        transfers, opening = agreed.plan.transfers, agreed.opening
        lengths: list[int] | None = None
        if agreed.plain and opening.complete:
            if len(transfers) == 1 and transfers[0].room is not None:
                return [(yield from self._carry_out_one(transfers[0], opening, hands))]
            lengths = [row.length for row in opening.rows()]
        at = 0
        for transfer in transfers:
            limit = _limit(transfer, transfers) - at
            if lengths is not None and transfer.fits(limit, lengths):
                results.append(transfer.from_records(_parts(transfer, opening, lengths, at)))
                at += transfer.room or 0
            else:
                known = lengths if transfer.room is None else None
                results.append((yield from transfer.carry_out(self.communicator, known, hands)))
        return results

    def _carry_out_one(self, transfer: Transfer, opening: Opening, hands: Hands) -> Steps[Any]:
        """Exchange the only thing that there is, whose size everybody knows."""
        if not transfer.fits(PAYLOAD, ()):
            return (yield from transfer.carry_out(self.communicator, None, hands))
        room = transfer.room
        return transfer.from_records([payload[:room] for payload in opening.payloads()])


def _limit(transfer: Transfer, transfers: Sequence[Transfer]) -> int:
    """Return how many bytes of a record a transfer may have, with what stands before it."""
    return PAYLOAD if transfer is transfers[-1] else _BESIDE_ANOTHER


def _payload(transfers: Sequence[Transfer]) -> tuple[int, bytes]:
    """Return the length of what has no fixed size, and what the record is to hold."""
    if len(transfers) == 1 and transfers[0].room is not None:
        return 0, transfers[0].data.tobytes() if transfers[0].fits(PAYLOAD, ()) else b""
    held, length = bytearray(), 0
    for transfer in transfers:
        limit = _limit(transfer, transfers) - len(held)
        if transfer.room is None:
            length = transfer.nbytes
            if length <= limit:
                held += transfer.data.tobytes()
        elif transfer.fits(limit, ()):
            held += transfer.data.tobytes().ljust(transfer.room, b"\0")
    return length, bytes(held)


def _parts(transfer: Transfer, opening: Opening, lengths: Sequence[int], at: int) -> list[memoryview]:
    sizes = lengths if transfer.room is None else [transfer.room] * len(lengths)
    return [payload[at : at + size] for payload, size in zip(opening.payloads(), sizes, strict=True)]
