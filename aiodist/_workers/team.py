"""The team: this worker's part in a strategy on several workers, in its runs, and in calls outside of replicas.

A `Team` has the strategy's communicator, its connection to the coordinator, and the driver that runs steps. Calls
outside of replicas (opening a run, reduce, gather, creating a variable) have an order and a `Session` of their own, and
are checked like replicas' collectives: the caller posts for all local replicas (`Outside`).

A `Span` connects a run, or the calls outside of replicas, to the other workers. Each run has a channel, a communicator
that no other run uses at the same time; when a run is opened, the workers choose the first one that is free on all of
them. The run tells its span which slots are matched locally and which groups are in trouble; the span completes slots
and fails the run. A group with members on several workers gets a communicator at its first collective, once the
coordinator says that all its workers have reached that.

**Trouble.** Whatever goes wrong, here or elsewhere, leads to one message to the coordinator (`Span.report`), once the
local replicas have settled. A differing record, a replica's own exception and a timeout are found here; the coordinator
announces everything else. From the call in trouble on, no more records are contributed. Earlier steps are carried out
as usual, so that every worker's replicas get as far as they would on one machine.

A report, a lost worker or an engine's error ends the strategy: it ends everything in progress, and all later calls
raise it.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import anyio
import numpy as np

from aiodist._arrays.environment import stall_seconds
from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives import kinds
from aiodist._core.analysis import error_of
from aiodist._core.call import Call, OrderCheck, Post, path_of
from aiodist._core.errors import CollectiveError, StallWarning, WorkerLostError
from aiodist._core.ledger import Group, Ledger, Path, Slot
from aiodist._core.report import CollectiveReport, ReplicaReport
from aiodist._core.snapshot import GroupKey, Overdue, ReplicaFacts, Snapshot
from aiodist._core.terms import Reason, ReplicaState
from aiodist._core.text import error_line, ids
from aiodist._workers.coordinator import not_begun
from aiodist._workers.driver import Driver
from aiodist._workers.exchange import Agreed, Moving, accumulate_of, contributed, flags_of
from aiodist._workers.layout import Layout
from aiodist._workers.messages import (
    OUTSIDE,
    Ask,
    GroupTag,
    Lost,
    Message,
    OpenGroup,
    Query,
    Report,
    Stalled,
    Trouble,
    Waiting,
)
from aiodist._workers.record import callers_of, digest_of, resolved
from aiodist._workers.session import Route, Session
from aiodist._workers.transport import OF_VALUES, Communicator, Steps, as_bytes
from aiodist_kernels import ReduceOp

if TYPE_CHECKING:
    from aiodist._runtime.rendezvous import Rendezvous
    from aiodist._runtime.scheduler import Run

Move = Callable[[Agreed], Steps[Any]]
_CHANNELS: Final = 64
_MOST_KEPT: Final = 1024


class Control(Protocol):
    """The connection to the coordinator."""

    def send(self, message: Message) -> None:
        """Send a message to the coordinator; from any thread."""

    def close(self) -> None:
        """Leave the other workers; if an error ends this one, tell them which."""


class Team:
    """This worker's part in a strategy. ``connect`` makes its connection to the coordinator.

    Attributes:
        order_check: how calls are compared.
        driver: runs steps.
        moving: moves the values of collectives.
        outside: the calls outside of replicas.
        error: what has ended the strategy, if anything.
    """

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        connect: Callable[[Team], Control],
        order_check: OrderCheck = OrderCheck.CALL_SITE,
        *,
        ordered: bool = False,
    ) -> None:
        self.layout = layout
        self.order_check = order_check
        self.communicator = communicator
        self.driver = Driver(self._failed)
        self.moving = Moving(layout, ordered=ordered)
        self.error: CollectiveError | None = None
        self._spans: weakref.WeakValueDictionary[int, Span] = weakref.WeakValueDictionary()
        self._asked: dict[int, Ask] = {}  # by run, of runs that have not begun here
        self._channels: dict[int, Communicator] = {}
        self._free = np.ones(_CHANNELS, np.uint8)  # 1: this worker does not use the channel
        self._groups: dict[tuple[int, tuple[int, ...], int], Communicator] = {}
        self.outside = Outside(self)
        self.control = connect(self)

    def check(self) -> None:
        """Raise what has ended the strategy, if anything."""
        self.driver.carry_out_calls()
        if self.error is not None:
            raise _anew(self.error)

    async def awaited(self, pending: Pending, seconds: float | None = None) -> Any:
        """Return the result of a call outside of replicas, which all workers must make within ``seconds``."""
        limits = [(stall_seconds(), self.outside.warn), (seconds or 0.0, self.outside.expire)]
        waited = 0.0
        try:
            for limit, tell in sorted((each for each in limits if each[0]), key=itemgetter(0)):
                if not pending.complete:
                    with anyio.move_on_after(limit - waited):
                        await self.driver.until(lambda: pending.complete)
                    waited = limit
                if not pending.complete:
                    tell(pending, limit)
            await self.driver.until(lambda: pending.complete)
        finally:
            self.outside.abandon(pending)  # unless it is complete
        return pending.result()

    def outcome(self, steps: Steps[Any], done: Callable[[Any, Exception | None], object]) -> Steps[None]:
        """Move values; pass on the result, or an error that every worker gets."""
        self.driver.moving += 1  # so that the driver polls more
        result, failure = None, None
        try:
            result = yield from steps
        except OF_VALUES as error:
            failure = error
        finally:
            self.driver.moving -= 1
        done(result, failure)

    # Runs.

    def enter(self, run: int, span: Span) -> None:
        """Register a run that has been opened."""
        self._spans[run] = span
        asked = self._asked.pop(run, None)
        if self.error is not None:
            span.fail(self.error)
        elif asked is not None:
            span.receive(asked)

    def choose_channel(self) -> Steps[tuple[int, Communicator]]:
        """Return the first channel that is free on all workers, with its number; make it if it is new."""
        free = np.empty_like(self._free)
        yield self.communicator.iallreduce(ReduceOp.MIN, self._free, free)
        if not free.any():
            raise RuntimeError(f"a strategy has at most {_CHANNELS} runs at a time")
        number = int(free.argmax())
        if number not in self._channels:  # the same on every worker, as they open runs in one order
            self._channels[number] = yield from self.communicator.dup()
        self._free[number] = 0
        return number, self._channels[number]

    def free_channel(self, number: int) -> None:
        """Let other runs use a channel."""
        self._free[number] = 1

    def communicator_of_group(self, key: tuple[int, tuple[int, ...], int], tag: int) -> Steps[Communicator]:
        """Return the communicator of a group; the key is its run's channel, its workers, and its number among such."""
        if key not in self._groups:
            self._groups[key] = yield from self.communicator.create_group(key[1], tag)
        return self._groups[key]

    def start(self, session: Session) -> None:
        """Let a session take its steps."""
        if not session.is_advancing:
            self.driver.start(session.advance())

    # Trouble.

    def _failed(self, error: Exception) -> None:
        """End the strategy by an error of the engine, which the other workers may not have."""
        text = f"has given up: {error_line(error)}"
        self.control.send(Lost(self.layout.rank, text))
        self.end(lost_worker(self.layout, self.layout.rank, text), error)

    def end(self, error: CollectiveError, cause: Exception | None = None) -> None:
        """End the strategy, and everything in progress."""
        if self.error is None:
            self.error = error
            error.__cause__ = cause
            self._fail_all(error)

    def _fail_all(self, error: CollectiveError) -> None:
        for span in list(self._spans.values()):
            span.fail(error)
        self.driver.notify()

    def post(self, message: Message) -> None:
        """Handle a message of the coordinator's in the strategy's thread; called from any thread."""
        self.driver.call(partial(self.receive, message))

    def receive(self, message: Message) -> None:
        """Handle a message of the coordinator's."""
        match message:
            case Report():
                self.end(error_of(message.report), RuntimeError(message.cause) if message.cause else None)
            case Lost():
                self.end(lost_worker(self.layout, message.rank, message.why))
            case Stalled():
                if self.driver.waiting_seconds >= stall_seconds() / 2:
                    warn_of_stall(message.text, resolved(message.file), message.line)
            case Ask() | Query() | GroupTag():
                span = self._spans.get(message.run)
                if span is not None:
                    span.receive(message)
                elif isinstance(message, Ask):
                    self._asked[message.run] = message
            case _:
                raise ValueError(f"the coordinator does not send a {type(message).__name__}")

    def answer_for(self, run: int, note: str = "") -> None:
        """Report on a run whose replicas have not settled, or that has not begun here; from any thread.

        A note says why the event loop cannot do it.
        """
        span = self._spans.get(run)  # read once, as the run may end meanwhile
        if self.error is not None or (span is not None and span.reported):
            return
        if span is None:
            self.control.send(Trouble(run, not_begun(self.layout, self.layout.rank, self.order_check), note=note))
        elif run != OUTSIDE and not note and self.driver.is_waited_for:  # the loop is running
            self.driver.call(span.report)
        else:
            span.report(note=note)

    def close(self) -> None:
        """Leave the other workers."""
        if self.error is None:
            self.error = _lost(self.layout, (), f"worker {self.layout.rank} has closed the strategy")
        self._fail_all(self.error)
        self.control.close()


# Calls.


class Pending(Slot):
    """A call outside of replicas."""

    move: Move  # moves its values, and returns the result
    value: Any = None  # the result, once complete

    @property
    def has_result(self) -> bool:
        """Whether it is complete without an error."""
        return self.complete and self.error is None

    def end(self, value: Any, error: BaseException | None) -> None:
        """Complete it with a value or an error, unless it is complete."""
        if not self.complete:
            self.value, self.error = value, error
            self.group.complete(self)

    def result(self) -> Any:
        """Return the result."""
        if self.error is not None:
            raise _anew(self.error)
        return self.value


class Span:
    """Connects a run, or the calls outside of replicas, to the other workers.

    Attributes:
        number: the run's number, or `OUTSIDE`.
        reported: this worker has reported trouble to the coordinator.
        is_over: all replicas of all workers have ended.
        error: what has ended the strategy, if anything.
    """

    def __init__(self, team: Team, number: int, channel: int, communicator: Communicator, run: Run) -> None:
        self.number = number
        self.reported = self.is_over = self._finishing = self._left = False
        self.error: CollectiveError | None = None
        self._team = team
        self._run = run
        self._ledger = run.ledger
        self._channel = channel
        self._sessions: dict[GroupKey, Session] = {}
        self._waiting: dict[GroupKey, list[Rendezvous]] = {}  # of groups without a session
        self._tagged: Counter[tuple[int, ...]] = Counter()  # by workers, the number of their groups with tags
        self._doomed: dict[GroupKey, int] = {}  # of groups that do not exist here yet
        self._routes: dict[Hashable, Route] = {}
        self._blocked: tuple[int, ...] = ()
        self._seen: Any = None
        self._root = self._new_session(run.ledger.root, f"run {number}", communicator)
        team.enter(number, self)

    def _new_session(self, group: Group, name: str, communicator: Communicator) -> Session:
        made = self._sessions[group.key] = Session(name, communicator, self, weakref.ref(group))
        return made

    def _session_of(self, group: Group) -> Session | None:
        return self._root if group is self._ledger.root else self._sessions.get(group.key)  # a key has all members' ids

    # Called by the run.

    def matched(self, slot: Rendezvous) -> None:
        """Agree with the other workers on a slot that is complete here; move its values."""
        group = slot.group
        session = self._root if group is self._ledger.root else self._sessions.get(group.key)  # `_session_of`, inlined
        if session is not None:
            self._post(session, slot)
            return
        key = group.key
        if key not in self._waiting:
            self._waiting[key] = []
            self._team.control.send(OpenGroup(self.number, key, self._team.layout.workers_of(key[0])))
        self._waiting[key].append(slot)

    def _post(self, session: Session, slot: Rendezvous) -> None:
        if slot is slot.group.joining:
            session.join()
        else:
            key = session, id(slot.call), id(slot.code), slot.offset, slot.path, slot.options.accumulate
            route = self._routes.get(key) or self._new_route(key, session, slot)
            values = None if slot.absent else contributed(slot)  # now, because a run that fails empties its slots
            session.post(route, slot, values)
        if not session.is_advancing:
            self._team.driver.start(session.advance())

    def call(self, route: Route, slot: Pending) -> None:
        """Agree with the other workers on a call outside of replicas; carry it out."""
        self._root.post(route, slot)
        self._team.start(self._root)

    def _new_route(self, key: Hashable, session: Session, slot: Rendezvous) -> Route:
        if len(self._routes) >= _MOST_KEPT:
            self._routes.clear()
        order_check = self._team.order_check
        post = slot.post_of(0)
        counts = order_check is OrderCheck.CALL_SITE and post.call.name is None
        made = self._routes[key] = Route(
            digest_of(order_check, post),
            flags_of(slot.options),
            session.site((slot.code, slot.offset)) if counts else None,
            callers_of(post),
            *self._team.moving.ways(session, slot),
            (slot.call, slot.code),
        )
        return made

    def made(self, group: Group) -> None:
        """Note a new group with members on other workers."""
        if group.key in self._doomed:
            self._run.doom(group, self._doomed.pop(group.key))

    def report_group(self, group: Group, overdue: Overdue | None) -> None:
        """Report a group in trouble, once its local members have settled."""
        self.report(group=group, overdue=overdue)

    def stuck(self, replica_ids: Collection[int]) -> None:
        """Report local replicas that only wait, if nothing has changed since the last call."""
        seen = tuple(sorted(replica_ids)), self._ledger.progress()
        if seen == self._seen:
            self._report_waiting(replica_ids)
        self._seen = seen

    async def finish(self, failures: Mapping[int, BaseException]) -> None:
        """Wait for the other workers at the end of the run."""
        self.end(failures)
        await self._team.driver.until(lambda: self.is_settled)

    def end(self, failures: Mapping[int, BaseException]) -> None:
        """Note that all local replicas have ended."""
        self._finishing = True
        ledger = self._ledger
        if failures or ledger.doomed_groups or any(replica.end != "exited" for replica in ledger.replicas):
            self.report(failures=failures)
        else:
            self._root.end()
            self._team.start(self._root)

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to come from other workers."""
        failed = any(replica.end == "failed" for replica in self._ledger.replicas)
        return self.is_over or self.error is not None or (self.reported and self._finishing and failed)

    def abandon(self) -> None:
        """Report that the run's caller was cancelled, and with it the local replicas."""
        self._finishing = True
        if not self.is_over:
            self.report()

    def leave(self) -> None:
        """Free the channel, if possible: nobody waits in the run any more, and its loop may be gone."""
        self._left = True
        if (
            self.is_over
            and not (self.reported or self._waiting)
            and all(each.is_idle for each in self._sessions.values())
        ):
            self._team.free_channel(self._channel)

    # Steps.

    def move(self, session: Session, route: Route, slot: Any, flags: int, prepared: Any) -> Steps[None] | None:
        """See `Carrier.move`."""
        small = route.small
        if small is not None:
            try:
                self._run.complete(slot, small.take(slot, flags), None)
            except OF_VALUES as error:
                self._run.complete(slot, None, error)
            return None
        moving, done = self._team.moving, partial(self._run.complete, slot)
        if isinstance(slot, Pending):
            steps = slot.move(Agreed(session.communicator, accumulate_of(flags), moving))
        elif slot.request.kind is kinds.MERGE_CALL:
            self._team.driver.call(partial(self._start_merge, slot))  # in a task, as only tasks can start others
            return None
        else:
            steps = moving.move(session, slot, flags, prepared)
        return self._team.outcome(steps, done)

    def _start_merge(self, slot: Rendezvous) -> None:
        if slot.values:  # else the run has failed, or is over
            self._run.start_merge(slot)

    def move_without_some(self, session: Session, slot: Rendezvous | None) -> Steps[None]:
        """See `Carrier.move_without_some`."""
        done = partial(self._run.complete, slot) if slot is not None else lambda *_: None
        return self._team.outcome(self._team.moving.gather(session, slot), done)

    def finish_join(self, session: Session) -> Steps[None]:
        """See `Carrier.finish_join`."""
        group = session.of()
        slot = group.joining
        last = slot.values[0] if slot.values else group.members[-1].rank
        own = np.array([group.number_of_join(), last], np.int64)
        everyone = np.empty((session.communicator.size, 2), np.int64)
        yield session.communicator.iallgather(as_bytes(own), as_bytes(everyone))
        number, last = max(everyone.tolist())
        self._run.finish_join(slot, number, last)

    def _open_session(self, tag: GroupTag) -> Steps[None]:
        """Make a group's communicator and session, as all its workers do now."""
        group = self._waiting[tag.group][0].group
        workers = self._team.layout.workers_of(group.key[0])
        key = self._channel, workers, self._tagged[workers]
        self._tagged[workers] += 1
        communicator = yield from self._team.communicator_of_group(key, tag.tag)
        made = Post(Call("new_group", members=group.key[0], name=group.key[1]), path_of([group.made_at or (None, 0)]))
        creation = digest_of(self._team.order_check, made)  # the same on all workers, which make it at one place
        session = self._new_session(group, f"run {self.number} group {tag.group} {creation:x}", communicator)
        if self.reported:
            session.freeze()
        for slot in self._waiting.pop(tag.group):
            self._post(session, slot)

    def over(self) -> None:
        """See `Carrier.over`."""
        self.is_over = True

    # Trouble.

    def diverged(self, session: Session) -> None:
        """See `Carrier.diverged`; the local replicas settle before this worker reports."""
        self._doom(session.of(), session.number)

    def receive(self, message: Ask | Query | GroupTag) -> None:
        """Handle a message of the coordinator's."""
        match message:
            case Ask():
                self._answer(message)
            case Query() if self._is_well:  # else its event loop may be gone
                self._report_waiting(self._run.deadlocked_replicas(), is_answer=True)
            case GroupTag() if message.group in self._waiting:
                self._team.driver.start(self._open_session(message))

    def _answer(self, ask: Ask) -> None:
        """Report on the run, because another worker is in trouble, once the local replicas have settled."""
        group = next((each for each in self._ledger.groups() if each.key == ask.group), None)
        if ask.group is None or ask.number is None or self._finishing:
            self.report()
        elif group is not None:
            self._doom(group, ask.number)
        elif self._ledger.replicas and set(self._team.layout.own).isdisjoint(ask.group[0]):
            self.report()
        else:  # the group does not exist here yet; if it never does, `Team.answer_for` answers
            self._doomed[ask.group] = ask.number

    def _doom(self, group: Group, number: int) -> None:
        session = self._session_of(group)
        if session is not None:
            session.freeze(number)
        if self._finishing:
            self.report(group=group)
        elif not self.reported:
            self._run.doom(group, number)

    @property
    def _is_well(self) -> bool:
        """Whether the run continues, and nothing is wrong here."""
        return not self.reported and not self.is_over and self.error is None

    def _report_waiting(self, replica_ids: Collection[int], *, is_answer: bool = False) -> None:
        """Tell the coordinator which local replicas wait, if nothing is wrong here."""
        self._blocked = tuple(sorted(replica_ids))
        if self._is_well:
            self._team.control.send(Waiting(self.number, self._run.snapshot(blocked=self._blocked), is_answer))

    def report(
        self,
        *,
        group: Group | None = None,
        overdue: Overdue | None = None,
        failures: Mapping[int, BaseException] | None = None,
        note: str = "",
    ) -> None:
        """Report trouble to the coordinator, once; from any thread."""
        if self.reported or self.error is not None:
            return
        self.reported = True
        key, number = (None, None) if group is None else (group.key, group.doomed)
        if overdue is not None:
            number = overdue.number
        session = None if group is None else self._session_of(group)
        if session is not None and number is not None:
            session.freeze(number)
        found = tuple(f"Replica {i} raised {error_line(error)}" for i, error in (failures or {}).items())
        snapshot = self._run.snapshot(blocked=self._blocked)
        self._team.control.send(Trouble(self.number, snapshot, key, number, overdue, found, note))

    def fail(self, error: CollectiveError) -> None:
        """End everything in progress by the error that has ended the strategy."""
        if not self.is_over and self.error is None:
            self.error = error
            for session in self._sessions.values():
                session.freeze()
            if not self._left:
                self._run.fail(error)


class Outside:
    """The calls outside of replicas, which all workers make in the same order.

    Its span sees it as a run without groups, merges and joins.
    """

    def __init__(self, team: Team) -> None:
        layout = team.layout
        self.ledger = Ledger(layout.own, team.order_check, total=layout.replicas, slot_type=Pending)
        self._team = team
        self._span = Span(team, OUTSIDE, 0, team.communicator, cast("Run", self))

    def begin(
        self, call: Call, code: Any, offset: int, path: Path, options: CommunicationOptions, move: Move
    ) -> Pending:
        """Begin a call: post it for all local replicas.

        ``move`` moves its values, once all workers have agreed on it, and returns the result.
        """
        self._team.check()
        group = self.ledger.root
        slot, *_ = [group.post(member, call, code, offset, path) for member in group.members]  # the same for all
        assert isinstance(slot, Pending)
        slot.move = move
        slot.waiters = list(group.members)
        route = Route(digest_of(self._team.order_check, slot.post_of(0)), flags_of(options))
        self._span.call(route, slot)
        return slot

    def abandon(self, pending: Pending) -> None:
        """Abandon a call whose caller was cancelled, unless it is complete."""
        if not pending.complete:
            for member in pending.group.members:
                pending.group.abandon(member, pending)
            self._span.report_group(pending.group, None)

    def warn(self, pending: Pending, seconds: float) -> None:
        """Warn that the other workers have not made a call."""
        layout, post = self._team.layout, pending.first
        warn_of_stall(
            f"worker {layout.rank} of {layout.workers} has waited {seconds:.3g} s for the others to come to "
            f"{post.call} (AIODIST_STALL_SECONDS sets the time, 0 turns this off)",
            post.location.file,
            post.location.line,
        )

    def expire(self, pending: Pending, seconds: float) -> None:
        """Report a call that the other workers have not made in time."""
        self._span.report_group(pending.group, Overdue(pending.group.key, pending.number, seconds))

    # Called by the span.

    def complete(self, slot: Pending, result: Any, error: BaseException | None) -> None:
        """Complete a call."""
        slot.end(result, error)
        self.doom(slot.group)

    def doom(self, group: Group, number: int | None = None) -> None:
        """Doom a call, if a number is given; report trouble once all calls before the doomed one are complete."""
        if number is not None:
            group.doom(number)
        if group.doomed is not None and min(group.open, default=group.members[0].sequence) >= group.doomed:
            self._span.report_group(group, None)

    def snapshot(self, **_: Any) -> Snapshot:
        """Return the snapshot of the calls."""
        names = self._team.layout.names
        return self.ledger.snapshot([ReplicaFacts(each.id, names[each.id]) for each in self.ledger.replicas])

    def fail(self, error: CollectiveError) -> None:
        """Fail all calls in progress."""
        for slot in list(self.ledger.root.slots()):
            assert isinstance(slot, Pending)
            slot.end(None, error)


# Errors and warnings.


def _anew(error: BaseException) -> BaseException:
    """Return a new error, so that each caller has a traceback of its own."""
    if not isinstance(error, CollectiveError):
        return error
    found = type(error)(error.report)
    found.__cause__ = error.__cause__
    return found


def warn_of_stall(text: str, file: str, line: int) -> None:
    """Warn of a stall, at a place in the program."""
    try:
        warnings.warn_explicit(text, StallWarning, file or "aiodist", line)
    except Exception:  # noqa: BLE001  (a filter that makes warnings errors must not end the wait)
        logging.getLogger("aiodist").error(text)  # noqa: TRY400  (the traceback says nothing)


def lost_worker(layout: Layout, rank: int, why: str) -> WorkerLostError:
    """Return the error for a lost worker."""
    gone = layout.ids[rank]
    return _lost(layout, gone, f"worker {rank} of {layout.workers} {why}; it had {ids(gone)}")


def _lost(layout: Layout, gone: Sequence[int], text: str) -> WorkerLostError:
    states = [ReplicaState.FAILED if i in gone else ReplicaState.RUNNING for i in range(layout.replicas)]
    replicas = tuple(map(ReplicaReport, range(layout.replicas), layout.names, states))
    return WorkerLostError(CollectiveReport(Reason.WORKER_LOST, 0, replicas, tuple(gone), text))
