"""Reports: the structured account of a disagreement between replicas.

A report is a value. It is complete when it is made, holds no reference to tasks, frames or arrays, and can be
pickled, compared and kept. `str(report)` is the text for a person.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class Location(NamedTuple):
    """A place in a program.

    Attributes:
        file: the file's name as Python knows it.
        line: the line, counted from 1.
        function: the name of the function that the line belongs to.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class CallRecord(NamedTuple):
    """One collective in a replica's history.

    Attributes:
        sequence_number: its 0-based position in the replica's program.
        call: what was asked, as text, e.g. ``all_reduce(SUM, float32[3])``.
        location: where it was called.
    """

    sequence_number: int
    call: str
    location: Location


class ReplicaState(enum.StrEnum):
    """What a replica was doing when a report was written. Members compare equal to their lower-case names."""

    WAITING = "waiting"
    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the replica's function is over."""
        return self not in (ReplicaState.WAITING, ReplicaState.RUNNING)


class Reason(enum.StrEnum):
    """Why a report was written; the ways to differ stand in the order in which they are looked for."""

    KIND = "kind"
    NAME = "name"
    REDUCE_OP = "reduce_op"
    AXIS = "axis"
    SOURCE = "source"
    MERGE_FN = "merge_fn"
    STRUCTURE = "structure"
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    CALL_SITE = "call_site"
    EXITED = "exited"
    ABANDONED = "abandoned"
    TIMEOUT = "timeout"
    DEADLOCK = "deadlock"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What one replica did, up to a disagreement.

    Attributes:
        replica_id: its id in the sync group.
        device: its device, in canonical form.
        state: what it was doing.
        call: what it asked for, e.g. ``all_reduce(SUM, float32[3])``; None unless it waits.
        location: where it asked for that; None unless it waits.
        history: its last collectives, newest last; one that it waits in is the last.
        stack: the places where it is suspended or runs, innermost last; empty once it has ended.
    """

    replica_id: int
    device: str
    state: ReplicaState
    call: str | None = None
    location: Location | None = None
    history: tuple[CallRecord, ...] = ()
    stack: tuple[Location, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """Who differs, in what, and where: attached to every `CollectiveError` as ``.report``.

    Attributes:
        reason: the first thing that differs, in the order of `Reason`.
        sequence_number: the 0-based position of the collective, the same on every replica up to here.
        replicas: one `ReplicaReport` each, by replica id.
        suspects: ids of the minority, ascending; all on a tie; for an incomplete collective those that are missing,
            or, when most have left, those that wait.
        text: the whole account for a person; what `str` gives.
    """

    reason: Reason
    sequence_number: int
    replicas: tuple[ReplicaReport, ...]
    suspects: tuple[int, ...]
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text
