"""The control connection of separate processes: a thread a worker, with a TCP connection to worker 0.

It works while the engine hangs and while the program's event loop is blocked: the thread has a loop of its own. Every
worker says every quarter of a second that it lives, or less often where they are thousands. **Dead** is whose
connection has ended without a farewell. **Stopped** is a silent process that its machine says is so (`trouble`). **Cut
off** is whose system does not acknowledge for some seconds what is sent to it (``TCP_USER_TIMEOUT``): so a program that
holds the interpreter lock for seconds is not taken for lost, since its system answers for it. Worker 0, which has the
coordinator, loses workers; the others hear of that from it, and lose worker 0 themselves.

**Who may connect.** Worker 0 listens on the loopback interface where all workers are on one machine, else on the one
address that the others use, and stops when all of them are connected. Its address and a secret, which is made for each
strategy, reach the others over the engine's own data path; they stand in no file, argument or environment variable.

Each side sends its rank and 32 random bytes, and then its proof: the HMAC, by the secret, of what it has sent and what
it has received. So what somebody has recorded is worth nothing on another connection; and since worker 0 takes no
rank 0, and the others take no other, neither is what a side has said itself. Worker 0 proves itself last: a worker that
has its proof is let in, and one that has had to make room before that tries again. Nothing that a stranger sends says
how much is read. At most so many connections are unproven at a time, each for some seconds, and the oldest makes room
for the next; all are tasks of one thread. (`multiprocessing.connection` makes such proofs, too, but blocks meanwhile:
there a stranger keeps workers out, or takes a thread.)
"""

from __future__ import annotations

import asyncio
import atexit
import hmac
import logging
import os
import secrets
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
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from aiodist._arrays import environment
from aiodist._runtime.stacks import is_plumbing, other_threads_can_be_looked_at
from aiodist._workers import ending, messages
from aiodist._workers.coordinator import PATIENCE_SECONDS, Coordinator, Sent
from aiodist._workers.layout import Hello, this_machine
from aiodist._workers.messages import Ask, Farewell, Lost, Message, Report, Stalled
from aiodist._workers.record import portable
from aiodist._workers.team import Team

MOST_UNPROVEN: Final = 64
PROOF_SECONDS: Final = 5.0
CONNECT_SECONDS: Final = 60.0

_SECRET_BYTES: Final = 32  # as many as SHA-256 has
_RANK: Final = struct.Struct("<I")
_RETRY_SECONDS: Final = 0.05
_OTHER_FILES: Final = 512
_MOST_QUEUED: Final = 4096

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Address(NamedTuple):
    """Where worker 0 listens, and the secret that both sides prove that they know."""

    host: str
    port: int
    secret: bytes


def proof(secret: bytes, sent: bytes, received: bytes) -> bytes:
    """Return what proves to the other side that this one, which has sent and received that, knows the secret."""
    return hmac.digest(secret, sent + received, "sha256")


async def _prove(streams: Streams, secret: bytes, rank: int) -> int:
    """Return the rank of the worker at the other end, once both sides have proved that they belong; or break off."""
    reader, writer = streams
    own = _RANK.pack(rank) + secrets.token_bytes(_SECRET_BYTES)
    with ExitStack() as stack:
        stack.callback(writer.transport.abort)
        async with asyncio.timeout(PROOF_SECONDS):
            writer.write(own)
            others = await reader.readexactly(len(own))
            (other,) = _RANK.unpack_from(others)
            if rank != 0:
                writer.write(proof(secret, own, others))
            others_proof = await reader.readexactly(_SECRET_BYTES)
        proved = hmac.compare_digest(others_proof, proof(secret, others, own))
        if not proved or (rank == 0) == (other == 0):  # a worker 0 that meets one sees its own bytes come back
            raise ConnectionError("the other end does not know the secret of this strategy")
        stack.pop_all()
    if rank == 0:
        writer.write(proof(secret, own, others))
    return int(other)


class Listener:
    """Worker 0's listening socket: lets in the workers that are expected, and nobody else.

    Attributes:
        address: where it is, with a new secret.
        admitted: by rank, the connections of those who have proved who they are.
        unproven: the connections of which nothing is known yet, in the order in which they came, as tasks.
    """

    def __init__(self, hellos: Sequence[Hello]) -> None:
        self.admitted: dict[int, Streams] = {}
        self.unproven: dict[Any, None] = {}
        self._size = len(hellos)
        self._changed = asyncio.Event()
        _allow_connections(self._size + MOST_UNPROVEN)
        host = environment.control_address()
        if host is None:
            host = "127.0.0.1" if len({hello.machine for hello in hellos}) == 1 else own_address()
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(found[4][:2], family=found[0])
        except OSError as error:
            raise OSError(
                error.errno,
                f"worker 0 cannot listen at {host} ({error}); set AIODIST_CONTROL_ADDRESS there to a name or number of "
                "its machine by which the other workers reach it",
            ) from error
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(_SECRET_BYTES))

    async def admit_all(self) -> dict[int, Streams]:
        """Return the connections of all others, by rank, once they have come; let nobody in after that."""
        with self._socket:
            # Few are accepted in one turn of the loop, so that a worker has some turns before others make it leave.
            server = await asyncio.start_server(self._admit, sock=self._socket, backlog=MOST_UNPROVEN // 4)
            self._socket.listen(_MOST_QUEUED)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    while len(self.admitted) < self._size - 1:
                        await self._changed.wait()
                        self._changed.clear()
            except TimeoutError:
                missing = sorted(set(range(1, self._size)) - set(self.admitted))
                raise ConnectionError(
                    f"workers {missing} have not connected to worker 0 at {self.address.host} within "
                    f"{CONNECT_SECONDS:.0f} s; if that is the wrong network, set AIODIST_CONTROL_ADDRESS"
                ) from None
            finally:
                server.close()
                for task in self.unproven:
                    task.cancel()
        return self.admitted

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a worker in whose rank is proved, and nobody else."""
        if len(self.unproven) == MOST_UNPROVEN:
            oldest = next(iter(self.unproven))
            oldest.cancel()
            del self.unproven[oldest]
        task = asyncio.current_task()
        self.unproven[task] = None
        with suppress(OSError, EOFError, asyncio.CancelledError):  # asyncio's server would log a cancellation
            rank = await _prove((reader, writer), self.address.secret, 0)
            self.admitted[rank] = reader, writer
            self._changed.set()
        self.unproven.pop(task, None)


def own_address() -> str:
    """Return the number of the interface by which this machine reaches others; its name where there is none."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # reserved for documentation; connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _allow_connections(count: int) -> None:
    """Let this process have so many connections, beside what it has open, as far as its system allows it."""
    if sys.platform != "win32":  # which has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = count + _OTHER_FILES
        if 0 <= soft < needed:  # an unlimited one is negative, or greater than anything
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard < 0 else min(needed, hard), hard))


async def connect(address: Address, rank: int) -> dict[int, Streams]:
    """Return this worker's connection, to worker 0; one that is cut off before the proofs is tried again."""
    give_up = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            streams = await asyncio.open_connection(address.host, address.port)
            await _prove(streams, address.secret, rank)
            return {0: streams}
        except (OSError, EOFError) as error:
            if time.monotonic() > give_up:
                raise ConnectionError(
                    f"worker 0 cannot be reached at {address.host}, port {address.port} ({error}); where that is the "
                    "wrong network, set AIODIST_CONTROL_ADDRESS there"
                ) from error
        await asyncio.sleep(_RETRY_SECONDS)


# What travels: messages, and heartbeats.


BEAT_SECONDS: Final = 0.25
MOST_BEATS: Final = 4000
"""How many heartbeats worker 0 hears in a second, each in some 10 µs: with thousands of workers they are rarer."""

ANSWER_SECONDS: Final = 0.5
FAREWELL_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 2.0
CUT_OFF_SECONDS: Final = 10.0
SUSPICIOUS_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 60.0
PULSE_SECONDS: Final = 0.5
MOST_BYTES: Final = 1 << 26
"""How long a message may be, compressed and not."""

_LOOK_SECONDS: Final = 0.005
_MOST_FRAMES: Final = 6
_NOTHING_HEARD: Final = "nothing is heard of it: it is stopped or cut off, or a long call holds the interpreter lock"
_LENGTH: Final = struct.Struct("<I")
BEAT: Final = _LENGTH.pack(0)
BREAKS: Final = EOFError, OSError, ValueError, zlib.error
"""What ends a connection: its own end, and what is no message."""


def packed(message: Message) -> bytes:
    """Return a message as it is sent: a report of thousands of replicas, to each of their workers, is mostly alike."""
    data = zlib.compress(messages.encode(message), level=1)
    return _LENGTH.pack(len(data)) + data


# Whether a silent worker's process is stopped, and for how long its event loop has not turned.


def trouble(hello: Hello, silent: float, allowed: float) -> str | None:
    """Return why a worker counts as stopped that has been silent for so many seconds, of which the user allows some."""
    if hello.machine != this_machine():
        is_over = silent > max(SILENT_SECONDS, allowed)
        return f"has been silent for {silent:.0f} s, though its system answers: it is stopped" if is_over else None
    if silent > max(SUSPICIOUS_SECONDS, allowed):
        with suppress(OSError):  # this system is not Linux, or the process has ended
            status = Path(f"/proc/{hello.pid}/stat").read_text()
            if status.rpartition(")")[2].split()[0] in {"T", "t"}:  # as by SIGSTOP, or a debugger
                return "is stopped: the system has halted its process"
    return None


class Pulse:
    """Asks this worker's event loop now and then whether it still turns, from another thread.

    ``ask_loop`` has the loop call a function, and returns whether there is a loop.
    """

    def __init__(self, ask_loop: Callable[[Callable[[], object]], bool]) -> None:
        self._ask_loop = ask_loop
        self._asked = False
        self._heard = time.monotonic()
        self._thread = threading.main_thread().ident

    def beat(self, now: float) -> None:
        """Ask again, if the last question has been answered."""
        if not self._asked and now - self._heard >= PULSE_SECONDS:
            self._asked = True
            if not self._ask_loop(self._answer):
                self._asked, self._heard = False, now

    def _answer(self) -> None:
        self._heard = time.monotonic()
        self._asked = False
        self._thread = threading.get_ident()

    @property
    def silent_seconds(self) -> float:
        """For how long the loop has been asked, and has not answered."""
        return time.monotonic() - self._heard if self._asked else 0.0

    def silence(self) -> tuple[str, str, int]:
        """Return what to report of a loop that does not answer: a text, and the file and line that its thread is at."""
        text = f"its event loop has been silent for {self.silent_seconds:.1f} s: something blocks it"
        if not other_threads_can_be_looked_at():
            return text, "", 0
        here = sys._current_frames().get(self._thread or 0)  # noqa: SLF001  (CPython has no other way)
        stack = () if here is None else traceback.walk_stack(here)
        own = [each for each in stack if each[0] is here or not is_plumbing(each[0])][:_MOST_FRAMES]
        shown = "".join(traceback.StackSummary.extract(own[::-1]).format())
        file, line = (own[0][0].f_code.co_filename, own[0][1]) if own else ("", 0)
        return f"{text}. Its thread:\n{shown}".rstrip(), file, line


# The connections.


class Peer:
    """A worker at the other end of a connection.

    Attributes:
        heard: when something came last, by the monotonic clock.
        farewell: why it ends, once it has said so.
    """

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank = rank
        self.heard = time.monotonic()
        self.farewell: str | None = None
        self._reader = reader
        self.writer = writer

    async def receive(self) -> Message:
        """Return the next message; others of `BREAKS` than EOFError and OSError say that what comes is none."""
        length = 0
        while not length:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            self.heard = time.monotonic()
        if length > MOST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        inflater = zlib.decompressobj()
        data = inflater.decompress(await self._reader.readexactly(length), MOST_BYTES)
        if not inflater.eof:
            raise ValueError("a message that is longer than it may be, or cut short")
        message = messages.decode(data)
        if not isinstance(message, messages.ToWorker if self.rank == 0 else messages.ToCoordinator):
            raise ValueError(f"worker {self.rank} does not send a {type(message).__name__}")  # noqa: TRY004
        return message


class TcpControl:
    """A worker's control connection: of worker 0 to all others, of another one to worker 0.

    Args:
        team: the worker, which is not kept: the connection ends with it.
        hellos: what the workers have said of themselves.
        endpoint: on worker 0 what listens for the others; elsewhere its address.
    """

    def __init__(self, team: Team, hellos: Sequence[Hello], endpoint: Listener | Address) -> None:
        layout = team.layout
        self._team = weakref.ref(team)
        self._rank = layout.rank
        self._hellos = hellos
        self._coordinator = Coordinator(layout) if self._rank == 0 else None
        self._pulse = Pulse(self._ask_loop)
        self._peers: dict[int, Peer] = {}
        self._allowed, self._stall = environment.lost_seconds() or 0.0, environment.stall_seconds()
        self._stalled: set[int] = set()
        self._beat_seconds = max(BEAT_SECONDS, layout.workers / MOST_BEATS)
        self._lingers = False
        self._process = os.getpid()
        self._loop = asyncio.SelectorEventLoop()
        self._leaving = asyncio.Event()
        self._left = threading.Event()
        ending.shorten_reports(self._rank)
        connected: Future[None] = Future()
        threading.Thread(target=self._serve, args=(endpoint, connected), name="aiodist control", daemon=True).start()
        connected.result()
        atexit.register(self.close)

    # What the worker calls, in any thread.

    def send(self, message: Message) -> None:
        """Tell the coordinator something."""
        self._request(self._tell_coordinator, self._rank, message)

    def close(self) -> None:
        """Tell the others that this worker leaves them; give them time to hear of an error that ends its program."""
        atexit.unregister(self.close)
        if os.getpid() == self._process:  # what the program has forked has no part in it
            self._request(self._say_farewell, ending.farewell())
            self._left.wait(LEAVE_SECONDS + BEAT_SECONDS)

    def _request(self, fn: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(fn, *arguments)

    # The thread.

    def _serve(self, endpoint: Listener | Address, connected: Future[None]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_left(endpoint, connected))
        self._left.set()

    async def _until_left(self, endpoint: Listener | Address, connected: Future[None]) -> None:
        try:
            found = await (endpoint.admit_all() if isinstance(endpoint, Listener) else connect(endpoint, self._rank))
            self._peers = {rank: Peer(rank, *streams) for rank, streams in found.items()}
            for _, writer in found.values():
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    limit = int((self._allowed or CUT_OFF_SECONDS) * 1000)
                    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        except BaseException as error:  # noqa: BLE001  (it is for the constructor, which waits)
            connected.set_exception(error)
            return
        connected.set_result(None)
        hearing = [asyncio.create_task(self._hear(peer)) for peer in self._peers.values()]
        self._beat()
        await self._leaving.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                while not self._may_leave():  # noqa: ASYNC110  (much may let it leave)
                    await asyncio.sleep(_LOOK_SECONDS)
        for peer in self._peers.values():
            peer.writer.transport.abort()
        self._peers.clear()
        await asyncio.gather(*hearing)

    def _may_leave(self) -> bool:
        if all(peer.farewell is not None for peer in self._peers.values()):
            return True
        is_analysing = self._coordinator is not None and self._coordinator.is_analysing
        is_sending = any(peer.writer.transport.get_write_buffer_size() for peer in self._peers.values())
        return not (self._lingers or is_analysing or is_sending)

    def _say_farewell(self, why: str) -> None:
        if not self._leaving.is_set():
            self._lingers = why != ending.ENDED
            for peer in self._peers.values():
                peer.writer.write(packed(Farewell(why)))
            self._leaving.set()

    def _beat(self) -> None:
        self._loop.call_later(self._beat_seconds, self._beat)
        now = time.monotonic()
        self._pulse.beat(now)
        self._warn_once(self._rank, self._pulse.silent_seconds, self._pulse.silence)
        for peer in list(self._peers.values()):
            peer.writer.write(BEAT)
            silent = now - peer.heard - (self._beat_seconds - BEAT_SECONDS)
            why = trouble(self._hellos[peer.rank], silent, self._allowed)
            if why is not None:
                self._lose(peer.rank, why)
            else:
                self._warn_once(peer.rank, silent, lambda: (_NOTHING_HEARD, "", 0))
        if self._team() is None:  # nobody has the strategy any more
            self._say_farewell(ending.ENDED)

    def _warn_once(self, rank: int, silent: float, describe: Callable[[], tuple[str, str, int]]) -> None:
        """Let the others hear of a worker's silence, when it is time."""
        if silent < self._stall or not self._stall:
            self._stalled.discard(rank)
        elif rank not in self._stalled:
            self._stalled.add(rank)
            hello, (what, file, line) = self._hellos[rank], describe()
            text = f"worker {rank} of {len(self._hellos)}, process {hello.pid} on {hello.host}: {what}"
            message = Stalled(text, portable(file), line)
            if self._rank != 0 and rank == 0:  # it is the coordinator that is silent
                self._pass_on(message)
            else:
                self._tell_coordinator(rank, message)

    # This worker.

    def _ask_loop(self, fn: Callable[[], object]) -> bool:
        team = self._team()
        return team is not None and team.driver.ask_loop(fn)

    def _pass_on(self, message: Message) -> None:
        """Let this worker hear what the coordinator tells it."""
        if isinstance(message, Report):
            ending.reports_of_all.append(message.report)
        elif isinstance(message, Lost) and message.why != ending.ENDED:
            ending.losses.append(message.why)
        team = self._team()
        if team is not None:
            team.post(message)
            if isinstance(message, Ask):
                self._loop.call_later(ANSWER_SECONDS, self._answer, message.run)

    def _answer(self, run: int, *, again: bool = True) -> None:
        """Tell of a run in the place of an event loop that is blocked, or of a worker that has not begun it.

        Where the loop turns, its replicas may still be settling: they have twice the time.
        """
        team, is_blocked = self._team(), self._pulse.silent_seconds > 2 * PULSE_SECONDS
        if again and not is_blocked:
            self._loop.call_later(ANSWER_SECONDS, partial(self._answer, run, again=False))
        elif team is not None:
            team.answer_for(run, self._pulse.silence()[0] if is_blocked else "")

    # The coordinator.

    def _tell_coordinator(self, rank: int, message: Message) -> None:
        """Tell the coordinator what a worker says, or what is found out about it."""
        if self._coordinator is not None:
            self._coordinate(self._coordinator.take, rank, message)
        elif 0 in self._peers:
            self._peers[0].writer.write(packed(message))

    def _coordinate(self, step: Callable[..., Sent], *arguments: Any) -> None:
        """Let the coordinator take a step, and send what follows; an error of its own ends the strategy for all."""
        assert self._coordinator is not None
        try:
            sent = list(step(*arguments))
        except Exception as error:
            logging.getLogger("aiodist").exception("the coordinator has failed")
            sent = list(self._coordinator.give_up(error))
        for ranks, message in sent:
            if isinstance(message, Ask):
                self._loop.call_later(PATIENCE_SECONDS, self._coordinate, self._coordinator.conclude, message.run)
            data = packed(message)
            for rank in ranks:
                if rank == 0:
                    self._pass_on(message)
                elif rank in self._peers:
                    self._peers[rank].writer.write(data)

    def _lose(self, rank: int, why: str) -> None:
        """Note that a worker is gone; nothing comes of it where that is known."""
        if rank in self._peers:
            self._peers.pop(rank).writer.transport.abort()
        if self._coordinator is not None:
            self._coordinate(self._coordinator.lose, rank, why)
        else:
            self._pass_on(Lost(rank, why))

    # What comes.

    async def _hear(self, peer: Peer) -> None:
        """Take what a worker sends, until its connection ends."""
        try:
            while True:
                message = await peer.receive()
                if isinstance(message, Farewell):
                    peer.farewell = message.why
                    self._loop.call_later(FAREWELL_SECONDS, self._lose, peer.rank, message.why)
                elif self._coordinator is not None:
                    self._tell_coordinator(peer.rank, message)
                else:
                    self._pass_on(message)
        except BREAKS as error:
            has_died = isinstance(error, EOFError | ConnectionError)
            why = "has died: its connection was closed without a farewell" if has_died else f"is cut off: {error}"
        if self._peers.get(peer.rank) is not peer:  # it was ended here
            return
        if peer.farewell is None:
            self._lose(peer.rank, why)
        else:  # who has said farewell is lost a little later, when what was in flight has arrived
            self._peers.pop(peer.rank).writer.transport.abort()
