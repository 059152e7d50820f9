"""The control plane of simulated workers: calls within one process. A test decides who is lost, and when."""

from __future__ import annotations

from aiodist._core.call import OrderCheck
from aiodist.workers.layout import Layout
from aiodist.workers.state import ReplicaPart, WorkerState
from aiodist.workers.tribunal import Coordinator, LaneKey, Listener, Request, Verdict


class SimulatedSwitchboard:
    """What the control planes of all simulated workers of a strategy share.

    A worker whose strategy has not been used yet does not listen. The others do not wait for what it has to tell; it
    hears what they have asked when it does.
    """

    def __init__(self, layout: Layout, order_check: OrderCheck) -> None:
        self._layout = layout
        self._unheard: dict[int, list[tuple[LaneKey, int | None]]] = {}
        self._listeners: dict[int, Listener] = {}
        self._lost: dict[int, str] = {}
        self._verdict: tuple[LaneKey, Verdict] | None = None
        self._coordinator = Coordinator(layout, order_check, self._ask, self._tell)

    def listen(self, rank: int, listener: Listener) -> None:
        """Connect a worker."""
        self._listeners[rank] = listener
        for lost, why in self._lost.items():
            listener.lose(lost, why)
        if self._verdict is not None:
            listener.judged(*self._verdict)
        for question in self._unheard.pop(rank, ()):
            listener.asked(*question)

    def report(self, rank: int, key: LaneKey, state: WorkerState) -> None:
        """Take a worker's part."""
        if rank not in self._lost:
            self._coordinator.heard(rank, key, state)

    def book(self, rank: int, request: Request) -> None:
        """Take what a worker asks for or tells of groups."""
        if rank not in self._lost:
            for to, reply in self._coordinator.take(rank, request):
                if to not in self._lost:
                    self._listeners[to].booked(reply)

    def lose(self, rank: int, why: str) -> None:
        """Let a worker be lost: the others hear of it, and it hears that it has lost them."""
        self.leave(rank, why)
        if rank in self._listeners:
            self._listeners[rank].lose(int(rank == 0), "cannot be reached")

    def leave(self, rank: int, why: str) -> None:
        """Let the others hear that a worker is there no more."""
        self._lost[rank] = why
        for other, listener in list(self._listeners.items()):
            if other != rank:
                listener.lose(rank, why)

    def _ask(self, rank: int, key: LaneKey, trouble: int | None) -> None:
        if rank in self._lost:
            return
        if rank in self._listeners:
            self._listeners[rank].asked(key, trouble)
        else:
            self._unheard.setdefault(rank, []).append((key, trouble))
            self._coordinator.heard(rank, key, self._unused(rank))

    def _unused(self, rank: int) -> WorkerState:
        """Return what there is to tell of a worker that does not listen yet."""
        replica = ReplicaPart(sequence=0, end=None, abandoned=None, abandoned_at=0, stack=())
        replicas = (replica,) * self._layout.counts[rank]
        return WorkerState(rank, replicas, note="its strategy has not been used yet")

    def _tell(self, rank: int, key: LaneKey, verdict: Verdict) -> None:
        self._verdict = key, verdict
        if rank not in self._lost and rank in self._listeners:
            self._listeners[rank].judged(key, verdict)


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

    def strand(self, key: LaneKey) -> None:
        """Do nothing: there is no engine that must be brought to an end."""

    def give_up(self, why: str) -> None:
        """Leave for a reason."""
        self._switchboard.leave(self._rank, why)

    def close(self) -> None:
        """Leave."""
        self._switchboard.leave(self._rank, "has ended")

    def let_go(self) -> None:
        """Do nothing: there is nothing that stays open."""
