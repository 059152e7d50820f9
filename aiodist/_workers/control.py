"""The control connection of separate processes: a thread a worker, with a TCP connection to worker 0.

It works while the engine hangs and while the event loop is blocked. Every worker says every quarter of a second that
it lives. **Dead** is whose connection has ended without a farewell. **Stopped** is a silent process that is found to be
so (`liveness`). **Cut off** is whose system does not acknowledge what is sent to it: so a program that holds the
interpreter lock for seconds is not taken for lost, since its system answers for it.

Worker 0's thread hears everyone, and has the coordinator. It is the one that keeps the coordinator's time, and that
loses workers; the others hear of that from it, and lose worker 0 themselves.

Messages travel as JSON behind their length, and nothing blocks. The system gives a connection up whose other end does
not acknowledge for some seconds what was sent (``TCP_USER_TIMEOUT``); that end's system does so, whatever its program
is at.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import struct
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._arrays.environment import stall_seconds
from aiodist._workers.coordinator import PATIENCE_SECONDS, Coordinator
from aiodist._workers.ending import (
    ENDED,
    WORKER_LOST,
    farewell_of,
    is_echo,
    last_error,
    reports_of_all,
    shorten_reports,
    tell_of_echo,
    unfinished,
)
from aiodist._workers.layout import Hello, made_differently
from aiodist._workers.liveness import Pulse, trouble
from aiodist._workers.messages import Ask, Beat, Farewell, Lost, Message, Report, Stalled, decode, encode
from aiodist._workers.portable import portable
from aiodist._workers.team import Team

BEAT_SECONDS: Final = 0.25
ANSWER_SECONDS: Final = 0.5
_ATTEMPTS: Final = 1
FAREWELL_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 2.0


CUT_OFF_SECONDS: Final = 10.0
MOST_BYTES: Final = 1 << 26
"""How long a message may be."""

_LENGTH: Final = struct.Struct("<I")


def cut_off_seconds() -> float:
    """Return how long a worker's system need not acknowledge what it is sent."""
    return environment.lost_seconds() or CUT_OFF_SECONDS


def packed(message: Message) -> bytes:
    """Return a message as it is sent."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


class Peer:
    """A worker at the other end of a connection.

    Attributes:
        rank: which.
        connection: the connection.
        heard: when something came last, by the monotonic clock.
        farewell: why it ends, once it has said so.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(cut_off_seconds() * 1000))
        self.rank = rank
        self.connection = connection
        self.heard = time.monotonic()
        self.farewell: str | None = None
        self._received = bytearray()
        self._to_send = bytearray()

    def put(self, data: bytes) -> None:
        """Let a message, as `packed` gave it, be sent at the next `flush`."""
        self._to_send += data

    def flush(self) -> bool:
        """Give the system as much as it takes; return whether that was all."""
        try:
            while self._to_send:
                sent = self.connection.send(self._to_send)
                del self._to_send[:sent]
        except BlockingIOError:
            return False
        return True

    def messages(self) -> Iterator[Message]:
        """Yield the messages that have come.

        Raises:
            EOFError: the other end is closed.
            OSError: the connection is lost.
            ValueError: what came is no message.
        """
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self.heard = time.monotonic()
        self._received += data
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MOST_BYTES:
                raise ValueError(f"a message of {length} bytes")
            if len(self._received) < _LENGTH.size + length:
                return
            taken = decode(self._received[_LENGTH.size : _LENGTH.size + length])
            del self._received[: _LENGTH.size + length]
            yield taken

    def why_lost(self, error: Exception) -> str:
        """Return what to report of a worker whose connection has ended so."""
        if self.farewell is not None:
            return self.farewell
        if isinstance(error, TimeoutError):
            return f"is cut off: its machine has not answered for {cut_off_seconds():.0f} s"
        if isinstance(error, (EOFError, ConnectionError)):
            return "has died: its connection was closed without a farewell"
        if isinstance(error, OSError):
            return f"is cut off: {error}"
        return f"has sent something that is not a message: {error}"


_BEAT: Final = packed(Beat())


class TcpControl:
    """A worker's control connection."""

    def __init__(self, team: Team, hellos: Sequence[Hello], connections: Mapping[int, socket.socket]) -> None:
        layout = team.layout
        self._team = weakref.ref(team)
        self._rank = layout.rank
        self._size = layout.workers
        self._own = frozenset(layout.own)
        self._pulse = Pulse(self._ask_loop)
        self._gone: set[int] = set()
        self._unsent: set[Peer] = set()
        self._requests: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, Callable[[], object]]] = []
        self._packed: tuple[Message | None, bytes] = None, b""
        self._leave_by: float | None = None
        self._lingers = False
        self._waking = threading.RLock()  # a garbage collection in here may let go
        self._left = threading.Event()
        self._process = os.getpid()
        self._coordinator = Coordinator(layout, made_differently(hellos)) if self._rank == 0 else None
        self._peers = {rank: Peer(rank, connection) for rank, connection in connections.items()}
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._hellos = hellos
        self._stall = stall_seconds()
        self._stalled: dict[int, float] = {}
        shorten_reports(self._rank)
        threading.Thread(target=self._serve, name="aiodist control", daemon=True).start()
        atexit.register(self.close)

    # What the worker calls, in any thread.

    def send(self, message: Message) -> None:
        """Tell the coordinator something."""
        self._request(self._tell_coordinator, message)

    def close(self, why: str = "") -> None:
        """Tell the others that this worker ends, or why it leaves them; give them time to hear of an error."""
        if os.getpid() != self._process:  # what the program has forked has no part in it
            return
        error = last_error()
        if is_echo(error, self._own):
            tell_of_echo()
        self._leave(why or farewell_of(error), lingers=bool(why) or error is not None)
        self._left.wait(LEAVE_SECONDS + BEAT_SECONDS)

    def let_go(self) -> None:
        """Leave without waiting: the strategy is gone, and nobody has closed it."""
        if os.getpid() != self._process:
            return
        self._leave(ENDED, lingers=False)
        warnings.warn(
            f"the strategy of worker {self._rank} of {self._size} was dropped with its connections open; call "
            "strategy.close() when it is needed no more",
            ResourceWarning,
            stacklevel=2,
        )

    def _leave(self, why: str, *, lingers: bool) -> None:
        atexit.unregister(self.close)
        self._request(self._say_farewell, why, lingers)

    def _request(self, fn: Callable[..., object], *arguments: Any) -> None:
        self._requests.append(partial(fn, *arguments))
        with contextlib.suppress(OSError), self._waking:
            self._wake_writer.send(b"\0")

    # The thread.

    def _serve(self) -> None:
        selector = self._selector
        selector.register(self._wake_reader, selectors.EVENT_READ, self._awake)
        for peer in self._peers.values():
            selector.register(peer.connection, selectors.EVENT_READ, partial(self._receive, peer))
        next_beat = time.monotonic()
        while not self._may_leave():
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._beat(now)
            self._call_due(now)
            due = min([next_beat, *(at for at, _ in self._timers)])
            for key, _ in selector.select(max(0.0, due - time.monotonic())):
                key.data()
            while self._requests:
                self._requests.popleft()()
            for peer in list(self._unsent):
                self._flush(peer)
        for peer in self._peers.values():
            peer.connection.close()
        selector.close()
        with self._waking:
            self._wake_reader.close()
            self._wake_writer.close()
        self._left.set()

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)

    def _may_leave(self) -> bool:
        if self._leave_by is None:
            return False
        if time.monotonic() >= self._leave_by or all(peer.farewell is not None for peer in self._peers.values()):
            return True
        analysing = self._coordinator is not None and self._coordinator.pending
        return not (self._lingers or analysing or self._unsent)

    def _beat(self, now: float) -> None:
        self._pulse.beat(now)
        for peer in list(self._peers.values()):
            self._put(peer, _BEAT)
            why = trouble(self._hellos[peer.rank], now - peer.heard)
            if why is not None:
                self._lose(peer.rank, why)
            else:
                silent = "nothing is heard of it: it is stopped or cut off, or a long call holds the interpreter lock"
                self._note_stall(peer.rank, now - peer.heard, silent, ("", 0))
        if 0 < self._stall <= self._pulse.silent_seconds:
            self._note_stall(self._rank, self._pulse.silent_seconds, self._pulse.silence(), self._pulse.place())
        else:
            self._stalled.pop(self._rank, None)

    def _note_stall(self, rank: int, seconds: float, what: str, place: tuple[str, int]) -> None:
        """Tell the others of a worker that does not go on: when it is time, and again when that has doubled."""
        if seconds < self._stall:
            self._stalled.pop(rank, None)
        elif self._stall and seconds >= 2 * self._stalled.get(rank, 0.0):
            self._stalled[rank] = seconds
            hello = self._hellos[rank]
            text = f"worker {rank} of {self._size}, process {hello.pid} on {hello.host}: {what}"
            message = Stalled(text, portable(place[0]), place[1])
            if rank == self._rank:
                self._tell_coordinator(message)
            elif self._coordinator is not None:
                self._coordinate(rank, message)
            else:  # it is the coordinator that is silent
                self._pass_on(message)

    def _later(self, seconds: float, fn: Callable[..., object], *arguments: Any) -> None:
        self._timers.append((time.monotonic() + seconds, partial(fn, *arguments)))

    def _call_due(self, now: float) -> None:
        due = [fn for at, fn in self._timers if at <= now]
        self._timers = [(at, fn) for at, fn in self._timers if at > now]
        for fn in due:
            fn()

    # This worker.

    def _ask_loop(self, fn: Callable[[], object]) -> bool:
        team = self._team()
        return team is not None and team.driver.ask_loop(fn)

    def _pass_on(self, message: Message) -> None:
        """Let this worker hear what the coordinator tells it."""
        if isinstance(message, Report):
            unfinished.append("operations are in the air that will never match")
            reports_of_all.append(message.report)
        elif isinstance(message, Lost) and message.why != ENDED:
            unfinished.append(WORKER_LOST)
        team = self._team()
        if team is None:
            return
        team.post(message)
        if isinstance(message, Ask):
            self._later(ANSWER_SECONDS, self._answer, message.run, _ATTEMPTS)

    def _answer(self, run: int, attempts: int) -> None:
        """Tell of a run in the place of an event loop that is blocked, or of a worker that has not begun it.

        Where the loop turns, its replicas may still be settling: they have a second.
        """
        team = self._team()
        if team is None or not team.owes_answer(run):
            return
        if attempts and team.may_answer(run) and not self._pulse.is_silent:
            self._later(ANSWER_SECONDS, self._answer, run, attempts - 1)
        else:
            team.answer_for(run, self._pulse.silence() if self._pulse.is_silent else "")

    def _say_farewell(self, why: str, lingers: bool) -> None:
        if self._leave_by is None:
            self._lingers = lingers
            self._leave_by = time.monotonic() + LEAVE_SECONDS
            for peer in list(self._peers.values()):
                self._put(peer, packed(Farewell(why)))
                self._flush(peer)

    # The coordinator.

    def _tell_coordinator(self, message: Message) -> None:
        if self._coordinator is not None:
            self._coordinate(0, message)
        elif 0 in self._peers:
            self._put(self._peers[0], packed(message))

    def _coordinate(self, rank: int, message: Message) -> None:
        assert self._coordinator is not None
        known = self._coordinator.pending
        self._send_all(self._coordinator.take(rank, message))
        for run in self._coordinator.pending:
            if run not in known:
                self._later(PATIENCE_SECONDS, self._conclude, run)

    def _conclude(self, run: int) -> None:
        assert self._coordinator is not None
        self._send_all(self._coordinator.conclude(run))

    def _send_all(self, sent: Iterable[tuple[int, Message]]) -> None:
        for rank, message in sent:
            if rank == 0:
                self._pass_on(message)
            elif rank in self._peers:
                if self._packed[0] is not message:  # which may be long, and is the same for all
                    self._packed = message, packed(message)
                self._put(self._peers[rank], self._packed[1])

    def _forget(self, rank: int) -> None:
        peer = self._peers.pop(rank, None)
        if peer is not None:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            self._unsent.discard(peer)

    def _lose(self, rank: int, why: str) -> None:
        """Note that a worker is gone."""
        self._forget(rank)
        if rank in self._gone:
            return
        self._gone.add(rank)
        if self._coordinator is not None:
            self._send_all(self._coordinator.lose(rank, why))
        else:
            self._pass_on(Lost(rank, why))

    # Bytes.

    def _put(self, peer: Peer, data: bytes) -> None:
        peer.put(data)
        self._unsent.add(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            if peer.flush():
                self._unsent.discard(peer)
        except OSError as error:
            self._hang_up(peer, error)

    def _receive(self, peer: Peer) -> None:
        try:
            for message in peer.messages():
                self._take(peer, message)
        except Exception as error:  # noqa: BLE001  (whatever a peer sends, the others are heard)
            self._hang_up(peer, error)

    def _take(self, peer: Peer, message: Message) -> None:
        match message:
            case Beat():
                pass
            case Farewell():
                peer.farewell = message.why
                self._later(FAREWELL_SECONDS, self._lose, peer.rank, message.why)
            case _ if self._coordinator is not None:
                self._coordinate(peer.rank, message)
            case _:
                self._pass_on(message)

    def _hang_up(self, peer: Peer, error: Exception) -> None:
        """Forget a connection; who has said farewell is lost a little later, when what was in flight has arrived."""
        if peer.farewell is None:
            self._lose(peer.rank, peer.why_lost(error))
        else:
            self._forget(peer.rank)
