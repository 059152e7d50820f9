"""The coordinator: worker 0's part in trouble and in making groups, as a state machine without connections or clock.

A worker that is in trouble sends its snapshot. The coordinator asks the others for theirs; each lets its replicas
settle first, as on one machine, and sends it. When all have, or when the rest have had their time, the snapshots are
merged and analysed as one, and every worker gets the same report. That ends the strategy, so there is one report, and
whoever comes to the coordinator after that gets it, too.

A group whose members live on several workers needs a communicator of its own. Each of these workers asks for one when
all its members have made the group's first collective; when all have asked, all are given a tag, in one order for all
groups, so that none waits in the making of one communicator for another that waits in the making of the next. Nobody
has entered the engine before: a member that never comes makes an ordinary incomplete collective. A program may make a
group in every run, so communicators of earlier runs are used again: the k-th group of some workers in a run, in the
order of these tags, has the k-th communicator that they have for groups of the run's channel.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Final, TypeAlias

from aiodist._core.analysis import analyse, cannot_complete, find_cycle
from aiodist._core.call import OrderCheck
from aiodist._core.ledger import Ledger
from aiodist._core.report import CollectiveReport, ReplicaReport
from aiodist._core.snapshot import GroupKey, ReplicaFacts, Snapshot, merge
from aiodist._core.terms import Reason, ReplicaState
from aiodist._core.text import brief
from aiodist._workers.layout import Layout
from aiodist._workers.messages import Ask, GroupTag, Lost, Message, OpenGroup, Query, Report, Stalled, Trouble, Waiting

PATIENCE_SECONDS: Final = 5.0
"""How long the others have to answer an `Ask`; whoever keeps the time calls `Coordinator.conclude` then."""

Sent: TypeAlias = Iterator[tuple[tuple[int, ...], Message]]
"""Messages, each behind the ranks of the workers that it is for."""


class Coordinator:
    """Hears all workers.

    Attributes:
        outcome: what all workers raise, once that is known.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._cases: dict[int, dict[int, Trouble]] = {}  # by run in trouble, by worker
        self._waiting: defaultdict[int, dict[int, Snapshot]] = defaultdict(dict)
        self._opened: Counter[tuple[int, GroupKey]] = Counter()  # by run, how many workers have asked for a group's
        self._tags = count()
        self.outcome: Report | Lost | None = None

    @property
    def is_analysing(self) -> bool:
        """Whether a run is in trouble that some workers have not reported yet."""
        return bool(self._cases)

    def take(self, rank: int, message: Message) -> Sent:
        """Take a worker's message; yield the answers."""
        match message:
            case OpenGroup(run, group, workers):
                self._opened[run, group] += 1
                if self._opened[run, group] == len(workers):
                    del self._opened[run, group]
                    yield workers, GroupTag(run, group, next(self._tags))
            case Stalled():
                yield self._all_but(rank), message
            case _ if self.outcome is not None:
                yield (rank,), self.outcome
            case Lost():
                yield from self.lose(rank, message.why)
            case Trouble():
                yield from self._hear(rank, message)
            case Waiting():
                yield from self._hear_of_waiting(rank, message)

    # Trouble.

    def _hear(self, rank: int, part: Trouble) -> Sent:
        if part.run not in self._cases:
            self._cases[part.run] = {}
            at_once = part.overdue is not None  # where others are now is the point, not where they would get to
            yield self._all_but(rank), Ask(part.run) if at_once else Ask(part.run, part.group, part.number)
        parts = self._cases[part.run]
        parts[rank] = part
        if len(parts) == self._layout.workers:
            yield from self.conclude(part.run)

    def _all_but(self, *but: int) -> tuple[int, ...]:
        return tuple(other for other in range(self._layout.workers) if other not in but)

    def conclude(self, run: int) -> Sent:
        """Analyse what the workers have reported of a run, and send everyone the result, unless that is done."""
        parts = self._cases.get(run)
        if parts is None or self.outcome is not None:
            return
        failures = (each for rank in sorted(parts) for each in parts[rank].failures)
        yield from self._end(Report(report_of(parts, self._layout), next(failures, "")))

    def _end(self, outcome: Report | Lost) -> Sent:
        self.outcome = outcome
        self._cases.clear()
        yield self._all_but(), outcome

    def lose(self, rank: int, why: str) -> Sent:
        """Note that a worker is gone. One that reported its trouble before it ended is ignored."""
        if self.outcome is None and not any(rank in parts for parts in self._cases.values()):
            yield from self._end(Lost(rank, why))

    def give_up(self, error: Exception) -> Sent:
        """End the strategy for all: this coordinator has failed itself."""
        yield from self._end(Lost(0, f"has given up: {brief(error)}"))

    # Replicas that wait for each other, or for one that has ended.

    def _hear_of_waiting(self, rank: int, message: Waiting) -> Sent:
        """Look whether replicas of several workers wait for ever.

        The snapshots are of different moments. Still, a cycle in them is one: a replica that does nothing but wait goes
        on only when another member posts, and the first of the cycle to go on would need a post of the next, which
        waits itself since before; a post from before that stands in the next one's snapshot. And a replica that has
        ended without a collective never makes it.
        """
        run = message.run
        if run in self._cases:
            return
        if not message.is_answer:
            self._waiting[run].clear()  # older snapshots may show as open what is complete by now; all are asked anew
        self._waiting[run][rank] = message.snapshot
        whole = merge(self._waiting[run].values())
        if find_cycle(whole) or cannot_complete(whole):
            self._cases[run] = {}
            yield self._all_but(), Ask(run)
        elif not message.is_answer:
            yield self._all_but(rank), Query(run)


# What the parts say together.


def report_of(parts: Mapping[int, Trouble], layout: Layout) -> CollectiveReport:
    """Return what the workers' parts of a run say together."""
    ranks, names = sorted(parts), layout.names
    silent = [rank for rank in range(layout.workers) if rank not in parts]
    overdue = next((parts[rank].overdue for rank in ranks if parts[rank].overdue is not None), None)
    snapshots = [parts[rank].snapshot for rank in ranks]
    snapshots += [not_begun(layout, rank, snapshots[0].order_check) for rank in silent]
    whole = merge(snapshots)
    whole = replace(whole, replicas=tuple(replace(each, device=names[each.replica_id]) for each in whole.replicas))
    somebody_waits = any(group.open or group.join is not None for group in whole.groups)
    report = analyse(whole, overdue=overdue) if overdue is not None or somebody_waits else _nobody_waits(whole)
    notes = [each for rank in ranks for each in parts[rank].failures]
    notes += [f"Worker {rank}: {parts[rank].note}" for rank in ranks if parts[rank].note]
    notes += [f"Worker {rank} has told nothing." for rank in silent]
    return replace(report, text="\n".join([report.text, *notes])) if notes else report


def not_begun(layout: Layout, rank: int, order_check: OrderCheck) -> Snapshot:
    """Return the snapshot of a worker that has not begun a run, or of which nothing is known."""
    facts = [ReplicaFacts(i, layout.names[i]) for i in layout.ids[rank]]
    return Ledger(layout.ids[rank], order_check, total=layout.replicas).snapshot(facts)


def _nobody_waits(whole: Snapshot) -> CollectiveReport:
    """Return the report on replicas that wait for nothing, while others have failed."""
    left = {member.replica_id for group in whole.groups for member in group.members if member.abandoned is not None}
    ended = {each.replica_id: each for each in whole.replicas if each.end is not None or each.replica_id in left}
    gone = ", ".join(f"replica {i} on {each.device} {each.end or 'was cancelled'}" for i, each in ended.items())
    replicas = tuple(
        ReplicaReport(each.replica_id, each.device, each.end or ReplicaState.RUNNING) for each in whole.replicas
    )
    number = min((member.sequence for member in whole.groups[0].members), default=0)
    suspects = tuple(i for i, each in ended.items() if each.end is not ReplicaState.EXITED) or tuple(ended)
    text = f"the run ended before its end: {gone or 'a worker gave up'}"
    return CollectiveReport(Reason.EXITED, number, replicas, suspects, text)
