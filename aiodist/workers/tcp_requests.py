"""Requests to the coordinator of groups, its replies and its verdicts, over the connections of the control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodist.workers.peer import message
from aiodist.workers.tribunal import PATIENCE_SECONDS, Coordinator, LaneKey, Listener, Reply, Request, Verdict

if TYPE_CHECKING:
    from aiodist.workers.peer import Peer


class Requests:
    """What a control plane does of them; the rest of it is `TcpControl`."""

    _coordinator: Coordinator | None
    _peers: dict[int, Peer]
    _unfinished: list[object]

    def __init__(self) -> None:
        self._early: list[tuple[str, tuple[Any, ...]]] = []

    @property
    def _listener(self) -> Listener | None:
        raise NotImplementedError

    def _request(self, *request: Any) -> None:
        raise NotImplementedError

    def _put(self, peer: Peer, message: bytes) -> None:
        raise NotImplementedError

    def _later(self, seconds: float, *request: Any) -> None:
        raise NotImplementedError

    def book(self, request: Request) -> None:
        """Ask the coordinator for something, or tell it, of groups."""
        self._request("book", request)

    def _on_book(self, request: Request) -> None:
        if self._coordinator is not None:
            self._take_request(0, request)
        elif 0 in self._peers:
            self._put(self._peers[0], message("request", request))

    def _take_request(self, rank: int, request: Request) -> None:
        assert self._coordinator is not None
        known = self._coordinator.pending
        for to, reply in self._coordinator.take(rank, request):
            if to == 0:
                self._on_booked(reply)
            elif to in self._peers:
                self._put(self._peers[to], message("booked", reply))
        for key in self._coordinator.pending:
            if key not in known:
                self._later(PATIENCE_SECONDS, "conclude", key)

    def strand(self, key: LaneKey) -> None:
        """Hear that what is in flight of a lane will never be complete."""
        self._unfinished.append(("stranded", key))

    def _judged(self, key: LaneKey, verdict: Verdict) -> None:
        """Pass a verdict on, after which something may stay in the air for ever."""
        self._unfinished.append(("judged", key))
        self._call_listener("judged", key, verdict)

    def _on_booked(self, reply: Reply) -> None:
        self._call_listener("booked", reply)

    def _call_listener(self, name: str, *arguments: Any) -> None:
        """Call the worker; others may be ahead of it, who has not begun to listen: then as soon as it does."""
        listener = self._listener
        if listener is None:
            self._early.append((name, arguments))
        else:
            getattr(listener, name)(*arguments)

    def _call_early(self) -> None:
        while self._early:
            name, arguments = self._early.pop(0)
            self._call_listener(name, *arguments)
