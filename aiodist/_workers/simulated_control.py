"""The control connection of workers in one process: calls, by way of JSON. A test decides who is lost, and when."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from aiodist._workers.coordinator import Coordinator
from aiodist._workers.layout import Layout
from aiodist._workers.messages import Ask, Message, decode, encode

if TYPE_CHECKING:
    from aiodist._workers.team import Team

_ANSWER_SECONDS: Final = 1.0


class SimulatedSwitchboard:
    """What the control connections of all workers of a strategy share.

    Args:
        layout: the workers' replicas.
    """

    def __init__(self, layout: Layout) -> None:
        self._coordinator = Coordinator(layout)
        self._teams: dict[int, weakref.ref[Team]] = {}
        self._early: dict[int, list[Message]] = {}
        self._lost: set[int] = set()
        self._timers: list[threading.Timer] = []
        self._lock = threading.RLock()

    def listen(self, rank: int, team: Team) -> None:
        """Connect a worker."""
        with self._lock:
            self._teams[rank] = weakref.ref(team)
            for message in self._early.pop(rank, ()):
                team.post(message)

    def take(self, rank: int, message: Message) -> None:
        """Take what a worker tells the coordinator."""
        with self._lock:
            if rank not in self._lost:
                self._send(self._coordinator.take(rank, decode(encode(message))))

    def lose(self, rank: int, why: str) -> None:
        """Let a worker be lost, and say how: it has died, or is cut off, say. It hears that it has lost the others."""
        with self._lock:
            if rank not in self._lost:
                self._send(self._coordinator.lose(rank, why))
                self._lost.add(rank)

    def _send(self, sent: Iterable[tuple[int, Message]]) -> None:
        known: dict[int, Message] = {}
        for rank, message in sent:
            if id(message) not in known:
                known[id(message)] = decode(encode(message))
            team = self._teams[rank]() if rank in self._teams else None
            if team is not None:
                team.post(known[id(message)])
            elif rank not in self._teams:
                self._early.setdefault(rank, []).append(known[id(message)])
        for run in {message.run for message in known.values() if isinstance(message, Ask)}:
            timer = threading.Timer(_ANSWER_SECONDS, self._answer_for_all, (run,))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)
        if self._coordinator.outcome is not None:
            for timer in self._timers:
                timer.cancel()

    def _answer_for_all(self, run: int) -> None:
        """Tell of a run in the place of workers that have not begun it, or whose replicas have not settled."""
        for found in list(self._teams.values()):
            team = found()
            if team is None:
                with self._lock:
                    self._send(self._coordinator.conclude(run))
            elif team.owes_answer(run):
                if team.may_answer(run):
                    team.driver.call(partial(team.answer_for, run))
                else:
                    team.answer_for(run)


class SimulatedControl:
    """One worker's connection."""

    def __init__(self, switchboard: SimulatedSwitchboard, rank: int) -> None:
        self._switchboard = switchboard
        self._rank = rank

    def listen(self, team: Team) -> None:
        """Pass messages on to this team from now on, without keeping it."""
        self._switchboard.listen(self._rank, team)

    def send(self, message: Message) -> None:
        """Tell the coordinator something."""
        self._switchboard.take(self._rank, message)

    def close(self, why: str = "") -> None:
        """Leave."""
        self._switchboard.lose(self._rank, why or "has ended")
