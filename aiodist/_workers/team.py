"""The team: this worker's part in a strategy on several workers, and what is called outside of replicas.

A `Team` has the strategy's communicator, its connection to the coordinator, and the driver that carries steps out. What
it does outside of replicas (a run's opening, reduce, gather, a variable's creation) has one order, a `Session` of its
own, and is checked as replicas' collectives are: this worker's caller posts for all local replicas. Each run has a
`RunSpan` (module `span`), over a channel that no other run uses at the same time; at the opening, all workers choose
the first that each has free.

Whatever ends the strategy (a report, a lost worker, the engine's own error) ends all that is under way, and is raised
by all that is called after it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import anyio
import numpy as np

from aiodist._arrays.environment import stall_seconds
from aiodist._core.analysis import error_of
from aiodist._core.call import Call, OrderCheck
from aiodist._core.errors import CollectiveError, StallWarning, WorkerLostError
from aiodist._core.ledger import Ledger, Path, Slot
from aiodist._core.report import CollectiveReport, ReplicaReport
from aiodist._core.snapshot import Overdue, ReplicaFacts
from aiodist._core.terms import Reason, ReplicaState
from aiodist._core.text import brief, ids
from aiodist._workers.coordinator import not_begun
from aiodist._workers.driver import Driver
from aiodist._workers.exchange import Agreed, Moving, accumulate_of
from aiodist._workers.layout import Layout
from aiodist._workers.messages import OUTSIDE, Ask, GroupTag, Lost, Message, Query, Report, Stalled, Trouble
from aiodist._workers.record import FLOAT64, NO_FLAGS, Found, digest_of, resolved
from aiodist._workers.session import Carrier, Route, Session, Step
from aiodist._workers.transport import OF_VALUES, Communicator, Steps
from aiodist_kernels import ReduceOp

Move = Callable[[Agreed], Steps[Any]]
_CHANNELS: Final = 64


class Control(Protocol):
    """The connection to the coordinator."""

    def send(self, message: Message) -> None:
        """Tell the coordinator something; from any thread."""

    def close(self, why: str = "") -> None:
        """Tell the others that this worker ends, or leaves them for a reason, and leave."""


class Pending(Slot):
    """A call outside of replicas, until all workers have it."""

    move: Move  # moves its values, and returns the result
    value: Any = None  # the result, once it is complete without an error

    @property
    def has_result(self) -> bool:
        """Whether the result is there, and no error."""
        return self.complete and self.error is None

    def end(self, value: Any, error: BaseException | None) -> None:
        """Note that it is complete, with its value, or with an error; unless that is known."""
        if not self.complete:
            self.value, self.error = value, error
            self.group.complete(self)

    def result(self) -> Any:
        """Return the result."""
        if self.error is not None:
            raise _anew(self.error)
        return self.value


def _anew(error: BaseException) -> BaseException:
    """Return an error of its own for each caller's traceback."""
    if not isinstance(error, CollectiveError):
        return error
    found = type(error)(error.report)
    found.__cause__ = error.__cause__
    return found


class Team:
    """This worker's part in a strategy; what comes over the connection, that ``connect`` makes, is passed on to it.

    Attributes:
        order_check: what calls are compared by.
        driver: carries steps out.
        moving: moves the values of collectives.
        error: what has ended the strategy; None while all is well.
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
        self.outside = Outside(self)
        self._carriers: WeakValueDictionary[int, Carrier] = WeakValueDictionary({OUTSIDE: self.outside})
        self._asked: dict[int, Ask] = {}
        self._channels: dict[int, Communicator] = {}
        self._free = np.ones(_CHANNELS, np.uint8)  # which channels this worker does not use
        self._groups: dict[tuple[int, tuple[int, ...], int], Communicator] = {}
        self.control = connect(self)

    def check(self) -> None:
        """Check that the strategy can be used."""
        self.driver.carry_out_calls()
        if self.error is not None:
            raise _anew(self.error)

    async def awaited(self, pending: Pending, seconds: float | None = None) -> Any:
        """Wait for a call outside of replicas, for which the others have so many seconds; return its result."""
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
        """Move values for which all workers have come; tell the result, or the error that every worker has."""
        self.driver.moving += 1  # it is worth while to ask again and again
        result, failure = None, None
        try:
            result = yield from steps
        except OF_VALUES as error:
            failure = error
        finally:
            self.driver.moving -= 1
        done(result, failure)

    # Runs.

    def enter(self, run: int, carrier: Carrier) -> None:
        """Know a run, from its opening on."""
        self._carriers[run] = carrier
        asked = self._asked.pop(run, None)
        if self.error is not None:
            carrier.fail(self.error)
        elif asked is not None:
            carrier.receive(asked)

    def choose_channel(self) -> Steps[tuple[int, Communicator]]:
        """Return the first communicator that all workers have free, with its number; make one where there is none."""
        free = np.empty_like(self._free)
        yield self.communicator.iallreduce(ReduceOp.MIN, self._free, free)
        if not free.any():
            raise RuntimeError(f"a strategy has at most {_CHANNELS} runs at a time")
        number = int(free.argmax())
        if number not in self._channels:  # the same on every worker: channels are made in the order of openings
            self._channels[number] = yield from self.communicator.dup()
        self._free[number] = 0
        return number, self._channels[number]

    def free_channel(self, number: int) -> None:
        """Let other runs have a channel: this worker's part of what used it is over."""
        self._free[number] = 1

    def communicator_of_group(self, key: tuple[int, tuple[int, ...], int], tag: int) -> Steps[Communicator]:
        """Return the communicator of a group by its run's channel, its workers, and which of such groups it is."""
        if key not in self._groups:
            self._groups[key] = yield from self.communicator.create_group(key[1], tag)
        return self._groups[key]

    # What goes wrong.

    def start(self, session: Session) -> None:
        """Take what steps a session has."""
        if not session.is_advancing:
            self.driver.start(session.advance())

    def _failed(self, error: Exception) -> None:
        """End the strategy with an error in its steps, which is the engine's and may be one worker's alone."""
        text = f"has given up: {brief(error)}"
        self.control.send(Lost(self.layout.rank, text))
        lost = lost_worker(self.layout, self.layout.rank, text)
        lost.__cause__ = error
        self.end(lost)

    def end(self, error: CollectiveError) -> None:
        """End the strategy, with all that is under way."""
        if self.error is None:
            self.error = error
            self._fail_all(error)

    def _fail_all(self, error: CollectiveError) -> None:
        for carrier in list(self._carriers.values()):
            carrier.fail(error)
        self.driver.notify()

    def post(self, message: Message) -> None:
        """Take what the coordinator tells; from any thread."""
        self.driver.call(partial(self.receive, message))

    def receive(self, message: Message) -> None:
        """Take what the coordinator tells, in the thread that uses the strategy."""
        match message:
            case Report():
                error = error_of(message.report)
                error.__cause__ = next((RuntimeError(failure) for failure in message.failures), None)
                self.end(error)
            case Lost():
                self.end(lost_worker(self.layout, message.rank, message.why))
            case Stalled():
                if self.driver.waiting_seconds >= stall_seconds() / 2:
                    warn_of_stall(message.text, resolved(message.file), message.line)
            case Ask() | Query() | GroupTag():
                carrier = self._carriers.get(message.run)
                if carrier is not None:
                    carrier.receive(message)
                elif isinstance(message, Ask):
                    self._asked[message.run] = message
            case _:
                raise ValueError(f"the coordinator does not send a {type(message).__name__}")

    def answer_for(self, run: int, note: str = "") -> None:
        """Tell of a run in trouble whose replicas have not settled, or that is not begun here; from any thread.

        A note says why the event loop, which would be asked otherwise, does not answer.
        """
        carrier = self._carriers.get(run)  # once: the run may end meanwhile, in its own thread
        if self.error is not None or (carrier is not None and carrier.told):
            return
        if carrier is None:
            self.control.send(Trouble(run, not_begun(self.layout, self.layout.rank, self.order_check), note=note))
        elif run != OUTSIDE and not note and self.driver.is_waited_for:  # the loop turns
            self.driver.call(carrier.tell)
        else:
            carrier.tell(note=note)

    def close(self, why: str = "") -> None:
        """Leave the other workers."""
        if self.error is None:
            self.error = _lost(self.layout, (), f"worker {self.layout.rank} has closed the strategy")
        self._fail_all(self.error)
        self.control.close(why)


class Outside(Carrier):
    """What is called outside of replicas, in the order in which all workers call it."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._tell_at: int | None = None
        layout = team.layout
        self._ledger = Ledger(layout.own, team.order_check, total=layout.replicas, slot_type=Pending)
        self.session = Session("outside", team.communicator, self)

    def begin(self, call: Call, code: Any, offset: int, path: Path, move: Move, *, float64: bool = False) -> Pending:
        """Post a call for all local replicas; the steps that it takes are carried out from now on.

        ``move`` moves its values, once all workers have agreed on it, and returns the result.
        """
        team = self._team
        team.check()
        group = self._ledger.root
        slot, *_ = [group.post(member, call, code, offset, path) for member in group.members]  # one for all of them
        assert isinstance(slot, Pending)
        slot.move = move
        slot.waiters = list(group.members)  # which are all waited for here
        route = Route(digest_of(team.order_check, slot.post_of(0)))
        self.session.post(Step(route, slot, FLOAT64 if float64 else NO_FLAGS))
        team.start(self.session)
        return slot

    def abandon(self, pending: Pending) -> None:
        """Note that the caller was cancelled out of a call, unless it is complete."""
        if not pending.complete:
            for member in pending.group.members:
                pending.group.abandon(member, pending)
            self.tell(number=pending.number)

    def warn(self, pending: Pending, seconds: float) -> None:
        """Warn that the other workers do not come to a call."""
        layout, post = self._team.layout, pending.first
        warn_of_stall(
            f"worker {layout.rank} of {layout.workers} has waited {seconds:.3g} s for the others to come to "
            f"{post.call} (AIODIST_STALL_SECONDS sets the time, 0 turns this off)",
            post.location.file,
            post.location.line,
        )

    def expire(self, pending: Pending, seconds: float) -> None:
        """Note that the time is up in which the other workers were to make a call."""
        self.tell(number=pending.number, overdue=Overdue(self._ledger.root.key, pending.number, seconds))

    def move(self, session: Session, step: Step | None, found: Found, prepared: Any) -> Steps[None]:  # noqa: ARG002
        """Move the values of a call that all workers make."""
        assert step is not None
        pending: Pending = step.what
        agreed = Agreed(session.communicator, accumulate_of(found), self._team.moving)
        yield from self._team.outcome(pending.move(agreed), pending.end)
        if session.number + 1 == self._tell_at:
            self.tell()

    def diverged(self, session: Session) -> None:
        """Hear that the workers make different calls."""
        self.tell(number=session.number)

    def receive(self, message: Ask | Query | GroupTag) -> None:
        """Tell the coordinator what this worker calls, once it has come to a call that cannot be complete."""
        assert isinstance(message, Ask)
        self.session.freeze(message.number)
        if message.number is None or self.session.number >= message.number:
            self.tell()
        else:
            self._tell_at = message.number

    def tell(self, *, number: int | None = None, overdue: Overdue | None = None, note: str = "") -> None:
        """Tell the coordinator what this worker calls, once; from any thread."""
        if not self.told:
            self.told = True
            self.session.freeze(number)
            layout = self._team.layout
            snapshot = self._ledger.snapshot([ReplicaFacts(i, layout.names[i]) for i in layout.own])
            self._team.control.send(Trouble(OUTSIDE, snapshot, self._ledger.root.key, number, overdue, note=note))

    def fail(self, error: BaseException) -> None:
        """End all that is under way."""
        self.session.freeze()
        for slot in list(self._ledger.root.slots()):
            assert isinstance(slot, Pending)
            slot.end(None, error)


def warn_of_stall(text: str, file: str, line: int) -> None:
    """Warn of a wait, at a place."""
    try:
        warnings.warn_explicit(text, StallWarning, file or "aiodist", line)
    except Exception:  # noqa: BLE001  (a filter makes errors of warnings; who waits is not to be ended by that)
        logging.getLogger("aiodist").error(text)  # noqa: TRY400  (which has no place of its own to show)


def lost_worker(layout: Layout, rank: int, why: str) -> WorkerLostError:
    """Return the error for a worker that is gone."""
    gone = tuple(layout.ids[rank])
    return _lost(layout, gone, f"worker {rank} of {layout.workers} {why}; it had {ids(gone)}")


def _lost(layout: Layout, gone: tuple[int, ...], text: str) -> WorkerLostError:
    lost = set(gone)
    states = [ReplicaState.FAILED if i in lost else ReplicaState.RUNNING for i in range(layout.replicas)]
    replicas = tuple(map(ReplicaReport, range(layout.replicas), layout.names, states))
    return WorkerLostError(CollectiveReport(Reason.WORKER_LOST, 0, replicas, gone, text))
