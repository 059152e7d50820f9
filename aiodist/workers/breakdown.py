"""Breakdowns: a step that fails on one worker, where the others may have begun to carry it out.

A record is with the others before it is known whether this worker can do its part: memory may lack for the result, or
its engine fail. The others then wait in an operation that it never begins, or never ends. It tells them, and they stop
waiting. **The communicator is never used again**: an operation in the air there would pair with whatever came next. Its
buffers belong to the engine as long as it may write to them.

A call that fails before its record is told of in the record (`replica.failing`). Nothing is in the air then, and the
lane stays in use; the account is the same. It counts where others wait in that call, whoever told first: where all have
failed in it nobody does, and where the calls differ that is told instead.

What was rejected: to carry the step out all the same, with whatever numbers, so that the communicator stays in step (it
takes the memory that lacks, or the engine that has failed, and the others hear too late that the numbers mean nothing);
a second record behind each step, by which all say that they could (it costs every step as much as a small step does).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from aiodist._core.errors import IncompleteCollectiveError
from aiodist._core.report import CollectiveReport, Reason, ReplicaState
from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.collective.group import SyncGroup
from aiodist.collective.historian import replica_reports
from aiodist.collective.member import JOIN
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.wording import ids, place
from aiodist.workers.calls import WireCall, from_wire, to_wire
from aiodist.workers.parts import WholePart, trouble_in
from aiodist.workers.state import Failure, WorkerState

if TYPE_CHECKING:
    from aiodist.workers.layout import Layout

OWN_LANE = 0
Found: TypeAlias = tuple[int, "Breakdown"]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A step that one worker cannot carry out.

    Attributes:
        lane: the number of the group's lane; `OWN_LANE` for the run's own, or what is called outside of replicas.
        group: what reports call the group; None for the run's own.
        replicas: the ids, over all workers, of this worker's replicas that take part in it.
        number: of the meeting; None where it is the end of a run, or of a group.
        call: what is asked for; None there.
        failure: what was raised.
        late: it was known only when what is outside of replicas had begun anew.
        early: it failed before its record was brought; it counts where others wait in it, and nothing is in the air.
        serial: of an early one, the number that the lane book has given the group; None for the run's own.
    """

    lane: int
    group: str | None
    replicas: tuple[int, ...]
    number: int | None
    call: WireCall | None
    failure: Failure
    late: bool = False
    early: bool = False
    serial: int | None = None

    @classmethod
    def of(cls, lane: int, group: SyncGroup, meeting: Rendezvous | None, error: BaseException) -> Breakdown:
        """Return what there is to tell of a step that has failed here."""
        replicas = tuple(member.replica_id for member in group.members)
        failure = Failure.of(replicas[0], error)
        if meeting is None:
            return cls(lane, group.label, replicas, None, None, failure)
        return cls(lane, group.label, replicas, meeting.number, to_wire(meeting.call), failure)

    @property
    def in_trouble(self) -> int | None:
        """The number of the meeting in the run's own group that cannot complete."""
        return self.number if self.lane == OWN_LANE and not self.late else None


def found_in(states: Mapping[int, WorkerState]) -> list[Found]:
    """Return what workers have told of such steps, by rank."""
    return [(rank, breakdown) for rank in sorted(states) for breakdown in states[rank].breakdowns]


def that_count(
    found: Sequence[Found], states: Mapping[int, WorkerState], root: SyncGroup, parts: Sequence[WholePart]
) -> list[Found]:
    """Leave out early ones that explain nothing: nobody waits there, or the replicas have parted by then, or are late.

    Args:
        found: what workers have told.
        states: all that they have told.
        root: the run's own group, of all its replicas.
        parts: the run's other groups.
    """
    groups = dict[int | None, SyncGroup]({part.granted: part for part in parts}) | {None: root}
    return [(rank, each) for rank, each in found if not each.early or _counts(each, found, states, groups[each.serial])]


def _counts(early: Breakdown, found: Sequence[Found], states: Mapping[int, WorkerState], group: SyncGroup) -> bool:
    number = early.number
    assert number is not None
    meeting, trouble = group.open.get(number), trouble_in(group)
    if (meeting is not None and meeting.deadline is not None) or (trouble is not None and trouble <= number):
        return False
    failed = {rank for rank, each in found if (each.serial, each.number) == (early.serial, number)}
    return any(number in _open_in(states[rank], early.serial) for rank in states if rank not in failed)


def _open_in(state: WorkerState, serial: int | None) -> Collection[int]:
    if serial is None:
        return state.open
    return [number for part in state.groups if part.serial == serial for number in part.open]


def lanes_of(found: Collection[Found]) -> frozenset[int]:
    """Return the lanes whose communicators are never used again."""
    return frozenset(breakdown.lane for _, breakdown in found if not breakdown.early)


def error_of(found: Sequence[Found], root: SyncGroup, layout: Layout) -> IncompleteCollectiveError:
    """Return the error for all workers.

    Args:
        found: what workers have told.
        root: the run's own group, of all its replicas.
        layout: the workers.
    """
    suspects = sorted({replica_id for _, breakdown in found for replica_id in breakdown.replicas})
    for member in root.members:
        if member.replica_id in suspects and member.end is None:
            member.end = ReplicaState.FAILED
    number = found[0][1].number
    if number is None or number >= JOIN:
        number = min(member.sequence for member in root.members)
    text = "\n".join([*_lines(found, layout), _hint(found)])
    report = CollectiveReport(Reason.EXITED, number, replica_reports(root, None), tuple(suspects), text)
    return IncompleteCollectiveError(report)


def _hint(found: Sequence[Found]) -> str:
    one = len({rank for rank, _ in found}) == 1
    what = "that one lacks" if one else "those lack"
    values = f", or {'brings' if one else 'bring'} that cannot be sent" if any(each.early for _, each in found) else ""
    return f"The other workers could have gone on: look for what {what}, memory say{values}."


def _lines(found: Sequence[Found], layout: Layout) -> list[str]:
    """Return a line for each step, and what went wrong with it, whoever it was."""
    who: dict[str, tuple[set[int], set[int]]] = {}
    for rank, each in found:
        workers, replicas = who.setdefault(f"{_what(each)}: {each.failure.text}", (set(), set()))
        workers.add(rank)
        replicas.update(each.replicas)
    return [
        f"{ids(workers, 'worker')} of {layout.workers} ({ids(replicas)}) could not carry out {what}"
        for what, (workers, replicas) in who.items()
    ]


def _what(breakdown: Breakdown) -> str:
    if breakdown.number is None or breakdown.call is None:
        return f"the end of {breakdown.group or 'the run'}"
    group = "" if breakdown.group is None else f" of {breakdown.group}"
    signature, code, offset = from_wire(breakdown.call)
    if breakdown.number < 0:
        return f"the creation{group}"
    number = "the join" if breakdown.number >= JOIN else f"collective #{breakdown.number}"
    return f"{number}{group}, {call_text(signature)} at {place(location(code, offset))}"
