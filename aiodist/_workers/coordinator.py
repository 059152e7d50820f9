"""The coordinator: worker 0's part in failures and in making groups, as a state machine without connections or clock.

A worker in trouble sends its snapshot. The coordinator asks the others for theirs, which they send once their replicas
have settled, as on one machine. When all have answered, or the time for that is up, the snapshots are merged and
analysed as one, and every worker gets the same report. It ends the strategy; any later message is answered with it.

A group with members on several workers needs a communicator. Each of these workers asks for one when all its members
have posted the group's first collective. When all workers have asked, each is sent a tag, in the same order for all
groups, so that no two workers wait for each other in the creation of two communicators. Nobody has entered the engine
before that, so a member that never posts leaves an ordinary incomplete collective. A program may make a group in every
run, so communicators are used again: the k-th group of certain workers in a run, by the order of tags, gets the k-th
communicator that these workers have for groups of the run's channel.
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
from aiodist._core.text import error_line
from aiodist._workers.layout import Layout
from aiodist._workers.messages import Ask, GroupTag, Lost, Message, OpenGroup, Query, Report, Stalled, Trouble, Waiting

PATIENCE_SECONDS: Final = 5.0
"""How long workers have to answer an `Ask`, until `Coordinator.conclude` is called."""

Sent: TypeAlias = Iterator[tuple[tuple[int, ...], Message]]
"""Messages, each with the ranks of its receivers."""


class Coordinator:
    """Collects what the workers report, and decides how the strategy ends.

    Attributes:
        outcome: the error that all workers raise, once it is known.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._everyone = tuple(range(layout.workers))
        self._troubles: dict[int, dict[int, Trouble]] = {}  # by run in trouble, by worker
        self._waiting: defaultdict[int, dict[int, Snapshot]] = defaultdict(dict)  # likewise, while nothing is wrong
        self._opened: Counter[tuple[int, GroupKey]] = Counter()  # how many workers have asked for a group's tag
        self._tags = count()
        self.outcome: Report | Lost | None = None

    @property
    def is_analysing(self) -> bool:
        """Whether some workers have yet to report on a run in trouble."""
        return bool(self._troubles)

    def take(self, rank: int, message: Message) -> Sent:
        """Take a message from a worker; yield the answers."""
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
                yield from self._take_trouble(rank, message)
            case Waiting():
                yield from self._take_waiting(rank, message)

    def _all_but(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in self._everyone if other != rank)

    def _take_trouble(self, rank: int, trouble: Trouble) -> Sent:
        run = trouble.run
        if run not in self._troubles:
            self._troubles[run] = {}
            at_once = trouble.overdue is not None  # the report is on where the others are now
            yield self._all_but(rank), Ask(run) if at_once else Ask(run, trouble.group, trouble.number)
        self._troubles[run][rank] = trouble
        if len(self._troubles[run]) == self._layout.workers:
            yield from self.conclude(run)

    def _take_waiting(self, rank: int, message: Waiting) -> Sent:
        """Check whether replicas of several workers wait for each other, or for one that has ended.

        The snapshots are of different moments, but a cycle in them is real. A replica that does nothing but wait
        continues only when another member posts. The first of the cycle to continue would need a post of the next,
        which has itself been waiting; what that posted before stands in its snapshot. And a replica that has ended
        without a collective never makes it.
        """
        run = message.run
        if run in self._troubles:
            return
        if not message.is_answer:
            self._waiting[run].clear()  # what is open in older snapshots may be complete by now; all are queried
        self._waiting[run][rank] = message.snapshot
        merged = merge(self._waiting[run].values())
        if find_cycle(merged) or cannot_complete(merged):
            self._troubles[run] = {}
            yield self._everyone, Ask(run)
        elif not message.is_answer:
            yield self._all_but(rank), Query(run)

    def conclude(self, run: int) -> Sent:
        """Analyse what the workers have reported on a run, and send everyone the result, unless that is done."""
        troubles = self._troubles.get(run)
        if troubles is not None:
            failures = (failure for rank in sorted(troubles) for failure in troubles[rank].failures)
            yield from self._end(Report(report_of(troubles, self._layout), next(failures, "")))

    def lose(self, rank: int, why: str) -> Sent:
        """End the strategy because a worker is gone, unless it has reported its trouble before."""
        if self.outcome is None and not any(rank in troubles for troubles in self._troubles.values()):
            yield from self._end(Lost(rank, why))

    def give_up(self, error: Exception) -> Sent:
        """End the strategy because this coordinator has failed."""
        yield from self._end(Lost(0, f"has given up: {error_line(error)}"))

    def _end(self, outcome: Report | Lost) -> Sent:
        self.outcome = outcome
        self._troubles.clear()
        yield self._everyone, outcome


class Relay(Coordinator):
    """Takes the coordinator's place on the other workers: it passes messages between worker 0 and this one."""

    def take(self, rank: int, message: Message) -> Sent:
        """Pass to this worker what comes from worker 0 or concerns it, and anything else to worker 0."""
        yield (self._layout.rank if rank == 0 else 0,), message

    def lose(self, rank: int, why: str) -> Sent:
        """Tell this worker that worker 0 is gone."""
        yield (self._layout.rank,), Lost(rank, why)


def report_of(troubles: Mapping[int, Trouble], layout: Layout) -> CollectiveReport:
    """Return the report on a run, from what the workers have reported on it by rank."""
    ranks, names = sorted(troubles), layout.names
    silent = [rank for rank in range(layout.workers) if rank not in troubles]
    overdue = next((troubles[rank].overdue for rank in ranks if troubles[rank].overdue is not None), None)
    snapshots = [troubles[rank].snapshot for rank in ranks]
    snapshots += [not_begun(layout, rank, snapshots[0].order_check) for rank in silent]
    merged = merge(snapshots)
    merged = replace(merged, replicas=tuple(replace(each, device=names[each.replica_id]) for each in merged.replicas))
    is_awaited = any(group.open or group.join is not None for group in merged.groups)
    report = analyse(merged, overdue=overdue) if overdue is not None or is_awaited else _nothing_awaited(merged)
    notes = [failure for rank in ranks for failure in troubles[rank].failures]
    notes += [f"Worker {rank}: {troubles[rank].note}" for rank in ranks if troubles[rank].note]
    notes += [f"Worker {rank} has reported nothing." for rank in silent]
    return replace(report, text="\n".join([report.text, *notes])) if notes else report


def not_begun(layout: Layout, rank: int, order_check: OrderCheck) -> Snapshot:
    """Return the snapshot of a worker that has not begun a run, or of which nothing is known."""
    facts = [ReplicaFacts(i, layout.names[i]) for i in layout.ids[rank]]
    return Ledger(layout.ids[rank], order_check, total=layout.replicas).snapshot(facts)


def _nothing_awaited(merged: Snapshot) -> CollectiveReport:
    """Return the report on a run in which replicas have failed and none waits in a collective."""
    left = {member.replica_id for group in merged.groups for member in group.members if member.abandoned is not None}
    ended = {each.replica_id: each for each in merged.replicas if each.end is not None or each.replica_id in left}
    gone = ", ".join(f"replica {i} on {each.device} {each.end or 'was cancelled'}" for i, each in ended.items())
    replicas = tuple(
        ReplicaReport(each.replica_id, each.device, each.end or ReplicaState.RUNNING) for each in merged.replicas
    )
    number = min((member.sequence for member in merged.groups[0].members), default=0)
    suspects = tuple(i for i, each in ended.items() if each.end is not ReplicaState.EXITED) or tuple(ended)
    text = f"the run ended early: {gone or 'a worker gave up'}"
    return CollectiveReport(Reason.EXITED, number, replicas, suspects, text)
