"""The control plane of separate processes: a thread a worker, with TCP connections of its own to the first worker.

It works while the engine hangs and while the event loop is blocked. Every worker says every quarter of a second that
it lives. **Dead** is whose connection has ended without a farewell. **Stopped** is a silent process of which its
machine, or the agent beside it, says that it is (`Health`). **Cut off** is whose system does not acknowledge what is
sent to it: so a program that holds the interpreter lock for seconds is not taken for lost, since its system answers
for it.

Connections form a star: the first worker hears everyone and judges for all. A link that is cut between two others is
seen by those two, who keep a connection for that (`Links`), and tell.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import selectors
import socket
import threading
import time
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from aiodist._core.call import OrderCheck
from aiodist.workers import star
from aiodist.workers.addresses import Listening
from aiodist.workers.ending import ENDED, GAVE_UP, farewell_of, last_error, tell_of_echo
from aiodist.workers.health import Health
from aiodist.workers.joining import Hello, made_differently
from aiodist.workers.layout import Layout
from aiodist.workers.links import Links
from aiodist.workers.peer import Peer, message
from aiodist.workers.pulse import Pulse
from aiodist.workers.state import WorkerState
from aiodist.workers.tcp_requests import Requests
from aiodist.workers.tribunal import PATIENCE_SECONDS, Coordinator, LaneKey, Listener, Verdict

BEAT_SECONDS: Final = 0.25
LINK_BEAT_SECONDS: Final = 1.0
CUT_GRACE_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 0.5
FAREWELL_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 2.0
_BEAT: Final = message("beat")


class TcpControl(Requests):
    """A worker's control plane.

    Args:
        layout: the workers' replicas.
        order_check: what call sites are compared by.
        hellos: what the workers have told of themselves.
        listening: this worker's socket; one that has none keeps no links to others but the first.
        unfinished: gets an entry, a tuple, where something may never be complete, and one of another type for who is
            lost: the engine cannot be brought to an orderly end without all workers.
    """

    def __init__(
        self,
        layout: Layout,
        order_check: OrderCheck,
        hellos: Sequence[Hello],
        listening: Listening | None,
        unfinished: list[object],
    ) -> None:
        super().__init__()
        self._rank = layout.rank
        self._size = layout.workers
        self._own = frozenset(layout.places[layout.rank])
        self._unfinished = unfinished
        self._listening_ref: weakref.ref[Listener] | None = None
        self._pulse = Pulse()
        self._unsent: set[Peer] = set()
        self._to_forget: list[Peer] = []
        self._made: tuple[Verdict | None, bytes] = None, b""
        self._gone: dict[int, str] = {}
        self._cut: list[tuple[int, int]] = []
        self._requests: deque[tuple[Any, ...]] = deque()
        self._timers: list[tuple[float, tuple[Any, ...]]] = []
        self._leaving = False
        self._waking = threading.RLock()  # a garbage collection in here may let go
        self._left = threading.Event()
        self._process = os.getpid()
        origin = made_differently([hello.place for hello in hellos])
        self._coordinator = Coordinator(layout, order_check, self._ask, self._tell, origin) if self._rank == 0 else None
        self._peers = star.connected(self._rank, hellos, listening)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._links = Links(
            self._rank,
            hellos,
            None if listening is None or self._rank == 0 else listening.socket,
            self._selector,
            lambda rank, connection: self._request("link", rank, connection),
            lambda rank: self._handle("cut_off", self._rank, rank),
        )
        self._health = Health(
            hellos, star.numbers(self._peers), lambda rank, state: self._request("health", rank, state)
        )
        self._thread = threading.Thread(target=self._serve, name="aiodist control", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def _listener(self) -> Listener | None:
        """The worker, which this thread does not keep: where its strategy is dropped, so is it."""
        return None if self._listening_ref is None else self._listening_ref()

    # What the worker calls, in any thread.

    def listen(self, listener: Listener) -> None:
        """Call this listener from now on."""
        self._request("listen", listener)

    def report(self, key: LaneKey, state: WorkerState) -> None:
        """Tell the coordinator of a lane."""
        self._request("report", key, pickle.dumps(state))

    def give_up(self, why: str) -> None:
        """Tell the others why this worker leaves them, without waiting."""
        self._leave(why, True)

    def close(self) -> None:
        """Tell the others that this worker ends; give them time to hear of an error."""
        if os.getpid() != self._process:  # what the program has forked has no part in it
            return
        error = last_error()
        tell_of_echo(error, self._own)
        self._leave(farewell_of(error), error is not None)
        self._left.wait(LEAVE_SECONDS + BEAT_SECONDS)

    def let_go(self) -> None:
        """Leave without waiting: the strategy is gone, and nobody has closed it."""
        if os.getpid() != self._process:
            return
        self._leave(ENDED, False)
        warnings.warn(
            f"the strategy of worker {self._rank} of {self._size} was dropped with its connections open; call "
            "strategy.close() when it is needed no more",
            ResourceWarning,
            stacklevel=2,
        )

    def _leave(self, why: str, wait: bool) -> None:
        atexit.unregister(self.close)
        if not self._leaving:
            self._request("leave", why, wait)

    def _request(self, *request: Any) -> None:
        self._requests.append(request)
        with contextlib.suppress(OSError), self._waking:
            self._wake_writer.send(b"\0")

    # The thread.

    def _serve(self) -> None:
        selector = self._selector
        selector.register(self._wake_reader, selectors.EVENT_READ, self._awake)
        for peer in self._peers.values():
            selector.register(peer.connection, selectors.EVENT_READ, partial(self._receive, peer))
        next_beat = next_link_beat = time.monotonic()
        while not self._may_leave():
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._beat(now)
            if now >= next_link_beat:
                next_link_beat = now + LINK_BEAT_SECONDS
                self._links.beat()
            self._ring_timers(now)
            due = min([next_beat, *(at for at, _ in self._timers)])
            for key, _ in selector.select(max(0.0, due - time.monotonic())):
                key.data()
            while self._requests:
                self._handle(*self._requests.popleft())
            for peer in list(self._unsent):
                if self._flush(peer):
                    self._unsent.discard(peer)
            self._forget_the_gone()
        self._links.close()
        for peer in self._peers.values():
            peer.connection.close()
        selector.close()
        with self._waking:
            self._wake_reader.close()
            self._wake_writer.close()
        self._left.set()

    def _forget_the_gone(self) -> None:
        while self._to_forget:
            peer = self._to_forget.pop()
            if self._peers.pop(peer.rank, None) is not None:
                self._selector.unregister(peer.connection)
                peer.connection.close()
                self._unsent.discard(peer)

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)

    def _may_leave(self) -> bool:
        if not self._leaving:
            return False
        if time.monotonic() >= self._leave_by or all(peer.farewell is not None for peer in self._peers.values()):
            return True
        judging = self._coordinator is not None and self._coordinator.pending
        return not (self._lingers or judging or self._unsent)

    def _beat(self, now: float) -> None:
        self._pulse.beat(self._listener, now)
        for peer in list(self._peers.values()):
            self._put(peer, _BEAT)
            why = self._health.trouble(peer.rank, now - peer.heard)
            if why is not None:
                self._lose(peer.rank, why)

    def _ring_timers(self, now: float) -> None:
        due = [request for at, request in self._timers if at <= now]
        self._timers = [(at, request) for at, request in self._timers if at > now]
        for request in due:
            self._handle(*request)

    def _later(self, seconds: float, *request: Any) -> None:
        self._timers.append((time.monotonic() + seconds, request))

    # Requests and messages. A message is a name and its arguments, pickled, and is handled as requests are.

    def _handle(self, name: str, *arguments: Any) -> None:
        getattr(self, f"_on_{name}")(*arguments)

    def _on_listen(self, listener: Listener) -> None:
        self._listening_ref = weakref.ref(listener)
        for rank, why in self._gone.items():
            listener.lose(rank, why)
        for one, other in self._cut:
            listener.cut(one, other)
        self._call_early()

    def _on_link(self, rank: int, connection: socket.socket) -> None:
        self._links.add(rank, connection)

    def _on_health(self, rank: int, state: str) -> None:
        why = self._health.told(rank, state)
        if why is not None:
            self._lose(rank, why)

    def _on_report(self, key: LaneKey, state: bytes) -> None:
        if self._coordinator is not None:
            self._hear(0, key, state)
        elif 0 in self._peers:
            self._put(self._peers[0], message("state", key, state))

    def _on_leave(self, why: str, wait: bool) -> None:
        self._leaving = True
        self._lingers = wait
        self._leave_by = time.monotonic() + LEAVE_SECONDS
        farewell = message("farewell", why)
        for peer in self._peers.values():
            self._put(peer, farewell)
            self._flush(peer)

    def _hear(self, rank: int, key: LaneKey, state: bytes) -> None:
        assert self._coordinator is not None
        known = self._coordinator.pending
        self._coordinator.heard(rank, key, pickle.loads(state))  # noqa: S301  (from a worker of this job)
        if key in self._coordinator.pending and key not in known:
            self._later(PATIENCE_SECONDS, "conclude", key)

    def _on_conclude(self, key: LaneKey) -> None:
        if self._coordinator is not None and key in self._coordinator.pending:
            self._coordinator.conclude(key)

    def _ask(self, rank: int, key: LaneKey, trouble: int | None) -> None:
        if rank == 0:
            self._on_ask(key, trouble)
        elif rank in self._peers:
            self._put(self._peers[rank], message("ask", key, trouble))

    def _tell(self, rank: int, key: LaneKey, verdict: Verdict) -> None:
        if self._made[0] is not verdict:  # which is long where there are thousands of workers, and the same for all
            self._made = verdict, message("verdict", key, zlib.compress(pickle.dumps(verdict), 1))
        if rank == 0:
            self._judged(key, verdict)
        elif rank in self._peers:
            self._put(self._peers[rank], self._made[1])

    def _on_ask(self, key: LaneKey, trouble: int | None) -> None:
        self._call_listener("asked", key, trouble)
        self._later(ANSWER_SECONDS, "answer", key)

    def _on_answer(self, key: LaneKey) -> None:
        """Tell of a lane in the place of an event loop that has not done so."""
        state_of = getattr(self._listener, "state_of", None)
        state = None if state_of is None else state_of(key, self._pulse.silence())
        if state is not None:
            self._on_report(key, pickle.dumps(state))

    def _on_verdict(self, key: LaneKey, verdict: bytes) -> None:
        self._judged(key, pickle.loads(zlib.decompress(verdict)))  # noqa: S301  (from a worker of this job)

    def _lose(self, rank: int, why: str) -> None:
        if rank in self._gone:
            return
        self._gone[rank] = why
        if why != ENDED:
            self._unfinished.append(("lost", why) if self._leaving or why.startswith(GAVE_UP) else rank)
        if rank in self._peers:
            self._to_forget.append(self._peers[rank])
        listener = self._listener
        if listener is not None:
            listener.lose(rank, why)
        if self._rank == 0:
            lost = message("lost", rank, why)
            for peer in self._peers.values():
                if peer.rank != rank:
                    self._put(peer, lost)

    def _on_lost(self, rank: int, why: str) -> None:
        self._lose(rank, why)

    def _on_cut_off(self, one: int, other: int) -> None:
        """Hear that a link is cut; where one of the two is lost to the first worker as well, that says more."""
        if self._rank == 0:
            self._later(CUT_GRACE_SECONDS, "cut", min(one, other), max(one, other))
        elif 0 in self._peers:
            self._put(self._peers[0], message("cut_off", one, other))

    def _on_cut(self, one: int, other: int) -> None:
        if (one, other) in self._cut or one in self._gone or other in self._gone:
            return
        self._cut.append((one, other))
        self._unfinished.append(frozenset((one, other)))
        listener = self._listener
        if listener is not None:
            listener.cut(one, other)
        if self._rank == 0:
            for peer in self._peers.values():
                self._put(peer, message("cut", one, other))

    # Bytes.

    def _put(self, peer: Peer, message: bytes) -> None:
        peer.put(message)
        self._unsent.add(peer)

    def _flush(self, peer: Peer) -> bool:
        try:
            return peer.flush()
        except OSError as error:
            self._hang_up(peer, error)
            return True

    def _receive(self, peer: Peer) -> None:
        try:
            for name, *arguments in peer.messages():
                self._take(peer, name, *arguments)
        except (OSError, EOFError) as error:
            self._hang_up(peer, error)

    def _hang_up(self, peer: Peer, error: Exception) -> None:
        """Forget a connection; who has said farewell is lost a little later, when all that was in flight has landed."""
        if peer.farewell is None:
            self._lose(peer.rank, peer.why_lost(error))
        else:
            self._to_forget.append(peer)

    def _take(self, peer: Peer, name: str, *arguments: Any) -> None:
        if name == "state":
            self._hear(peer.rank, *arguments)
        elif name == "request":
            self._take_request(peer.rank, *arguments)
        elif name == "farewell":
            peer.farewell = arguments[0]
            seconds = 0.0 if arguments[0].startswith(GAVE_UP) else FAREWELL_SECONDS
            self._later(seconds, "lost", peer.rank, arguments[0])
        elif name != "beat":
            self._handle(name, *arguments)
