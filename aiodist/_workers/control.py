"""The control connection between separate processes: a thread per worker, connected to worker 0 by TCP.

The thread has an event loop of its own, so it works while the engine hangs or the program's event loop is blocked.
Every worker sends a heartbeat every quarter of a second, or less often if there are thousands. A worker is

- **dead** if its connection ends without a farewell;
- **stopped** if it is silent and its machine says that its process is halted (`reason_stopped`);
- **cut off** if its system does not acknowledge data for some seconds (``TCP_USER_TIMEOUT``). A program that holds the
  interpreter lock for seconds does not count as lost, because its system still acknowledges.

Worker 0 has the coordinator. It detects lost workers and tells the others, which detect only the loss of worker 0.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._runtime.stacks import can_read_other_threads, is_plumbing
from aiodist._workers import ending, messages
from aiodist._workers.admission import Address, Listener, connect
from aiodist._workers.coordinator import PATIENCE_SECONDS, Coordinator, Relay, Sent
from aiodist._workers.journal import ENDED
from aiodist._workers.layout import Hello, this_machine
from aiodist._workers.messages import Ask, Farewell, Lost, Message, Report, Stalled
from aiodist._workers.record import portable
from aiodist._workers.team import Team

BEAT_SECONDS: Final = 0.25
MAX_BEATS: Final = 4000
"""How many heartbeats worker 0 receives per second, at some 10 µs each; more workers send them less often."""

ANSWER_SECONDS: Final = 0.5
FAREWELL_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 2.0
CUT_OFF_SECONDS: Final = 10.0
SUSPICIOUS_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 60.0
PROBE_SECONDS: Final = 0.5
MAX_BYTES: Final = 1 << 26
"""The longest message, compressed or not."""

_LEAVE_POLL_SECONDS: Final = 0.005
_MAX_FRAMES: Final = 6
_NOTHING_HEARD: Final = "it sends nothing: it is stopped or cut off, or a long call holds the interpreter lock"
_LENGTH: Final = struct.Struct("<I")
BEAT: Final = _LENGTH.pack(0)


def packed(message: Message) -> bytes:
    """Return a message as it is sent: compressed, since a report of thousands of replicas repeats itself."""
    data = zlib.compress(messages.encode(message), level=1)
    return _LENGTH.pack(len(data)) + data


class Peer:
    """The worker at the other end of a connection.

    Attributes:
        heard: when it last sent anything, by the monotonic clock.
        farewell: why nobody waits for it any more: what it has said, or that it is stopped.
    """

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank = rank
        self.heard = time.monotonic()
        self.farewell: str | None = None
        self._reader = reader
        self.writer = writer

    async def receive(self) -> Message:
        """Return the next message. A ValueError or zlib.error means that the worker has sent something else."""
        length = 0
        while not length:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            self.heard = time.monotonic()
        if length > MAX_BYTES:
            raise ValueError(f"a message of {length} bytes")
        inflater = zlib.decompressobj()
        data = inflater.decompress(await self._reader.readexactly(length), MAX_BYTES)
        if not inflater.eof:
            raise ValueError("a message that is too long or truncated")
        message = messages.decode(data)
        if not isinstance(message, messages.ToWorker if self.rank == 0 else messages.ToCoordinator):
            raise ValueError(f"worker {self.rank} must not send a {type(message).__name__}")  # noqa: TRY004
        return message


# Silent workers: whether a process is stopped, and for how long an event loop has not turned.


def reason_stopped(hello: Hello, silent: float, allowed: float) -> str | None:
    """Return why a worker silent for some seconds counts as stopped, if it does; the user allows more than usual."""
    if hello.machine != this_machine():
        if silent > max(SILENT_SECONDS, allowed):
            return f"has been silent for {silent:.0f} s, though its system answers: it is stopped"
    elif silent > max(SUSPICIOUS_SECONDS, allowed):
        with suppress(OSError):  # this system is not Linux, or the process has ended
            status = Path(f"/proc/{hello.pid}/stat").read_text()
            if status.rpartition(")")[2].split()[0] in {"T", "t"}:  # as by SIGSTOP, or a debugger
                return "is stopped: the system has halted its process"
    return None


class LoopProbe:
    """Asks this worker's event loop from another thread, now and then, whether it still turns.

    ``ask_loop`` has the loop call a function, and returns whether there is a loop.
    """

    def __init__(self, ask_loop: Callable[[Callable[[], object]], bool]) -> None:
        self._ask_loop = ask_loop
        self._is_asked = False
        self._heard = time.monotonic()
        self._thread = threading.main_thread().ident

    def probe(self, now: float) -> None:
        """Ask again if the last question has been answered."""
        if not self._is_asked and now - self._heard >= PROBE_SECONDS:
            self._is_asked = True
            if not self._ask_loop(self._answer):
                self._is_asked, self._heard = False, now

    def _answer(self) -> None:
        self._heard = time.monotonic()
        self._is_asked = False
        self._thread = threading.get_ident()

    @property
    def silent_seconds(self) -> float:
        """How long the loop has not answered; 0 if nothing has been asked."""
        return time.monotonic() - self._heard if self._is_asked else 0.0

    def describe(self) -> tuple[str, str, int]:
        """Return a text on a loop that does not answer, and the file and line at which its thread is."""
        text = f"its event loop has been silent for {self.silent_seconds:.1f} s: something blocks it"
        if not can_read_other_threads():
            return text, "", 0
        here = sys._current_frames().get(self._thread or 0)  # noqa: SLF001  (CPython has no other way)
        stack = () if here is None else traceback.walk_stack(here)
        own = [each for each in stack if each[0] is here or not is_plumbing(each[0])][:_MAX_FRAMES]
        shown = "".join(traceback.StackSummary.extract(own[::-1]).format())
        file, line = (own[0][0].f_code.co_filename, own[0][1]) if own else ("", 0)
        return f"{text}. Its thread:\n{shown}".rstrip(), file, line


class TcpControl:
    """A worker's control connection: worker 0's to all others, any other worker's to worker 0.

    Args:
        team: the worker's part in the strategy, referenced weakly: the connection ends with it.
        hellos: by rank, how the workers have introduced themselves.
        endpoint: worker 0's listener on worker 0, its address elsewhere.
    """

    def __init__(self, team: Team, hellos: Sequence[Hello], endpoint: Listener | Address) -> None:
        layout = team.layout
        self._team = weakref.ref(team)
        self._rank, self._worker_of = layout.rank, layout.worker_of
        self._hellos = hellos
        self._coordinator = Coordinator(layout) if self._rank == 0 else Relay(layout)
        self._probe = LoopProbe(self._ask_loop)
        self._peers: dict[int, Peer] = {}
        self._allowed, self._stall = environment.lost_seconds() or 0.0, environment.stall_seconds()
        self._stalled: set[int] = set()
        self._beat_seconds = max(BEAT_SECONDS, layout.workers / MAX_BEATS)
        self._has_failed = False  # the farewell names an error
        self._loop = asyncio.SelectorEventLoop()
        self._leaving = asyncio.Event()
        ending.shorten_reports(self._rank)
        connected: Future[None] = Future()
        arguments = endpoint, connected
        self._thread = threading.Thread(target=self._serve, args=arguments, name="aiodist control", daemon=True)
        self._thread.start()
        connected.result()
        atexit.register(self.close)

    # What the worker calls, in any thread.

    def send(self, message: Message) -> None:
        """Send a message to the coordinator."""
        self._call_soon(self._take, self._rank, message)

    def close(self) -> None:
        """Leave the others, giving them time to receive an error that ends this worker's program."""
        atexit.unregister(self.close)
        if self._thread.is_alive():  # which it is not in a child that the program has forked
            self._call_soon(self._say_farewell, ending.farewell())
            self._thread.join(LEAVE_SECONDS + BEAT_SECONDS)

    def _call_soon(self, fn: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(fn, *arguments)

    # The thread.

    def _serve(self, endpoint: Listener | Address, connected: Future[None]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_until_left(endpoint, connected))

    async def _serve_until_left(self, endpoint: Listener | Address, connected: Future[None]) -> None:
        try:
            found = await (endpoint.admit_all() if isinstance(endpoint, Listener) else connect(endpoint, self._rank))
            self._peers = {rank: Peer(rank, *streams) for rank, streams in found.items()}
            for _, writer in found.values():
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    limit = int((self._allowed or CUT_OFF_SECONDS) * 1000)
                    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        except BaseException as error:  # noqa: BLE001  (the constructor raises it)
            connected.set_exception(error)
            return
        connected.set_result(None)
        receivers = [asyncio.create_task(self._receive_all(peer)) for peer in self._peers.values()]
        self._beat()
        await self._leaving.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                while not self._may_leave():  # noqa: ASYNC110  (it depends on several things)
                    await asyncio.sleep(_LEAVE_POLL_SECONDS)
        for peer in self._peers.values():
            peer.writer.transport.abort()
        self._peers.clear()
        await asyncio.gather(*receivers)

    def _may_leave(self) -> bool:
        if all(peer.farewell is not None for peer in self._peers.values()):
            return True
        is_sending = any(peer.writer.transport.get_write_buffer_size() for peer in self._peers.values())
        return not (self._has_failed or self._coordinator.is_analysing or is_sending)

    def _say_farewell(self, why: str) -> None:
        if not self._leaving.is_set():
            self._has_failed = why != ENDED
            for peer in self._peers.values():
                peer.writer.write(packed(Farewell(why)))
            self._leaving.set()

    async def _receive_all(self, peer: Peer) -> None:
        """Receive what a worker sends, until its connection ends."""
        try:
            while True:
                message = await peer.receive()
                if isinstance(message, Farewell):
                    peer.farewell = message.why
                    self._loop.call_later(FAREWELL_SECONDS, self._lose, peer.rank, message.why)
                else:
                    self._take(peer.rank, message)
        except (EOFError, ConnectionError):
            why = "has died: its connection was closed without a farewell"
        except (OSError, ValueError, zlib.error) as error:
            why = f"is cut off: {error}"
        if self._peers.get(peer.rank) is not peer:  # this worker has closed the connection
            return
        if peer.farewell is None and not self._leaving.is_set():
            self._lose(peer.rank, why)
        else:  # it leaves because this worker does, or is lost a little later, when what it has sent has arrived, too
            self._peers.pop(peer.rank).writer.transport.abort()

    # Heartbeats.

    def _beat(self) -> None:
        """Send heartbeats, and look for silent workers; again and again."""
        self._loop.call_later(self._beat_seconds, self._beat)
        now = time.monotonic()
        self._probe.probe(now)
        self._warn_once(self._rank, self._probe.silent_seconds)
        for peer in list(self._peers.values()):
            peer.writer.write(BEAT)
            if peer.farewell is not None:
                continue
            silent = now - peer.heard - (self._beat_seconds - BEAT_SECONDS)
            peer.farewell = reason_stopped(self._hellos[peer.rank], silent, self._allowed)
            if peer.farewell is not None:  # the connection stays, so that the worker learns of it if it continues
                self._route(self._coordinator.lose(peer.rank, peer.farewell))
            else:
                self._warn_once(peer.rank, silent)
        if self._team() is None:  # the program has dropped the strategy
            self._say_farewell(ENDED)

    def _ask_loop(self, fn: Callable[[], object]) -> bool:
        team = self._team()
        return team is not None and team.driver.ask_loop(fn)

    def _warn_once(self, rank: int, silent: float) -> None:
        """Tell the others that a worker is silent, once it has been for long enough."""
        if silent < self._stall or not self._stall:
            self._stalled.discard(rank)
        elif rank not in self._stalled:
            self._stalled.add(rank)
            hello = self._hellos[rank]
            what, file, line = self._probe.describe() if rank == self._rank else (_NOTHING_HEARD, "", 0)
            text = f"worker {rank} of {len(self._hellos)}, process {hello.pid} on {hello.host}: {what}"
            self._take(rank, Stalled(text, portable(file), line))

    def _lose(self, rank: int, why: str) -> None:
        """Note that a worker is lost, if that is news."""
        if rank in self._peers:
            self._peers.pop(rank).writer.transport.abort()
        self._route(self._coordinator.lose(rank, why))

    # Messages.

    def _take(self, rank: int, message: Message) -> None:
        """Take a message from a worker, or about it."""
        self._route(self._coordinator.take(rank, message))

    def _route(self, sent: Sent) -> None:
        """Send the coordinator's messages to the workers; an error of its own ends the strategy for all."""
        try:
            outgoing = list(sent)
        except Exception as error:
            logging.getLogger("aiodist").exception("the coordinator has failed")
            outgoing = list(self._coordinator.give_up(error))
        for ranks, message in outgoing:
            if isinstance(message, Ask):
                self._loop.call_later(PATIENCE_SECONDS, self._route, self._coordinator.conclude(message.run))
            if self._rank in ranks:
                self._deliver(message)
            peers = [self._peers[rank] for rank in ranks if rank in self._peers]
            data = packed(message) if peers else b""
            for peer in peers:
                peer.writer.write(data)

    def _deliver(self, message: Message) -> None:
        """Give this worker a message from the coordinator."""
        if isinstance(message, Report):
            ending.share(message.report, self._worker_of)
        elif isinstance(message, Lost) and message.why != ENDED:
            ending.losses.append(message.why)
        team = self._team()
        if team is not None:
            team.post(message)
            if isinstance(message, Ask):
                self._loop.call_later(ANSWER_SECONDS, self._answer, message.run)

    def _answer(self, run: int, *, may_wait: bool = True) -> None:
        """Answer for a blocked event loop, or for a worker that has not begun the run.

        If the loop turns, its replicas may still be settling, so it gets twice the time.
        """
        team, is_blocked = self._team(), self._probe.silent_seconds > 2 * PROBE_SECONDS
        if may_wait and not is_blocked:
            self._loop.call_later(ANSWER_SECONDS, partial(self._answer, run, may_wait=False))
        elif team is not None:
            team.answer_for(run, self._probe.describe()[0] if is_blocked else "")
