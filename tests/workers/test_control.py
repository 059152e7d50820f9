"""Control connections: workers are let in, strangers are not, whatever they send; and who counts as stopped."""

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
from aiodist._core.ledger import Ledger
from aiodist._core.snapshot import Snapshot
from aiodist._core.terms import ReplicaState
from aiodist._workers import control as control_module
from aiodist._workers import ending
from aiodist._workers.control import (
    MAX_BYTES,
    MAX_PENDING,
    SILENT_SECONDS,
    SUSPICIOUS_SECONDS,
    Address,
    Listener,
    LoopProbe,
    Peer,
    TcpControl,
    connect,
    own_address,
    packed,
    proof,
    reason_stopped,
)
from aiodist._workers.coordinator import Coordinator
from aiodist._workers.layout import Hello, Layout, layout_of
from aiodist._workers.messages import Ask, Lost, Message, Query, Trouble, Waiting
from aiodist._workers.record import resolved


def hellos(*machines: str) -> list[Hello]:
    return [Hello("1", ("CPU:0",), "host", machine, os.getpid()) for machine in machines]


@asynccontextmanager
async def listener(size: int = 2) -> AsyncIterator[Listener]:
    """Let workers in meanwhile."""
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
    """A stranger's connection, and what it is sent first."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, challenge: bytes) -> None:
        self.read, self._writer, self.challenge = reader.readexactly, writer, challenge
        self._to_end = reader.read

    @classmethod
    async def at(cls, address: Address) -> Stranger:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        return cls(reader, writer, await reader.readexactly(36))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def is_turned_away(self) -> None:
        with suppress(ConnectionError):
            assert await self._to_end() == b""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def let_in(opened: Listener) -> None:
    """Wait until somebody is."""
    while not opened.admitted:  # noqa: ASYNC110  (the listener itself waits for the event)
        await asyncio.sleep(0)


async def admitted(opened: Listener) -> None:
    """Let worker 1 in, beside whatever strangers there are."""
    ((_, writer),) = (await connect(opened.address, 1)).values()
    writer.close()
    await let_in(opened)
    assert list(opened.admitted) == [1]


# Where the first worker listens.


@pytest.mark.anyio
async def test_star_is_made_at_the_address_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", "localhost")
    opened = Listener(hellos("a", "b", "c"))
    admitting = asyncio.create_task(opened.admit_all())
    others = [each[0] for each in await asyncio.gather(*(connect(opened.address, rank) for rank in (2, 1)))]
    connections = await admitting
    assert sorted(connections) == [1, 2]
    for _, writer in [*connections.values(), *others]:
        writer.transport.abort()
    with pytest.raises(ConnectionRefusedError):  # nobody listens any more
        socket.create_connection((opened.address.host, opened.address.port))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("machines", "expected"),
    [(("one", "one"), {"127.0.0.1"}), (("one", "other"), {own_address()})],
)
async def test_workers_on_one_machine_use_loopback_alone(
    machines: Sequence[str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "CONNECT_SECONDS", 0.0)
    opened = Listener(hellos(*machines))
    assert opened.address.host in expected
    assert opened._socket.getsockname()[0] not in {"0.0.0.0", "::"}
    with pytest.raises(ConnectionError, match=r"workers \[1\] have not connected to worker 0 at .* within 0 s; "):
        await opened.admit_all()


def test_address_that_is_none_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", "192.0.2.7")
    with pytest.raises(OSError, match=r"cannot listen at 192\.0\.2\.7 .*set AIODIST_CONTROL_ADDRESS"):
        Listener(hellos("one", "other"))


@pytest.mark.parametrize(
    ("soft", "hard", "most"), [(256, -1, 612), (256, 4096, 612), (256, 400, 400), (1024, 4096, None), (-1, -1, None)]
)
def test_open_files_are_limited_no_less_than_needed_where_the_system_allows_it(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int | None
) -> None:
    resource = pytest.importorskip("resource")
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    control_module._allow_connections(100)
    assert limits == ([] if most is None else [(most, hard)])


# What workers say of themselves.


def test_other_version_of_aiodist_is_refused() -> None:
    told = hellos("a", "a", "a")
    assert layout_of(told).replicas == 3
    told[1] = told[1]._replace(version="2.0")
    with pytest.raises(RuntimeError, match=r"different versions of aiodist: 1, 2\.0, 1, by rank"):
        layout_of(told)


# Strangers.


def claim(secret: bytes, challenge: bytes) -> bytes:
    """What a worker answers that knows this secret."""
    own = struct.pack("<I", 1) + b"n" * 32
    return own + proof(secret, own, challenge)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "sent",
    [
        lambda _: b"GET / HTTP/1.1\r\nHost: here\r\n" + b"x" * 4096,
        lambda _: b"\xff" * 68,
        lambda _: bytes(4 << 20),
        lambda challenge: claim(b"guessed", challenge),
    ],
    ids=["http", "ones", "oversized", "forged"],
)
async def test_garbage_is_turned_away(sent: Callable[[bytes], bytes]) -> None:
    async with listener() as opened:
        stranger = await Stranger.at(opened.address)
        stranger.send(sent(stranger.challenge))
        await stranger.is_turned_away()
        assert not opened.admitted
        await admitted(opened)


@pytest.mark.anyio
async def test_captured_handshake_is_worth_nothing_the_second_time() -> None:
    async with listener(3) as opened:
        worker = await Stranger.at(opened.address)
        captured = claim(opened.address.secret, worker.challenge)
        worker.send(captured)
        await worker.read(32)
        await let_in(opened)
        stranger = await Stranger.at(opened.address)
        stranger.send(captured)
        await stranger.is_turned_away()
        mirror = await Stranger.at(opened.address)  # nor is what worker 0 itself says a proof
        mirror.send(mirror.challenge + proof(opened.address.secret, mirror.challenge, mirror.challenge))
        await mirror.is_turned_away()
        assert list(opened.admitted) == [1]
        opened.admitted[1][1].transport.abort()
        await worker.is_turned_away()


@pytest.mark.anyio
async def test_worker_does_not_believe_who_listens_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1], b"s" * 32)
        monkeypatch.setattr(control_module, "CONNECT_SECONDS", 0.0)
        coming = asyncio.create_task(connect(address, 1))
        with (await asyncio.to_thread(server.accept))[0] as impostor:
            impostor.sendall(bytes(36) + b"p" * 32)
            with pytest.raises(ConnectionError, match="does not know the secret"):
                await coming


@pytest.mark.anyio
@pytest.mark.parametrize("said", [b"", b"half"], ids=["nothing", "half a proof"])
async def test_many_half_open_connections_are_few_at_a_time_and_keep_nobody_out(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listener() as opened:
        strangers = []
        for _ in range(3 * MAX_PENDING):
            strangers.append(await Stranger.at(opened.address))
            strangers[-1].send(said)
            assert len(opened.pending) <= MAX_PENDING
        await admitted(opened)
    for stranger in strangers:
        await stranger.is_turned_away()
    assert caplog.records == []


@pytest.mark.anyio
async def test_worker_that_must_make_room_before_its_proof_has_come_does_not_take_itself_for_let_in() -> None:
    async with listener() as opened:
        worker = await Stranger.at(opened.address)
        worker.send(claim(opened.address.secret, worker.challenge)[:36])
        strangers = [await Stranger.at(opened.address) for _ in range(MAX_PENDING)]
        await worker.is_turned_away()  # without a proof of worker 0's, and so `connect` tries again
    for stranger in strangers:
        await stranger.is_turned_away()


@pytest.mark.anyio
async def test_who_says_nothing_is_turned_away_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "HANDSHAKE_SECONDS", 0.01)
    async with listener() as opened:
        stranger = await Stranger.at(opened.address)
        await stranger.is_turned_away()
        assert not opened.pending


# What a worker may send.


def received(data: bytes, rank: int = 1) -> list[Message]:
    """Return what is made of these bytes of a worker's."""
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
def test_what_is_no_message_is_an_error_of_that_connection(data: bytes) -> None:
    with pytest.raises((ValueError, zlib.error)):
        received(data)


def test_heartbeats_and_truncated_messages_are_no_messages() -> None:
    whole, beat = packed(Lost(1, "is gone")), bytes(4)
    assert received(beat + whole + beat + beat + whole[:-1]) == [Lost(1, "is gone")]
    assert received(packed(Query(3)), rank=0) == [Query(3)]


class Worker:
    """Stands for a `Team`: keeps what the control connection passes on."""

    def __init__(self, rank: int) -> None:
        self.layout = Layout(rank, [("CPU:0",), ("CPU:0",)])
        self.heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.post = self.heard.put
        self.driver = SimpleNamespace(ask_loop=lambda _: False)


def both(opened: Listener) -> list[tuple[Worker, Any]]:
    """Connect two workers by TCP; return each, and its control connection or why it has none."""
    teams = [Worker(0), Worker(1)]

    def connected(team: Any) -> Any:
        try:
            return TcpControl(team, hellos("here", "here"), opened if team.layout.rank == 0 else opened.address)
        except Exception as error:  # noqa: BLE001  (it is the outcome)
            return error

    with ThreadPoolExecutor() as threads:
        return list(zip(teams, threads.map(connected, teams), strict=True))


def test_error_of_the_coordinator_ends_the_strategy_and_is_raised_as_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "losses", [])
    (first, its_control), (second, control) = both(Listener(hellos("here", "here")))
    broken = Snapshot(OrderCheck.CALL_SITE, (), ())  # without the run's own group
    for each in (control, its_control):
        each.send(Trouble(0, broken))
    while not isinstance(told := second.heard.get(timeout=60), Lost):
        assert isinstance(told, Ask)
    assert told == Lost(0, "has given up: IndexError: tuple index out of range")
    assert "the coordinator has failed" in caplog.text
    assert not first.heard.empty()
    for each in (its_control, control):
        each.close()


def test_strategy_that_nobody_has_any_more_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "losses", [])
    (first, its_control), (second, _) = both(Listener(hellos("here", "here")))
    dropped = weakref.ref(second)
    del second
    gc.collect()
    assert dropped() is None
    assert first.heard.get(timeout=60) == Lost(1, "has ended")
    its_control.close()


def test_a_replica_that_has_finished_with_a_group_and_ended_is_not_taken_for_one_that_never_made_it() -> None:
    """Worker 1 has completed the group's collective, and dropped the group; worker 0 does not know of that yet."""
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
    without = replace(snapshots[1], groups=snapshots[1].groups[:1])  # as if it had never made the group
    assert list(coordinator.take(1, Waiting(0, without, is_answer=True))) == [((0, 1), Ask(0))]


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd"])
def test_names_with_path_separators_lead_nowhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(name) == name  # as it was sent, and not as a file that stands here
    monkeypatch.setenv("AIODIST_TRACE", "trace.json")
    monkeypatch.setenv("AIODIST_WORKERS", "2")
    for variable in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.setenv(variable, name)
    assert environment.trace_path() == "trace.0.json"


@pytest.mark.anyio
async def test_other_users_see_no_secret_in_arguments_or_variables() -> None:
    async with listener() as opened:
        everything = "".join([*environment.with_workers(2, "folder").values(), *sys.argv])
        assert opened.address.secret.hex() not in everything


# Silent workers.


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        (SUSPICIOUS_SECONDS / 2, None),
        (SILENT_SECONDS - 1, None),
        (SILENT_SECONDS + 1, "has been silent for 61 s, though its system answers: it is stopped"),
    ],
)
def test_worker_on_another_machine_has_a_minute_or_what_the_user_says(silent: float, told: str | None) -> None:
    hello = Hello("1", ("CPU:0",), "host", "a machine that is not this one", 1)
    assert reason_stopped(hello, silent, 0.0) == told
    assert reason_stopped(hello, silent, 90.0) is None


def test_pulse_tells_for_how_long_a_loop_is_silent_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("aiodist._workers.control.time.monotonic", lambda: now)
    questions: list[Callable[[], Any]] = []

    def ask(answer: Callable[[], Any]) -> bool:
        questions.append(answer)
        return True

    pulse = LoopProbe(ask)
    now = 50.6
    pulse.probe(now)
    pulse.probe(now)
    (answer,) = questions
    assert pulse.silent_seconds < 1
    now = 52.0
    assert pulse.silent_seconds > 1
    with monkeypatch.context() as unlocked:
        unlocked.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        assert pulse.describe() == ("its event loop has been silent for 2.0 s: something blocks it", "", 0)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    told, file, _ = pulse.describe()
    assert file.endswith("control.py")
    assert told.startswith("its event loop has been silent for 2.0 s: something blocks it. Its thread:\n")
    assert re.search(r"test_control\.py\", line \d+, in test_pulse_tells_for_how_long", told)
    answer()
    now = 53.5
    assert pulse.silent_seconds < 1
