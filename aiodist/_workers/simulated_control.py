"""The control connection of workers in one process: calls, by way of JSON. A test decides who is lost, and when."""

from __future__ import annotations

import threading

from aiodist._workers.coordinator import Coordinator, Sent
from aiodist._workers.layout import Layout
from aiodist._workers.messages import Ask, Message, decode, encode
from aiodist._workers.team import Team


class SimulatedSwitchboard:
    """What the control connections of all workers of a strategy share.

    Attributes:
        teams: the workers, by rank.
    """

    def __init__(self, layout: Layout, answer_seconds: float) -> None:
        self.teams: list[Team] = []
        self._coordinator = Coordinator(layout)
        self._answer_seconds = answer_seconds
        self._lost: set[int] = set()
        self._timers: list[threading.Timer] = []
        self._lock = threading.RLock()

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

    def _send(self, sent: Sent) -> None:
        for ranks, message in sent:
            received = decode(encode(message))
            for rank in ranks:
                self.teams[rank].post(received)
            if isinstance(message, Ask):
                timer = threading.Timer(self._answer_seconds, self._answer_for_all, (message.run,))
                timer.daemon = True
                timer.start()
                self._timers.append(timer)
        if self._coordinator.outcome is not None:
            for timer in self._timers:
                timer.cancel()

    def _answer_for_all(self, run: int) -> None:
        for team in self.teams:
            team.answer_for(run)


class SimulatedControl:
    """One worker's connection."""

    def __init__(self, switchboard: SimulatedSwitchboard, team: Team) -> None:
        self._switchboard = switchboard
        self._rank = team.layout.rank

    def send(self, message: Message) -> None:
        """Tell the coordinator something."""
        self._switchboard.take(self._rank, message)

    def close(self, why: str = "") -> None:
        """Leave."""
        self._switchboard.lose(self._rank, why or "has ended")

    def let_go(self) -> None:
        """Leave."""
        self.close()
