"""The control plane of simulated workers: calls within one process. A test decides who is lost, and when."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller

from aiodist.vocabulary.options import OrderCheck
from aiodist.workers.layout import Layout
from aiodist.workers.state import WorkerState
from aiodist.workers.tribunal import Coordinator, LaneKey, Listener, Request, Verdict


class SimulatedSwitchboard:
    """What the control planes of all simulated workers of a strategy share."""

    def __init__(self, layout: Layout, order_check: OrderCheck) -> None:
        self._listeners: dict[int, Listener] = {}
        self._early: dict[int, list[Callable[[Listener], object]]] = {}
        self._lost: dict[int, str] = {}
        self._coordinator = Coordinator(layout, order_check, self._ask, self._tell)

    def listen(self, rank: int, listener: Listener) -> None:
        """Connect a worker."""
        self._listeners[rank] = listener
        for lost, why in self._lost.items():
            listener.lose(lost, why)
        for call in self._early.pop(rank, ()):
            call(listener)

    def report(self, rank: int, key: LaneKey, state: WorkerState) -> None:
        """Take a worker's part."""
        if rank not in self._lost:
            self._coordinator.heard(rank, key, state)

    def book(self, rank: int, request: Request) -> None:
        """Take what a worker asks for or tells of groups."""
        if rank not in self._lost:
            for to, reply in self._coordinator.take(rank, request):
                self._call(to, methodcaller("booked", reply))

    def lose(self, rank: int, why: str) -> None:
        """Let a worker be lost: the others hear of it, and it hears that it has lost them."""
        self._lost[rank] = why
        for other, listener in list(self._listeners.items()):
            if other != rank:
                listener.lose(rank, why)

    def _ask(self, rank: int, key: LaneKey, trouble: int | None) -> None:
        self._call(rank, methodcaller("asked", key, trouble))

    def _tell(self, rank: int, key: LaneKey, verdict: Verdict) -> None:
        self._call(rank, methodcaller("judged", key, verdict))

    def _call(self, rank: int, call: Callable[[Listener], object]) -> None:
        """Call a worker, which may not have used its strategy yet: as soon as it does."""
        if rank in self._lost:
            return
        if rank in self._listeners:
            call(self._listeners[rank])
        else:
            self._early.setdefault(rank, []).append(call)


class SimulatedControl:
    """One simulated worker's control plane."""

    def __init__(self, switchboard: SimulatedSwitchboard, rank: int) -> None:
        self._switchboard = switchboard
        self._rank = rank

    def listen(self, listener: Listener) -> None:
        """Call this listener from now on."""
        self._switchboard.listen(self._rank, listener)

    def report(self, key: LaneKey, state: WorkerState) -> None:
        """Tell the coordinator of a lane."""
        self._switchboard.report(self._rank, key, state)

    def book(self, request: Request) -> None:
        """Ask the coordinator for something, or tell it, of groups."""
        self._switchboard.book(self._rank, request)

    def settle(self, key: LaneKey) -> None:
        """Do nothing: there is no engine that must be brought to an end."""

    def close(self) -> None:
        """Leave."""
        self._switchboard.lose(self._rank, "has ended")
