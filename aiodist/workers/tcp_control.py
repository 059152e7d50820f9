"""The control plane of separate processes: a thread a worker, with TCP connections of its own to the first worker.

It works while the engine hangs and while the event loop is blocked. Every worker says every quarter of a second that
it lives. **Dead** is whose connection has ended without a farewell. **Stopped** is a process of this machine that the
system says is stopped, or one elsewhere that is silent for a minute though its system answers. **Cut off** is whose
system does not acknowledge what is sent to it (`TCP_USER_TIMEOUT`): so a program that holds the interpreter lock for
seconds is not taken for lost, since its system answers for it.

Connections form a star: the first worker hears everyone and judges for all. A link that is cut between two others is
not seen here; collectives over it wait for their timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import pickle
import platform
import selectors
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiodist.vocabulary.options import OrderCheck
from aiodist.workers.addresses import TOKEN_BYTES, Address, Listening, first_connection, receive_exactly
from aiodist.workers.joining import Hello
from aiodist.workers.layout import Layout
from aiodist.workers.state import WorkerState
from aiodist.workers.tribunal import PATIENCE_SECONDS, Coordinator, LaneKey, Listener, Verdict

BEAT_SECONDS: Final = 0.25
CUT_OFF_SECONDS: Final = 2.0
SUSPICIOUS_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 0.5
FAREWELL_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 2.0
_CONNECT_SECONDS: Final = 60.0
_LENGTH: Final = struct.Struct("<I")


@dataclass(slots=True)
class _Peer:
    """A worker at the other end of a connection."""

    rank: int
    connection: socket.socket
    heard: float
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    farewell: str | None = None


class TcpControl:
    """A worker's control plane.

    Args:
        layout: the workers' replicas.
        order_check: what call sites are compared by.
        hellos: what the workers have told of themselves.
        listening: the first worker's socket; None on the others.
        unfinished: gets an entry when the engine must not be brought to an orderly end.
    """

    def __init__(
        self,
        layout: Layout,
        order_check: OrderCheck,
        hellos: Sequence[Hello],
        listening: Listening | None,
        unfinished: list[object],
    ) -> None:
        self._rank = layout.rank
        self._size = layout.workers
        self._hellos = hellos
        self._unfinished = unfinished
        self._main = threading.main_thread().ident or 0
        self._listener: Listener | None = None
        self._peers: dict[int, _Peer] = {}
        self._gone: dict[int, str] = {}
        self._requests: deque[tuple[Any, ...]] = deque()
        self._timers: list[tuple[float, tuple[Any, ...]]] = []
        self._leaving = False
        self._left = threading.Event()
        self._coordinator = Coordinator(layout, order_check, self._ask, self._tell) if self._rank == 0 else None
        self._connect(listening)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="aiodist control", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # What the worker calls, in any thread.

    def listen(self, listener: Listener) -> None:
        """Call this listener from now on."""
        self._request("listen", listener)

    def report(self, key: LaneKey, state: WorkerState) -> None:
        """Tell the coordinator of a lane."""
        self._request("report", key, pickle.dumps(state))

    def close(self) -> None:
        """Tell the others that this worker ends; where it ends by an error, give them time to hear of it."""
        atexit.unregister(self.close)
        if not self._leaving:
            error = getattr(sys, "last_value", None)
            self._request("leave", "has ended" if error is None else f"has ended: {_brief(error)}", error is not None)
            self._left.wait(LEAVE_SECONDS + BEAT_SECONDS)

    def _request(self, *request: Any) -> None:
        self._requests.append(request)
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    # Connections.

    def _connect(self, listening: Listening | None) -> None:
        if self._size == 1:
            return
        if listening is not None:
            while len(self._peers) < self._size - 1:
                self._accept(listening)
            listening.socket.close()
            return
        address: Address = self._hellos[0].address
        same_machine = self._hellos[0].host == platform.node()
        hosts = ("127.0.0.1", *address.hosts) if same_machine else address.hosts
        connection = first_connection(hosts, address.port)
        connection.sendall(address.token + _LENGTH.pack(self._rank))
        self._add(0, connection)

    def _accept(self, listening: Listening) -> None:
        listening.socket.settimeout(_CONNECT_SECONDS)
        try:
            connection, _ = listening.socket.accept()
        except TimeoutError:
            missing = sorted(set(range(1, self._size)) - set(self._peers))
            raise ConnectionError(
                f"workers {missing} have not connected to the first worker at {listening.address.hosts} within "
                f"{_CONNECT_SECONDS:.0f} s; where that is the wrong network, set AIODIST_CONTROL_ADDRESS"
            ) from None
        connection.settimeout(_CONNECT_SECONDS)
        with contextlib.suppress(OSError):
            said = receive_exactly(connection, TOKEN_BYTES + _LENGTH.size)
            if hmac.compare_digest(said[:TOKEN_BYTES], listening.address.token):
                self._add(_LENGTH.unpack(said[TOKEN_BYTES:])[0], connection)
                return
        connection.close()

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(CUT_OFF_SECONDS * 1000))
        self._peers[rank] = _Peer(rank, connection, time.monotonic())

    # The thread.

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            for peer in self._peers.values():
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            next_beat = time.monotonic()
            while not self._may_leave():
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + BEAT_SECONDS
                    self._beat(now)
                self._ring_timers(now)
                due = min([next_beat, *(at for at, _ in self._timers)])
                for key, _ in selector.select(max(0.0, due - time.monotonic())):
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_reader.recv(4096)
                    else:
                        self._receive(key.data)
                while self._requests:
                    self._handle(*self._requests.popleft())
                for peer in list(self._peers.values()):
                    self._flush(peer)
                for peer in [p for p in self._peers.values() if p.rank in self._gone]:
                    selector.unregister(peer.connection)
                    peer.connection.close()
                    del self._peers[peer.rank]
        self._left.set()

    def _may_leave(self) -> bool:
        return self._leaving and (
            time.monotonic() >= self._leave_by or all(peer.farewell is not None for peer in self._peers.values())
        )

    def _beat(self, now: float) -> None:
        for peer in list(self._peers.values()):
            self._send(peer, "beat")
            silent = now - peer.heard
            if silent > SUSPICIOUS_SECONDS and self._is_stopped(peer.rank):
                self._lose(peer.rank, "is stopped: the system has halted its process")
            elif silent > SILENT_SECONDS:
                self._lose(peer.rank, f"has been silent for {silent:.0f} s, though its system answers: it is stopped")

    def _is_stopped(self, rank: int) -> bool:
        """Whether a process of this machine is stopped, as by SIGSTOP or a debugger."""
        hello = self._hellos[rank]
        if hello.host != platform.node():
            return False
        try:
            status = Path(f"/proc/{hello.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in {"T", "t"}

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
        self._listener = listener
        for rank, why in self._gone.items():
            listener.lose(rank, why)

    def _on_report(self, key: LaneKey, state: bytes) -> None:
        if self._coordinator is not None:
            self._hear(0, key, state)
        elif 0 in self._peers:
            self._send(self._peers[0], "state", key, state)

    def _on_leave(self, why: str, wait: bool) -> None:
        self._leaving = True
        self._leave_by = time.monotonic() + (LEAVE_SECONDS if wait else 0.0)
        for peer in self._peers.values():
            self._send(peer, "farewell", why)
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

    def _ask(self, rank: int, key: LaneKey) -> None:
        if rank == 0:
            self._on_ask(key)
        elif rank in self._peers:
            self._send(self._peers[rank], "ask", key)

    def _tell(self, rank: int, key: LaneKey, verdict: Verdict) -> None:
        self._unfinished.append(key)
        if rank == 0:
            self._on_verdict(key, pickle.dumps(verdict))
        elif rank in self._peers:
            self._send(self._peers[rank], "verdict", key, pickle.dumps(verdict))

    def _on_ask(self, key: LaneKey) -> None:
        if self._listener is not None:
            self._listener.asked(key)
            self._later(ANSWER_SECONDS, "answer", key)

    def _on_answer(self, key: LaneKey) -> None:
        """Tell of a lane in the place of an event loop that has not done so."""
        state_of = getattr(self._listener, "state_of", None)
        state = None if state_of is None else state_of(key, self._where_the_main_thread_is())
        if state is not None:
            self._on_report(key, pickle.dumps(state))

    def _where_the_main_thread_is(self) -> str:
        frame = sys._current_frames().get(self._main)
        where = traceback.extract_stack(frame)[-1] if frame is not None else None
        place = f" The main thread is at {where.filename}:{where.lineno} in {where.name}." if where else ""
        return f"its event loop has not answered for {ANSWER_SECONDS} s: something blocks it.{place}"

    def _on_verdict(self, key: LaneKey, verdict: bytes) -> None:
        self._unfinished.append(key)
        if self._listener is not None:
            self._listener.judged(key, pickle.loads(verdict))  # noqa: S301  (from a worker of this job)

    def _lose(self, rank: int, why: str) -> None:
        if rank in self._gone:
            return
        self._gone[rank] = why
        self._unfinished.append(rank)
        if self._listener is not None:
            self._listener.lose(rank, why)
        if self._rank == 0:
            for peer in self._peers.values():
                if peer.rank != rank:
                    self._send(peer, "lost", rank, why)

    def _on_lost(self, rank: int, why: str) -> None:
        self._lose(rank, why)

    # Bytes.

    def _send(self, peer: _Peer, name: str, *arguments: Any) -> None:
        message = pickle.dumps((name, *arguments))
        peer.to_send += _LENGTH.pack(len(message)) + message

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.to_send:
                sent = peer.connection.send(peer.to_send)
                del peer.to_send[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            self._connection_lost(peer, error)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self._connection_lost(peer, error)
            return
        if not data:
            self._connection_lost(peer, None)
            return
        peer.heard = time.monotonic()
        peer.received += data
        while len(peer.received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(peer.received)
            if len(peer.received) < _LENGTH.size + length:
                return
            message = pickle.loads(bytes(peer.received[_LENGTH.size : _LENGTH.size + length]))  # noqa: S301
            del peer.received[: _LENGTH.size + length]
            self._take(peer, *message)

    def _take(self, peer: _Peer, name: str, *arguments: Any) -> None:
        if name == "state":
            self._hear(peer.rank, *arguments)
        elif name == "farewell":
            peer.farewell = arguments[0]
            self._later(FAREWELL_SECONDS, "lost", peer.rank, arguments[0])
        elif name != "beat":
            self._handle(name, *arguments)

    def _connection_lost(self, peer: _Peer, error: OSError | None) -> None:
        if peer.farewell is not None:
            self._lose(peer.rank, peer.farewell)
        elif isinstance(error, TimeoutError):
            self._lose(peer.rank, f"is cut off: its machine has not answered for {CUT_OFF_SECONDS:.0f} s")
        elif error is None or isinstance(error, ConnectionError):
            self._lose(peer.rank, "has died: its connection was closed without a farewell")
        else:
            self._lose(peer.rank, f"is cut off: {error}")


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
