"""The control connection: it admits workers and no strangers, whatever they send, and detects silent workers."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import re
import socket
import struct
import sys
import weakref
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist._arrays import environment
from aiodist._core.call import Call, OrderCheck, Place
from aiodist._core.errors import CollectiveTimeoutError
from aiodist._core.ledger import Ledger
from aiodist._core.report import CollectiveReport, ReplicaReport
from aiodist._core.snapshot import Snapshot
from aiodist._core.terms import Reason, ReplicaState
from aiodist._workers import admission, ending
from aiodist._workers.admission import MAX_PENDING, Address, Listener, connect, own_address, proof
from aiodist._workers.control import (
    MAX_BYTES,
    SILENT_SECONDS,
    SUSPICIOUS_SECONDS,
    LoopProbe,
    Peer,
    TcpControl,
    packed,
    reason_stopped,
)
from aiodist._workers.coordinator import Coordinator, Relay
from aiodist._workers.layout import Hello, Layout, layout_of
from aiodist._workers.messages import Ask, Farewell, Lost, Message, Query, Trouble, Waiting
from aiodist._workers.record import resolved


def hellos(*machines: str) -> list[Hello]:
    return [Hello("1", ("CPU:0",), "host", machine, os.getpid()) for machine in machines]


@asynccontextmanager
async def listener(size: int = 2) -> AsyncIterator[Listener]:
    """Admit workers inside the block."""
    opened = Listener(hellos(*("here",) * size))
    admitting = asyncio.create_task(opened.admit_all())
    await asyncio.sleep(0)
    try:
        yield opened
    finally:
        admitting.cancel()
        await asyncio.wait([admitting])
        for _, writer in opened.admitted.values():
            writer.transport.abort()


class Stranger:
    """A connection to worker 0 that follows no protocol, and the challenge that it has received."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, challenge: bytes) -> None:
        self.reader, self._writer, self.challenge = reader, writer, challenge
        self.send = writer.write

    @classmethod
    async def at(cls, address: Address) -> Stranger:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        return cls(reader, writer, await reader.readexactly(36))

    async def is_rejected(self) -> None:
        with suppress(ConnectionError):
            assert await self.reader.read() == b""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def first_admission(opened: Listener) -> None:
    while not opened.admitted:  # noqa: ASYNC110  (the listener sets an event only when all are there)
        await asyncio.sleep(0)


async def worker_1_is_admitted(opened: Listener) -> None:
    ((_, writer),) = (await connect(opened.address, 1)).values()
    writer.close()
    await first_admission(opened)
    assert list(opened.admitted) == [1]


# Where worker 0 listens.


@pytest.mark.anyio
async def test_listener_at_a_configured_address_connects_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", "localhost")
    opened = Listener(hellos("a", "b", "c"))
    admitting = asyncio.create_task(opened.admit_all())
    others = [each[0] for each in await asyncio.gather(*(connect(opened.address, rank) for rank in (2, 1)))]
    connections = await admitting
    assert sorted(connections) == [1, 2]
    for _, writer in [*connections.values(), *others]:
        writer.transport.abort()
    with pytest.raises(ConnectionRefusedError):  # it listens no more
        socket.create_connection((opened.address.host, opened.address.port))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("machines", "expected"),
    [(("one", "one"), {"127.0.0.1"}), (("one", "other"), {own_address()})],
)
async def test_listener_uses_one_interface_and_loopback_if_all_workers_are_on_one_machine(
    machines: Sequence[str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CONNECT_SECONDS", 0.0)
    opened = Listener(hellos(*machines))
    assert opened.address.host in expected
    assert opened._socket.getsockname()[0] not in {"0.0.0.0", "::"}
    with pytest.raises(ConnectionError, match=r"workers \[1\] have not connected to worker 0 at .* within 0 s; "):
        await opened.admit_all()


def test_listener_at_an_address_of_another_machine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", "192.0.2.7")
    with pytest.raises(OSError, match=r"^worker 0 cannot listen at 192\.0\.2\.7 .*set AIODIST_CONTROL_ADDRESS"):
        Listener(hellos("one", "other"))


@pytest.mark.parametrize(
    ("soft", "hard", "most"), [(256, -1, 612), (256, 4096, 612), (256, 400, 400), (1024, 4096, None), (-1, -1, None)]
)
def test_limit_of_open_files_is_raised_as_far_as_needed_and_permitted(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int | None
) -> None:
    resource = pytest.importorskip("resource")
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    admission._allow_connections(100)
    assert limits == ([] if most is None else [(most, hard)])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"version": "2.0"}, "different versions of aiodist: 1, 2.0, 1, by rank"),
        ({"order_check": "signature"}, "different values of order_check: call_site, signature, call_site, by rank"),
        ({"reduction": "ordered"}, "different values of reduction: fast, ordered, fast, by rank"),
    ],
)
def test_workers_that_differ_are_refused(other: dict[str, Any], message: str) -> None:
    introduced = hellos("a", "a", "a")
    assert layout_of(introduced).replicas == 3
    introduced[1] = introduced[1]._replace(**other)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        layout_of(introduced)


# Strangers.


def response(secret: bytes, challenge: bytes) -> bytes:
    """Return what worker 1 answers if it knows this secret."""
    own = struct.pack("<I", 1) + b"n" * 32
    return own + proof(secret, own, challenge)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "sent",
    [
        lambda _: b"GET / HTTP/1.1\r\nHost: here\r\n" + b"x" * 4096,
        lambda _: b"\xff" * 68,
        lambda _: bytes(4 << 20),
        lambda challenge: response(b"guessed", challenge),
    ],
    ids=["http", "ones", "oversized", "forged"],
)
async def test_garbage_and_guessed_proofs_are_rejected(sent: Callable[[bytes], bytes]) -> None:
    async with listener() as opened:
        stranger = await Stranger.at(opened.address)
        stranger.send(sent(stranger.challenge))
        await stranger.is_rejected()
        assert not opened.admitted
        await worker_1_is_admitted(opened)


@pytest.mark.anyio
async def test_replayed_and_echoed_handshakes_are_rejected() -> None:
    async with listener(3) as opened:
        worker = await Stranger.at(opened.address)
        captured = response(opened.address.secret, worker.challenge)
        worker.send(captured)
        await worker.reader.readexactly(32)
        await first_admission(opened)
        replay = await Stranger.at(opened.address)
        replay.send(captured)
        await replay.is_rejected()
        echo = await Stranger.at(opened.address)
        echo.send(echo.challenge + proof(opened.address.secret, echo.challenge, echo.challenge))
        await echo.is_rejected()
        assert list(opened.admitted) == [1]
        opened.admitted[1][1].transport.abort()
        await worker.is_rejected()


@pytest.mark.anyio
async def test_listener_without_the_secret_is_rejected_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1], b"s" * 32)
        monkeypatch.setattr(admission, "CONNECT_SECONDS", 0.0)
        connecting = asyncio.create_task(connect(address, 1))
        with (await asyncio.to_thread(server.accept))[0] as impostor:
            impostor.sendall(bytes(36) + b"p" * 32)
            with pytest.raises(ConnectionError, match="does not know the secret"):
                await connecting


@pytest.mark.anyio
@pytest.mark.parametrize("sent", [b"", b"half"], ids=["nothing", "half a proof"])
async def test_pending_handshakes_are_limited_and_keep_no_worker_out(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listener() as opened:
        strangers = []
        for _ in range(3 * MAX_PENDING):
            strangers.append(await Stranger.at(opened.address))
            strangers[-1].send(sent)
            assert len(opened.pending) <= MAX_PENDING
        await worker_1_is_admitted(opened)
    for stranger in strangers:
        await stranger.is_rejected()
    assert caplog.records == []


@pytest.mark.anyio
async def test_worker_whose_pending_handshake_is_dropped_receives_no_proof() -> None:
    """Otherwise it would believe that it has been admitted; now `connect` tries again."""
    async with listener() as opened:
        worker = await Stranger.at(opened.address)
        worker.send(response(opened.address.secret, worker.challenge)[:36])
        strangers = [await Stranger.at(opened.address) for _ in range(MAX_PENDING)]
        await worker.is_rejected()
    for stranger in strangers:
        await stranger.is_rejected()


@pytest.mark.anyio
async def test_silent_stranger_is_rejected_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_SECONDS", 0.01)
    async with listener() as opened:
        stranger = await Stranger.at(opened.address)
        await stranger.is_rejected()
        assert not opened.pending


# What a worker may send.


def received(data: bytes, rank: int = 1) -> list[Message]:
    """Return the messages in what a worker has sent."""
    found: list[Message] = []

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        nothing_is_written: Any = None
        peer = Peer(rank, reader, nothing_is_written)
        with suppress(EOFError):
            while True:
                found.append(await peer.receive())

    asyncio.run(read())
    return found


def framed(text: bytes) -> bytes:
    data = zlib.compress(text)
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_BYTES + 1),
        framed(bytes(MAX_BYTES + 1)),
        struct.pack("<I", 9) + b'["Query",',
        framed(b"\x80\x04."),
        framed(b'["Query", {"more": 1}]'),
        framed(b'["__class__", {}]'),
        framed(b'["Lost", "1", "x"]'),
        framed(b'["Trouble"]'),
        framed(b"[" * 5000),
        packed(Query(0)),
    ],
    ids=["oversized", "bomb", "plain", "pickle", "fields", "name", "types", "empty", "deep", "worker 0's"],
)
def test_data_that_is_no_message_of_a_worker_is_an_error(data: bytes) -> None:
    with pytest.raises((ValueError, zlib.error)):
        received(data)


def test_heartbeats_and_truncated_messages_are_skipped() -> None:
    whole, beat = packed(Lost(1, "is gone")), bytes(4)
    assert received(beat + whole + beat + beat + whole[:-1]) == [Lost(1, "is gone")]
    assert received(packed(Query(3)), rank=0) == [Query(3)]


class Worker:
    """Stands for a `Team`: keeps the messages that the control connection delivers."""

    def __init__(self, rank: int, workers: int = 2) -> None:
        self.layout = Layout(rank, [("CPU:0",)] * workers)
        self.delivered: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.post = self.delivered.put
        self.driver = SimpleNamespace(ask_loop=lambda _: False)


def test_stopped_worker_learns_why_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may continue later, when the others have ended because of it."""
    monkeypatch.setattr(ending, "losses", [])
    reason = lambda hello, *_: "is stopped" if hello.machine == "there" else None  # noqa: E731
    monkeypatch.setattr("aiodist._workers.control.reason_stopped", reason)
    workers = connected_workers()
    for worker, _ in workers:
        assert worker.delivered.get(timeout=60) == Lost(1, "is stopped")
    for _, connection in workers:
        connection.close()


def test_report_is_shown_in_full_by_the_first_worker_that_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "shared_reports", [])
    states = [ReplicaState.RUNNING, ReplicaState.FAILED, ReplicaState.WAITING, ReplicaState.WAITING]
    replicas = tuple(ReplicaReport(i, "CPU:0", state) for i, state in enumerate(states))
    error = CollectiveTimeoutError(CollectiveReport(Reason.TIMEOUT, 0, replicas, (0, 1), "timed out\nmore"))
    ending.share(error.report, Layout(0, [["CPU:0"] * 2] * 2).worker_of)
    for rank in (0, 1):
        monkeypatch.setattr(sys, "excepthook", lambda *_: sys.stderr.write("in full\n"))
        ending.shorten_reports.__wrapped__(rank)
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "CollectiveTimeoutError: timed out (worker 0; worker 1 shows more)\nin full\n"


def connected_workers() -> list[tuple[Worker, TcpControl]]:
    """Return two workers connected by TCP."""
    opened, teams = Listener(hellos("here", "here")), [Worker(0), Worker(1)]

    def connected(team: Any) -> TcpControl:
        return TcpControl(team, hellos("here", "there"), opened if team.layout.rank == 0 else opened.address)

    with ThreadPoolExecutor() as threads:
        return list(zip(teams, threads.map(connected, teams), strict=True))


def test_coordinator_with_an_error_of_its_own_ends_the_strategy_of_all_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "losses", [])
    workers = connected_workers()
    without_root = Snapshot(OrderCheck.CALL_SITE, (), ())  # lacks the run's own group
    for _, control in workers:
        control.send(Trouble(0, without_root))
    for worker, _ in workers:
        while not isinstance(message := worker.delivered.get(timeout=60), Lost):
            assert isinstance(message, Ask)
        assert message == Lost(0, "has given up: IndexError: tuple index out of range")
    assert "the coordinator has failed" in caplog.text
    for _, control in workers:
        control.close()


def test_worker_whose_program_drops_the_strategy_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "losses", [])
    (first, control), (second, _) = connected_workers()
    dropped = weakref.ref(second)
    del second
    gc.collect()
    assert dropped() is None
    assert first.delivered.get(timeout=60) == Lost(1, "has ended")
    control.close()


def test_worker_that_leaves_because_the_first_one_does_is_not_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "losses", [])
    monkeypatch.setattr(ending, "farewell", lambda: "has ended: ValueError: bad data")
    machines = hellos("here", "here", "here")
    opened, first, last = Listener(machines), Worker(0, 3), Worker(2, 3)

    async def leave() -> None:
        peer = Peer(0, *(await connect(opened.address, 1))[0])
        while not isinstance(await peer.receive(), Farewell):
            pass
        peer.writer.transport.abort()

    def connected(team: Any) -> TcpControl:
        return TcpControl(team, machines, opened if team is first else opened.address)

    with ThreadPoolExecutor() as threads:
        left = threads.submit(asyncio.run, leave())
        controls = list(threads.map(connected, [first, last]))
        controls[0].close()
        left.result()
    assert last.delivered.get(timeout=60) == Lost(0, "has ended: ValueError: bad data")
    controls[1].close()


def test_coordinator_that_hears_of_an_ended_replica_knows_that_it_made_a_group_before() -> None:
    """Worker 1 has completed the group's collective and dropped the group; worker 0 does not know that yet."""
    here, call = Place("train.py", 3, 4, "train"), Call("barrier")
    snapshots = []
    for rank in (0, 1):
        ledger = Ledger([rank], total=2)
        member = ledger.root.new_group(ledger.root.members[0], (0, 1), None, here, 0)
        slot = member.group.post(member, call, here, 0)
        if rank == 1:
            member.group.complete(slot)
            del member, slot
            ledger.end(ledger.replicas[0], ReplicaState.EXITED)
        snapshots.append(ledger.snapshot(blocked=(0,) if rank == 0 else ()))
    coordinator = Coordinator(Layout(0, [["CPU:0"], ["CPU:0"]]))
    assert list(coordinator.take(0, Waiting(0, snapshots[0]))) == [((1,), Query(0))]
    assert not list(coordinator.take(1, Waiting(0, snapshots[1], is_answer=True)))
    never_made = replace(snapshots[1], groups=snapshots[1].groups[:1])
    assert list(coordinator.take(1, Waiting(0, never_made, is_answer=True))) == [((0, 1), Ask(0))]


def test_relay_passes_messages_between_worker_0_and_its_own_worker() -> None:
    relay = Relay(Layout(1, [["CPU:0"]] * 3))
    assert list(relay.take(1, Lost(1, "has given up"))) == [((0,), Lost(1, "has given up"))]
    assert list(relay.take(0, Query(0))) == [((1,), Query(0))]
    assert list(relay.lose(0, "has died")) == [((1,), Lost(0, "has died"))]


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd"])
def test_names_with_path_separators_name_no_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(name) == name  # as it was sent, and not a file of this machine
    monkeypatch.setenv("AIODIST_TRACE", "trace.json")
    monkeypatch.setenv("AIODIST_WORKERS", "2")
    for variable in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.setenv(variable, name)
    assert environment.trace_path() == "trace.0.json"


@pytest.mark.anyio
async def test_secret_is_in_no_argument_or_environment_variable() -> None:
    async with listener() as opened:
        visible = "".join([*environment.with_workers(2, "folder").values(), *sys.argv])
        assert opened.address.secret.hex() not in visible


# Silent workers.


@pytest.mark.parametrize(
    ("silent", "reason"),
    [
        (SUSPICIOUS_SECONDS / 2, None),
        (SILENT_SECONDS - 1, None),
        (SILENT_SECONDS + 1, "has been silent for 61 s, though its system answers: it is stopped"),
    ],
)
def test_worker_on_another_machine_may_be_silent_for_a_minute_or_as_configured(
    silent: float, reason: str | None
) -> None:
    hello = Hello("1", ("CPU:0",), "host", "a machine that is not this one", 1)
    assert reason_stopped(hello, silent, 0.0) == reason
    assert reason_stopped(hello, silent, 90.0) is None


def test_probe_of_a_silent_loop_tells_for_how_long_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("aiodist._workers.control.time.monotonic", lambda: now)
    questions: list[Callable[[], Any]] = []

    def ask(answer: Callable[[], Any]) -> bool:
        questions.append(answer)
        return True

    probe = LoopProbe(ask)
    now = 50.6
    probe.probe(now)
    probe.probe(now)
    (answer,) = questions
    assert probe.silent_seconds < 1
    now = 52.0
    assert probe.silent_seconds > 1
    with monkeypatch.context() as unlocked:
        unlocked.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        assert probe.describe() == ("its event loop has been silent for 2.0 s: something blocks it", "", 0)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    text, file, _ = probe.describe()
    assert file.endswith("control.py")
    assert text.startswith("its event loop has been silent for 2.0 s: something blocks it. Its thread:\n")
    assert re.search(r"test_control\.py\", line \d+, in test_probe_of_a_silent_loop", text)
    answer()
    now = 53.5
    assert probe.silent_seconds < 1
