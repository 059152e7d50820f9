"""The control connection of separate processes: a thread a worker, with a TCP connection to worker 0.

It works while the engine hangs and while the program's event loop is blocked: the thread has a loop of its own. Every
worker says every quarter of a second that it lives. **Dead** is whose connection has ended without a farewell.
**Stopped** is a silent process that is found to be so (`liveness`). **Cut off** is whose system does not acknowledge
for some seconds what is sent to it (``TCP_USER_TIMEOUT``): so a program that holds the interpreter lock for seconds is
not taken for lost, since its system answers for it.

Worker 0's thread hears everyone, and has the coordinator. It is the one that keeps the coordinator's time, and that
loses workers; the others hear of that from it, and lose worker 0 themselves. Messages travel as JSON behind their
length.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._arrays.environment import stall_seconds
from aiodist._workers import ending
from aiodist._workers.coordinator import PATIENCE_SECONDS, Coordinator
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
_LOOK_SECONDS: Final = 0.005
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


_BEAT: Final = packed(Beat())


class Peer(asyncio.Protocol):
    """A worker at the other end of a connection.

    Args:
        rank: which.
        take: is given its messages.
        hang_up: is called when the connection has ended, with its error, or what came is no message.

    Attributes:
        heard: when something came last, by the monotonic clock.
        farewell: why it ends, once it has said so.
    """

    def __init__(
        self, rank: int, take: Callable[[Peer, Message], None], hang_up: Callable[[Peer, Exception | None], None]
    ) -> None:
        self.rank = rank
        self.heard = time.monotonic()
        self.farewell: str | None = None
        self._take, self._hang_up = take, hang_up
        self._received = bytearray()
        self._early = b""  # what is to be sent before the loop has taken the connection
        self._closed = False
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = transport
        self._transport.write(self._early)
        if self._closed:
            self.close()

    def send(self, data: bytes) -> None:
        """Let a message, as `packed` gave it, be sent."""
        if self._transport is None:
            self._early += data
        else:
            self._transport.write(data)

    @property
    def is_sending(self) -> bool:
        """Whether the system has not taken all that is to be sent."""
        return self._transport is None or bool(self._transport.get_write_buffer_size())

    def close(self) -> None:
        """End the connection, also one that the loop has not taken yet."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        self.heard = time.monotonic()
        self._received += data
        try:
            while len(self._received) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._received)
                if length > MOST_BYTES:
                    raise ValueError(f"a message of {length} bytes")  # noqa: TRY301  (an error like those of `decode`)
                if len(self._received) < _LENGTH.size + length:
                    return
                message = decode(self._received[_LENGTH.size : _LENGTH.size + length])
                del self._received[: _LENGTH.size + length]
                self._take(self, message)
        except Exception as error:  # noqa: BLE001  (whatever a peer sends, the others are heard)
            self._hang_up(self, error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell of the end of the connection."""
        self._hang_up(self, exc)

    def why_lost(self, error: Exception | None) -> str:
        """Return what to report of a worker whose connection has ended so."""
        if isinstance(error, TimeoutError):
            return f"is cut off: its machine has not answered for {cut_off_seconds():.0f} s"
        if error is None or isinstance(error, ConnectionError):
            return "has died: its connection was closed without a farewell"
        if isinstance(error, OSError):
            return f"is cut off: {error}"
        return f"has sent something that is not a message: {error}"


class TcpControl:
    """A worker's control connection.

    Args:
        team: the worker, which is not kept.
        hellos: what the workers have said of themselves.
        connections: by rank, those of worker 0 to all others, and of another one to worker 0.
    """

    def __init__(self, team: Team, hellos: Sequence[Hello], connections: Mapping[int, socket.socket]) -> None:
        layout = team.layout
        self._team = weakref.ref(team)
        self._rank = layout.rank
        self._size = layout.workers
        self._own = frozenset(layout.own)
        self._hellos = hellos
        self._coordinator = Coordinator(layout, made_differently(hellos)) if self._rank == 0 else None
        self._pulse = Pulse(self._ask_loop)
        self._peers: dict[int, Peer] = {}
        self._gone: set[int] = set()
        self._stall = stall_seconds()
        self._stalled: dict[int, float] = {}
        self._packed: tuple[Message | None, bytes] = None, b""
        self._leave_by: float | None = None
        self._lingers = False
        self._process = os.getpid()
        for connection in connections.values():  # here, where what goes wrong is raised
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(cut_off_seconds() * 1000))
        self._loop = asyncio.SelectorEventLoop()
        self._leaving = asyncio.Event()
        self._connected, self._left = threading.Event(), threading.Event()
        ending.shorten_reports(self._rank)
        threading.Thread(target=self._serve, args=(connections,), name="aiodist control", daemon=True).start()
        self._connected.wait()
        atexit.register(self.close)

    # What the worker calls, in any thread.

    def send(self, message: Message) -> None:
        """Tell the coordinator something."""
        self._request(self._tell_coordinator, message)

    def close(self, why: str = "") -> None:
        """Tell the others that this worker ends, or why it leaves them; give them time to hear of an error."""
        if os.getpid() != self._process:  # what the program has forked has no part in it
            return
        error = ending.last_error()
        if ending.is_echo(error, self._own):
            ending.tell_of_echo()
        self._leave(why or ending.farewell_of(error), lingers=bool(why) or error is not None)
        self._left.wait(LEAVE_SECONDS + BEAT_SECONDS)

    def let_go(self) -> None:
        """Leave without waiting: the strategy is gone, and nobody has closed it."""
        if os.getpid() != self._process:
            return
        self._leave(ending.ENDED, lingers=False)
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
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(fn, *arguments)

    # The thread.

    def _serve(self, connections: Mapping[int, socket.socket]) -> None:
        self._loop.run_until_complete(self._until_left(connections))
        self._loop.close()
        self._left.set()

    async def _until_left(self, connections: Mapping[int, socket.socket]) -> None:
        self._peers = {rank: Peer(rank, self._take, self._hang_up) for rank in connections}
        for rank, peer in list(self._peers.items()):
            await self._loop.connect_accepted_socket(lambda peer=peer: peer, connections[rank])  # type: ignore[misc]
        self._connected.set()
        self._beat()
        await self._leaving.wait()
        while not self._may_leave():  # noqa: ASYNC110  (much may let it leave, and time alone, too)
            await asyncio.sleep(_LOOK_SECONDS)
        for rank in list(self._peers):
            self._forget(rank)
        await asyncio.sleep(0)  # in which the connections are closed

    def _may_leave(self) -> bool:
        assert self._leave_by is not None
        if time.monotonic() >= self._leave_by or all(peer.farewell is not None for peer in self._peers.values()):
            return True
        analysing = self._coordinator is not None and self._coordinator.pending
        return not (self._lingers or analysing or any(peer.is_sending for peer in self._peers.values()))

    def _beat(self) -> None:
        now = time.monotonic()
        self._loop.call_later(BEAT_SECONDS, self._beat)
        self._pulse.beat(now)
        for peer in list(self._peers.values()):
            peer.send(_BEAT)
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

    # This worker.

    def _ask_loop(self, fn: Callable[[], object]) -> bool:
        team = self._team()
        return team is not None and team.driver.ask_loop(fn)

    def _pass_on(self, message: Message) -> None:
        """Let this worker hear what the coordinator tells it."""
        if isinstance(message, Report):
            ending.unfinished.append("operations are in the air that will never match")
            ending.reports_of_all.append(message.report)
        elif isinstance(message, Lost) and message.why != ending.ENDED:
            ending.unfinished.append(ending.WORKER_LOST)
        team = self._team()
        if team is None:
            return
        team.post(message)
        if isinstance(message, Ask):
            self._loop.call_later(ANSWER_SECONDS, self._answer, message.run, _ATTEMPTS)

    def _answer(self, run: int, attempts: int) -> None:
        """Tell of a run in the place of an event loop that is blocked, or of a worker that has not begun it.

        Where the loop turns, its replicas may still be settling: they have a second.
        """
        team = self._team()
        if team is None or not team.owes_answer(run):
            return
        if attempts and team.may_answer(run) and not self._pulse.is_silent:
            self._loop.call_later(ANSWER_SECONDS, self._answer, run, attempts - 1)
        else:
            team.answer_for(run, self._pulse.silence() if self._pulse.is_silent else "")

    def _say_farewell(self, why: str, lingers: bool) -> None:
        if self._leave_by is None:
            self._lingers = lingers
            self._leave_by = time.monotonic() + LEAVE_SECONDS
            for peer in list(self._peers.values()):
                peer.send(packed(Farewell(why)))
            self._leaving.set()

    # The coordinator.

    def _tell_coordinator(self, message: Message) -> None:
        if self._coordinator is not None:
            self._coordinate(0, message)
        elif 0 in self._peers:
            self._peers[0].send(packed(message))

    def _coordinate(self, rank: int, message: Message) -> None:
        assert self._coordinator is not None
        known = self._coordinator.pending
        self._send_all(self._coordinator.take(rank, message))
        for run in self._coordinator.pending:
            if run not in known:
                self._loop.call_later(PATIENCE_SECONDS, self._conclude, run)

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
                self._peers[rank].send(self._packed[1])

    def _forget(self, rank: int) -> None:
        peer = self._peers.pop(rank, None)
        if peer is not None:
            peer.close()

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

    # What comes.

    def _take(self, peer: Peer, message: Message) -> None:
        match message:
            case Beat():
                pass
            case Farewell():
                peer.farewell = message.why
                self._loop.call_later(FAREWELL_SECONDS, self._lose, peer.rank, message.why)
            case _ if self._coordinator is not None:
                self._coordinate(peer.rank, message)
            case _:
                self._pass_on(message)

    def _hang_up(self, peer: Peer, error: Exception | None) -> None:
        """Forget a connection; who has said farewell is lost a little later, when what was in flight has arrived."""
        if self._peers.get(peer.rank) is not peer:  # it was ended here
            return
        if peer.farewell is None:
            self._lose(peer.rank, peer.why_lost(error))
        else:
            self._forget(peer.rank)
