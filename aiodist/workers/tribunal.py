"""The tribunal: one worker, the coordinator, hears what all workers have to tell of a lane, and judges once for all.

A worker that has found something wrong reports its part. The coordinator asks the others for theirs; each lets its
replicas run until they have shown what they do, as on one machine, and reports in turn. When all have, or when those
that have not have had their time, there is one verdict, and every worker raises it. It ends the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from aiodist._core.call import OrderCheck
from aiodist._core.errors import CollectiveError, CollectiveTimeoutError, IncompleteCollectiveError
from aiodist._core.report import CollectiveReport, Reason, ReplicaReport, ReplicaState
from aiodist.collective import cycles, verdict
from aiodist.collective.group import SyncGroup
from aiodist.workers import lane_book
from aiodist.workers.lane_book import LaneBook
from aiodist.workers.layout import Layout
from aiodist.workers.parts import WholePart, first_in_trouble, overdue_in, whole_parts
from aiodist.workers.standstill import Standstills, TellWaits, Waits, standing_of
from aiodist.workers.state import Failure, WorkerState, first_overdue, whole_group

LaneKey: TypeAlias = tuple[int, int]
Request: TypeAlias = lane_book.Request | Waits
"""What a worker asks for or tells of groups while all goes well."""
Reply: TypeAlias = lane_book.Reply | TellWaits

PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What every worker raises.

    Attributes:
        kind: the error's class.
        report: its report.
        failures: what replicas raised on their own.
    """

    kind: type[CollectiveError]
    report: CollectiveReport
    failures: tuple[Failure, ...]

    def error(self) -> CollectiveError:
        """Return the error, caused by what a replica elsewhere raised, if one did."""
        error = self.kind(self.report)
        for failure in self.failures:
            error.__cause__ = error.__cause__ or failure.error
        return error


class Listener(Protocol):
    """A worker, as the control plane calls it, in the worker's event loop or not."""

    def asked(self, key: LaneKey, trouble: int | None) -> None:
        """Report what there is to tell of a lane, in which that meeting cannot complete, as far as it is known."""

    def judged(self, key: LaneKey, verdict: Verdict) -> None:
        """Hear the verdict on a lane."""

    def booked(self, reply: Reply) -> None:
        """Hear what the coordinator replies of groups."""

    def lose(self, rank: int, why: str) -> None:
        """Hear that a worker is gone."""

    def cut(self, one: int, other: int) -> None:
        """Hear that two workers do not reach each other."""

    def call_soon_threadsafe(self, fn: Callable[..., object], *args: Any) -> None:
        """Call a function in the worker's event loop; now, where none runs."""

    def warn_in_time(self) -> None:
        """Warn, in the event loop, of an operation outside of replicas that has waited for long."""


class Control(Protocol):
    """The control plane, as a worker uses it."""

    def listen(self, listener: Listener) -> None:
        """Call this listener from now on."""

    def report(self, key: LaneKey, state: WorkerState) -> None:
        """Tell the coordinator of a lane."""

    def book(self, request: Request) -> None:
        """Ask the coordinator for something, or tell it, of groups."""

    def strand(self, key: LaneKey) -> None:
        """Hear that what is in flight of a lane will never be complete."""

    def give_up(self, why: str) -> None:
        """Leave the others for a reason, which ends the strategy, without waiting for them."""

    def close(self) -> None:
        """Tell the others that this worker ends, and leave."""

    def let_go(self) -> None:
        """Leave without waiting: the strategy is gone, and nobody has closed it."""


@dataclass(slots=True)
class _Case:
    states: dict[int, WorkerState] = field(default_factory=dict)
    standing: Collection[int] = ()


class Coordinator:
    """The one that judges.

    Args:
        layout: the workers' replicas.
        order_check: what call sites are compared by.
        ask: asks a worker for its part, and says which meeting cannot complete, if that is known.
        tell: tells a worker the verdict.
        origin: what to say of where the workers have made the strategy, if it is to be said.
    """

    def __init__(
        self,
        layout: Layout,
        order_check: OrderCheck,
        ask: Callable[[int, LaneKey, int | None], None],
        tell: Callable[[int, LaneKey, Verdict], None],
        origin: str = "",
    ) -> None:
        self._layout = layout
        self._order_check = order_check
        self._ask = ask
        self._tell = tell
        self._origin = origin
        self._cases: dict[LaneKey, _Case] = {}
        self._over = False
        self._book = LaneBook(layout.workers)
        self._standstills = Standstills(layout, order_check)

    @property
    def pending(self) -> list[LaneKey]:
        """The lanes that are not judged yet."""
        return list(self._cases)

    def heard(self, rank: int, key: LaneKey, state: WorkerState) -> None:
        """Take a worker's part."""
        if self._over:
            return
        case = self._cases.get(key)
        if case is None:
            case = self._cases[key] = _Case()
            case.states[rank] = state
            for other in range(self._layout.workers):
                if other != rank:
                    self._ask(other, key, state.trouble)
        case.states[rank] = state
        if key in self._cases and len(case.states) == self._layout.workers:
            self.conclude(key)

    def take(self, rank: int, request: Request) -> Iterator[tuple[int, Reply]]:
        """Take what a worker asks for or tells of groups; yield replies, and whom they are for."""
        if not isinstance(request, Waits):
            yield from self._book.take(rank, request)
            return
        key = request.run
        if key in self._cases or self._over:
            return
        standing, to_ask = self._standstills.hear(rank, request)
        yield from to_ask
        if standing:
            self._cases[key] = _Case(standing=standing)
            for worker in range(self._layout.workers):
                self._ask(worker, key, None)

    def conclude(self, key: LaneKey) -> None:
        """Judge a lane by what has been told, and tell everyone."""
        case = self._cases[key]
        self._over = True
        self._cases.clear()
        found = judge(case.states, self._layout, self._order_check, case.standing)
        if self._origin:
            found = replace(found, report=with_lines(found.report, [self._origin]))
        for rank in range(self._layout.workers):
            self._tell(rank, key, found)


def judge(
    states: Mapping[int, WorkerState],
    layout: Layout,
    order_check: OrderCheck,
    standing: Collection[int] = (),
) -> Verdict:
    """Return the verdict on what the workers have told.

    Args:
        states: that, by rank.
        layout: the workers' replicas.
        order_check: what call sites are compared by.
        standing: replicas that can never go on.
    """
    group = whole_group(states, layout.devices, layout.names, order_check)
    parts = whole_parts(states, group)
    failures = tuple(failure for rank in sorted(states) for failure in states[rank].failures)
    error = _error(group, parts, states, standing)
    return Verdict(type(error), _with_notes(error.report, states), failures)


def _error(
    root: SyncGroup, parts: Sequence[WholePart], states: Mapping[int, WorkerState], standing: Collection[int]
) -> CollectiveError:
    """Return the error of the group that is in trouble: the run's own, or the first of the others."""
    overdue = first_overdue(root, states)
    late = overdue_in(parts) if overdue is None else (root, overdue)
    if late is not None:
        return verdict.judge(*late)
    groups = [root, *parts]
    found = first_in_trouble(groups)
    circle = standing_of(groups, standing) if found is None else set()
    if circle:
        return cycles.error_of(root, cycles.waits_in(groups), circle)
    if any(member.end is not None for member in root.members):
        groups = [group for group in groups if _lacks_somebody(group)]  # the others wait for the verdict alone
    found = found or next((group for group in groups if any(number >= 0 for number in group.open)), None)
    found = found or next((group for group in groups if group.open), None)
    if found is None:
        return _nobody_waits(root)
    error = verdict.judge(found)
    failed = any(state.failures for state in states.values())
    # with nobody missing from it, and no time limit, it was agreed on, and then an engine failed some of the workers
    return _nobody_waits(root) if failed and isinstance(error, CollectiveTimeoutError) else error


def _lacks_somebody(group: SyncGroup) -> bool:
    return any(not member.arrived_at(number) for number in group.open for member in group.members)


def _nobody_waits(group: SyncGroup) -> CollectiveError:
    """Return the error for replicas that wait for nothing yet, while others have failed."""
    ended = [member for member in group.members if member.end is not None]
    gone = ", ".join(f"replica {m.replica_id} on {m.device} {m.end}" for m in ended) or "a worker gave up"
    replicas = tuple(
        ReplicaReport(m.replica_id, m.device, m.end or ReplicaState.RUNNING, stack=m.stack()) for m in group.members
    )
    number = min((member.sequence for member in group.members), default=0)
    report = CollectiveReport(
        Reason.EXITED, number, replicas, tuple(m.replica_id for m in ended), f"the run ended before its end: {gone}"
    )
    return IncompleteCollectiveError(report)


def _with_notes(report: CollectiveReport, states: Mapping[int, WorkerState]) -> CollectiveReport:
    """Add what replicas have raised, and what workers have to note."""
    failures = [(each.replica_id, each.text) for rank in sorted(states) for each in states[rank].failures]
    notes = [f"Replica {replica_id} raised {text}" for replica_id, text in failures]
    notes += [f"Worker {rank}: {states[rank].note}" for rank in sorted(states) if states[rank].note]
    return with_lines(report, notes) if notes else report


def with_lines(report: CollectiveReport, lines: Sequence[str]) -> CollectiveReport:
    """Return a report with more lines behind its text."""
    text = "\n".join([report.text, *lines])
    return CollectiveReport(report.reason, report.sequence_number, report.replicas, report.suspects, text)
