"""What a trace comes to: collectives by kind and call site, who waited, and who was waited for.

Replicas of one event loop take turns, so one of them always comes last, be it the last in turn. Who comes last is
counted; whom the others waited for is judged by the time that each took from its last collective to its call of the
next. The replica that took longest is the straggler of that collective, and what it took beyond the median replica
held each of the others up by as much as that one stood still.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from aiodist.tools.tracing.reading import TracedCollective, TracedRun, TraceFile


@dataclass(slots=True)
class SiteRow:
    """The collectives of one call site. Times are in seconds, summed over the replicas."""

    kind: str
    at: str
    call: str
    count: int = 0
    nbytes: int = 0
    wait_seconds: float = 0.0
    largest_wait_seconds: float = 0.0


@dataclass(slots=True)
class ReplicaRow:
    """One replica. Times are in seconds.

    Attributes:
        replica: its id.
        device: its device.
        collectives: how many it took part in.
        last: in how many of them it came last.
        own_seconds: what it took between its collectives.
        wait_seconds: how long it waited for others.
        held_up_seconds: how long it held up the others, summed over them.
    """

    replica: int
    device: str
    collectives: int = 0
    last: int = 0
    own_seconds: float = 0.0
    wait_seconds: float = 0.0
    held_up_seconds: float = 0.0


@dataclass(slots=True)
class Statistics:
    """What a trace comes to.

    Attributes:
        sites: by total wait, largest first.
        replicas: by how long they held up the others, longest first.
    """

    sites: list[SiteRow]
    replicas: list[ReplicaRow]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return asdict(self)


def count_up(trace: TraceFile) -> Statistics:
    """Return the statistics of a trace."""
    sites: dict[tuple[str, str], SiteRow] = {}
    rows: dict[int, ReplicaRow] = {}
    for devices in trace.devices.values():
        for replica, device in devices.items():
            rows.setdefault(replica, ReplicaRow(replica, device))
    progress = {number: _Progress(run) for number, run in trace.runs.items()}
    for collective in trace.collectives:
        _count_site(sites, collective)
        _count_replicas(rows, collective)
        progress[collective.run].take_turns(collective, rows)
    by_wait = sorted(sites.values(), key=lambda row: (-row.wait_seconds, row.at))
    by_held_up = sorted(rows.values(), key=lambda row: (-row.held_up_seconds, -row.last, row.replica))
    return Statistics(by_wait, by_held_up)


def _count_site(sites: dict[tuple[str, str], SiteRow], collective: TracedCollective) -> None:
    key = collective.kinds[0], collective.places[0]
    row = sites.get(key)
    if row is None:
        row = sites[key] = SiteRow(*key, collective.calls[0])
    row.count += 1
    row.nbytes += sum(collective.nbytes)
    row.wait_seconds += sum(collective.waits) / 1e6
    row.largest_wait_seconds = max(row.largest_wait_seconds, max(collective.waits) / 1e6)


def _count_replicas(rows: dict[int, ReplicaRow], collective: TracedCollective) -> None:
    for replica, wait in zip(collective.replicas, collective.waits, strict=True):
        row = rows[replica]
        row.collectives += 1
        row.wait_seconds += wait / 1e6
    if collective.error is None:
        rows[collective.last].last += 1


class _Progress:
    """Where the replicas of a run are: when each last called and went on, and how late it then was."""

    def __init__(self, run: TracedRun) -> None:
        size = 1 + max(run.started, default=-1)
        self._called = np.full(size, run.begin)
        for replica, started in run.started.items():
            self._called[replica] = started
        self._resumed = self._called.copy()
        self._late = self._called - run.begin

    def take_turns(self, collective: TracedCollective, rows: dict[int, ReplicaRow]) -> None:
        """Find out how long each replica took to come to a collective, and whom that held up."""
        who = np.array(collective.replicas)
        issued = np.array(collective.issued)
        resumed = self._resumed[who]
        since = np.where(resumed <= issued, np.maximum(resumed, self._called[who]), self._called[who])
        own = np.maximum(0.0, issued - since)
        completed = collective.completed
        stood_still = np.maximum(0.0, completed - issued) + np.where(resumed <= issued, self._late[who], 0.0)
        for replica, took in zip(collective.replicas, own.tolist(), strict=True):
            rows[replica].own_seconds += took / 1e6
        if len(who) > 1 and collective.error is None:
            slowest = int(own.argmax())
            beyond = float(own[slowest] - np.median(own))
            stood_still[slowest] = 0.0
            rows[collective.replicas[slowest]].held_up_seconds += float(np.minimum(stood_still, beyond).sum()) / 1e6
        self._called[who] = issued
        self._resumed[who] = collective.resumed
        self._late[who] = np.maximum(0.0, np.array(collective.resumed) - completed)
