"""The recorder: the last collectives of every replica, readable at any time, also after a failure.

It costs nothing extra: a ledger keeps its open slots and a ring of its last matched collectives for its reports anyway.
Texts and places are made when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from aiodist._core.ledger import HISTORY, Ledger
from aiodist._core.snapshot import GroupRecord
from aiodist._core.terms import Location
from aiodist._core.text import count, full_place, grouped, ids_briefly

_SHOWN = 10


class RecordedCall(NamedTuple):
    """One collective that a replica called.

    Attributes:
        sequence_number: its position in the replica's program, or in the group's, from 0.
        call: the call as text, e.g. ``all_reduce(SUM, float32[3])``.
        location: the call site.
        complete: whether every replica has made this call.
        group: the name of the call's group; None for all replicas of the run.
    """

    sequence_number: int
    call: str
    location: Location
    complete: bool
    group: str | None = None

    def __str__(self) -> str:
        where = "" if self.group is None else f" of {self.group}"
        state = "" if self.complete else "   open"
        return f"#{self.sequence_number}{where}  {self.call}   {full_place(self.location)}{state}"


class RunRecord:
    """The last collectives of one run's replicas, at the time when the record was taken; see `Recorder`.

    Attributes:
        devices: the replicas' devices, by id; over several workers those of this worker.
        in_progress: whether the run was in progress when the record was taken.
    """

    def __init__(self, ledger: Ledger, devices: Sequence[str], *, in_progress: bool) -> None:
        self._ledger = ledger
        self.devices: tuple[str, ...] = tuple(devices)
        self.in_progress: bool = in_progress
        if in_progress:
            _ = self._groups  # recorded now; those of a run that has ended no longer change

    @cached_property
    def _groups(self) -> list[GroupRecord]:
        return [group.record() for group in self._ledger.groups()]

    def calls(self, replica_id: int) -> tuple[RecordedCall, ...]:
        """Return the last collectives of a replica, at most 256 in each group, newest last.

        Those of the run come first, then those of each group that is still in use.

        Args:
            replica_id: the replica's id.

        Raises:
            IndexError: this process has no such replica.
        """
        ids = [replica.id for replica in self._ledger.replicas]
        if replica_id not in ids:
            raise IndexError(f"replica_id must be from {ids[0]} to {ids[-1]}, got {replica_id}")
        return tuple(call for group in self._groups for call in _calls(group, replica_id)[-HISTORY:])

    def __str__(self) -> str:
        last = grouped((self.calls(replica.id)[-_SHOWN:], replica.id) for replica in self._ledger.replicas)
        state = "in progress" if self.in_progress else "ended"
        lines = [f"run of {count(len(self.devices), 'replica')}, {state}"]
        for calls, members in last.items():
            lines.append(f"  {ids_briefly(members)}{'' if calls else ': no collective yet'}")
            lines += [f"    {call}" for call in calls]
        return "\n".join(lines)


def _calls(group: GroupRecord, replica_id: int) -> list[RecordedCall]:
    label, everyone = group.label(), len(group.key[0])
    slots = [(slot, True) for slot in group.history if slot.number >= 0]
    slots += [(slot, len(slot.posts) == 1 and len(slot.posts[0][1]) == everyone) for slot in group.unfinished]
    posts = ((slot.number, slot.post_of(replica_id), complete) for slot, complete in slots)
    return [
        RecordedCall(number, str(post.call), post.location, complete, label)
        for number, post, complete in posts
        if post is not None
    ]


class RecordedRuns:
    """The runs that a strategy's `Recorder` shows."""

    def __init__(self) -> None:
        self.running: dict[Ledger, Sequence[str]] = {}  # in the order in which they began, with the replicas' devices
        self.last: RunRecord | None = None

    def begin(self, ledger: Ledger, devices: Sequence[str]) -> None:
        """Record a run from now on."""
        self.running[ledger] = devices

    def end(self, ledger: Ledger, devices: Sequence[str]) -> None:
        """Note that a run has ended."""
        del self.running[ledger]
        self.last = RunRecord(ledger, devices, in_progress=False)


class Recorder:
    """The last 256 collectives of every replica in a strategy's runs; see `Strategy.recorder`.

    It is always on. Print it, or read its records:

    >>> strategy = MirroredStrategy(["CPU:0"])
    >>> strategy.recorder.last is None
    True
    """

    def __init__(self, runs: RecordedRuns) -> None:
        self._runs = runs

    @property
    def running(self) -> tuple[RunRecord, ...]:
        """A record of each run in progress, as it is now, in the order in which they began."""
        runs = list(self._runs.running.items())  # copied at once, because runs begin and end in other threads
        return tuple(RunRecord(ledger, devices, in_progress=True) for ledger, devices in runs)

    @property
    def last(self) -> RunRecord | None:
        """A record of the last run that ended, also by an error; None before the first."""
        return self._runs.last

    def __str__(self) -> str:
        records = [*self.running, *([self.last] if self.last is not None else [])]
        return "\n".join(map(str, records)) or "no run yet"


for _public in (RecordedCall, RunRecord, Recorder):
    _public.__module__ = "aiodist"
