"""Control connections admit workers but no strangers, whatever they send, and notice workers that are stopped."""

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
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from aiodist._arrays import environment
from aiodist._core.call import Call, OrderCheck, Place
from aiodist._core.ledger import Ledger
from aiodist._core.snapshot import Snapshot
from aiodist._core.terms import ReplicaState
from aiodist._workers import control, ending
from aiodist._workers.coordinator import Coordinator
from aiodist._workers.layout import Hello, Layout, layout_of
from aiodist._workers.messages import Ask, Lost, Message, Query, Trouble, Waiting
from aiodist._workers.record import resolved


def hellos(*machines: str) -> list[Hello]:
    return [Hello("1", ("CPU:0",), "host", machine, os.getpid()) for machine in machines]


@asynccontextmanager
async def listener(size: int = 2) -> AsyncIterator[control.Listener]:
    """Open a listener that admits workers."""
    opened = control.Listener(hellos(*("here",) * size))
    admitting = asyncio.create_task(opened.admit_all())
    await asyncio.sleep(0)
    try:
        yield opened
    finally:
        admitting.cancel()
        await asyncio.wait([admitting])
        for _, writer in opened.admitted.values():
            writer.transport.abort()


class Stranger(NamedTuple):
    """A stranger's connection, and the challenge that it is sent first."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    challenge: bytes

    @classmethod
    async def at(cls, address: control.Address) -> Stranger:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        return cls(reader, writer, await reader.readexactly(36))

    async def is_turned_away(self) -> None:
        with suppress(ConnectionError):
            assert await self.reader.read() == b""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


async def somebody_admitted(opened: control.Listener) -> None:
    while not opened.admitted:  # noqa: ASYNC110  (the listener itself waits for the event)
        await asyncio.sleep(0)


async def admitted(opened: control.Listener) -> None:
    """Admit worker 1, whatever strangers are connected."""
    ((_, writer),) = (await control.connect(opened.address, 1)).values()
    writer.close()
    await somebody_admitted(opened)
    assert list(opened.admitted) == [1]


@pytest.mark.anyio
async def test_star_is_made_at_the_address_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", "localhost")
    opened = control.Listener(hellos("a", "b", "c"))
    admitting = asyncio.create_task(opened.admit_all())
    others = [each[0] for each in await asyncio.gather(*(control.connect(opened.address, rank) for rank in (2, 1)))]
    connections = await admitting
    assert sorted(connections) == [1, 2]
    for _, writer in [*connections.values(), *others]:
        writer.transport.abort()
    with pytest.raises(ConnectionRefusedError):  # nobody listens any more
        socket.create_connection((opened.address.host, opened.address.port))


@pytest.mark.anyio
@pytest.mark.parametrize(("other", "host"), [("one", "127.0.0.1"), ("other", control.own_address())])
async def test_workers_on_one_machine_use_loopback(other: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONNECT_SECONDS", 0.0)
    opened = control.Listener(hellos("one", other))
    assert opened.address.host == host
    assert opened._socket.getsockname()[0] not in {"0.0.0.0", "::"}
    with pytest.raises(ConnectionError, match=r"workers \[1\] have not connected to worker 0 at .* within 0 s; "):
        await opened.admit_all()


def test_address_that_is_none_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", "192.0.2.7")
    with pytest.raises(OSError, match=r"cannot listen at 192\.0\.2\.7 .*set AIODIST_CONTROL_ADDRESS"):
        control.Listener(hellos("one", "other"))


LIMITS = [((256, -1), [(612, -1)]), ((256, 4096), [(612, 4096)]), ((256, 400), [(400, 400)]),
          ((1024, 4096), []), ((-1, -1), [])]  # fmt: skip


@pytest.mark.parametrize(("limit", "expected"), LIMITS)
def test_limit_of_open_files_is_raised_as_needed(limit: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limit)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    control._allow_connections(100)
    assert limits == expected


def test_other_version_of_aiodist_is_refused() -> None:
    told = hellos("a", "a", "a")
    assert layout_of(told).replicas == 3
    told[1] = told[1]._replace(version="2.0")
    with pytest.raises(RuntimeError, match=r"different versions of aiodist: 1, 2\.0, 1, by rank"):
        layout_of(told)


def claim(secret: bytes, challenge: bytes) -> bytes:
    """Return the answer of worker 1 if it knows this secret."""
    own = struct.pack("<I", 1) + b"n" * 32
    return own + control.proof(secret, own, challenge)


GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "http": lambda _: b"GET / HTTP/1.1\r\nHost: here\r\n" + b"x" * 4096,
    "ones": lambda _: b"\xff" * 68,
    "oversized": lambda _: bytes(4 << 20),
    "forged": lambda challenge: claim(b"guessed", challenge),
}


@pytest.mark.anyio
@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_turned_away(sent: Callable[[bytes], bytes]) -> None:
    async with listener() as opened:
        stranger = await Stranger.at(opened.address)
        stranger.writer.write(sent(stranger.challenge))
        await stranger.is_turned_away()
        assert not opened.admitted
        await admitted(opened)


@pytest.mark.anyio
async def test_captured_handshake_is_refused_the_second_time() -> None:
    async with listener(3) as opened:
        worker = await Stranger.at(opened.address)
        captured = claim(opened.address.secret, worker.challenge)
        worker.writer.write(captured)
        await worker.reader.readexactly(32)
        await somebody_admitted(opened)
        stranger = await Stranger.at(opened.address)
        stranger.writer.write(captured)
        await stranger.is_turned_away()
        mirror = await Stranger.at(opened.address)  # worker 0's own answer is no proof, either
        mirror.writer.write(mirror.challenge + control.proof(opened.address.secret, mirror.challenge, mirror.challenge))
        await mirror.is_turned_away()
        assert list(opened.admitted) == [1]
        opened.admitted[1][1].transport.abort()
        await worker.is_turned_away()


@pytest.mark.anyio
async def test_worker_refuses_a_listener_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = control.Address("127.0.0.1", server.getsockname()[1], b"s" * 32)
        monkeypatch.setattr(control, "CONNECT_SECONDS", 0.0)
        coming = asyncio.create_task(control.connect(address, 1))
        with (await asyncio.to_thread(server.accept))[0] as impostor:
            impostor.sendall(bytes(36) + b"p" * 32)
            with pytest.raises(ConnectionError, match="does not know the secret"):
                await coming


@pytest.mark.anyio
@pytest.mark.parametrize("said", [b"", b"half"], ids=["nothing", "half a proof"])
async def test_half_open_connections_keep_no_worker_out(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with listener() as opened:
        strangers = []
        for _ in range(3 * control.MOST_UNPROVEN):
            strangers.append(await Stranger.at(opened.address))
            strangers[-1].writer.write(said)
            assert len(opened.unproven) <= control.MOST_UNPROVEN
        await admitted(opened)
    for stranger in strangers:
        await stranger.is_turned_away()
    assert caplog.records == []


@pytest.mark.anyio
async def test_worker_that_is_evicted_before_its_proof_arrives_knows_it() -> None:
    async with listener() as opened:
        worker = await Stranger.at(opened.address)
        worker.writer.write(claim(opened.address.secret, worker.challenge)[:36])
        strangers = [await Stranger.at(opened.address) for _ in range(control.MOST_UNPROVEN)]
        await worker.is_turned_away()  # without a proof of worker 0, so that `connect` tries again
    for stranger in strangers:
        await stranger.is_turned_away()


@pytest.mark.anyio
async def test_silent_connection_is_closed_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PROOF_SECONDS", 0.01)
    async with listener() as opened:
        stranger = await Stranger.at(opened.address)
        await stranger.is_turned_away()
        assert not opened.unproven


def received(data: bytes, rank: int = 1) -> list[Message]:
    """Return the messages in these bytes from a worker."""
    found: list[Message] = []

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        no_writer: Any = None
        peer = control.Peer(rank, reader, no_writer)
        with suppress(EOFError):
            while True:
                found.append(await peer.receive())

    asyncio.run(read())
    return found


def framed(text: bytes) -> bytes:
    data = zlib.compress(text)
    return struct.pack("<I", len(data)) + data


INVALID = {
    "oversized": struct.pack("<I", control.MOST_BYTES + 1),
    "bomb": framed(bytes(control.MOST_BYTES + 1)),
    "plain": struct.pack("<I", 9) + b'["Query",',
    "pickle": framed(b"\x80\x04."),
    "fields": framed(b'["Query", {"more": 1}]'),
    "name": framed(b'["__class__", {}]'),
    "types": framed(b'["Lost", "1", "x"]'),
    "empty": framed(b'["Trouble"]'),
    "deep": framed(b"[" * 5000),
    "worker 0's": control.packed(Query(0)),
}


@pytest.mark.parametrize("data", INVALID.values(), ids=INVALID)
def test_invalid_message_is_an_error_of_its_connection(data: bytes) -> None:
    with pytest.raises((ValueError, zlib.error)):
        received(data)


def test_heartbeats_and_truncated_messages_are_skipped() -> None:
    whole, beat = control.packed(Lost(1, "is gone")), bytes(4)
    assert received(beat + whole + beat + beat + whole[:-1]) == [Lost(1, "is gone")]
    assert received(control.packed(Query(3)), rank=0) == [Query(3)]


class Worker:
    """Stands in for a `Team`, and keeps the messages that the control connection passes on."""

    def __init__(self, rank: int) -> None:
        self.layout = Layout(rank, [("CPU:0",), ("CPU:0",)])
        self.heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.post = self.heard.put
        self.driver = SimpleNamespace(ask_loop=lambda _: False)


def both(opened: control.Listener) -> list[tuple[Worker, Any]]:
    """Connect two workers by TCP; return each with its control connection or error."""
    teams = [Worker(0), Worker(1)]

    def connected(team: Any) -> Any:
        try:
            return control.TcpControl(team, hellos("here", "here"), opened if team.layout.rank == 0 else opened.address)
        except Exception as error:  # noqa: BLE001  (it is the outcome)
            return error

    with ThreadPoolExecutor() as threads:
        return list(zip(teams, threads.map(connected, teams), strict=True))


def test_error_of_the_coordinator_ends_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ending, "losses", [])
    (first, mine), (second, theirs) = both(control.Listener(hellos("here", "here")))
    broken = Snapshot(OrderCheck.CALL_SITE, (), ())  # without the group of the run
    for each in (theirs, mine):
        each.send(Trouble(0, broken))
    while not isinstance(told := second.heard.get(timeout=60), Lost):
        assert isinstance(told, Ask)
    assert told == Lost(0, "has given up: IndexError: tuple index out of range")
    assert "the coordinator has failed" in caplog.text
    assert not first.heard.empty()
    for each in (mine, theirs):
        each.close()


def test_strategy_that_is_garbage_collected_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "losses", [])
    (first, mine), (second, _) = both(control.Listener(hellos("here", "here")))
    dropped = weakref.ref(second)
    del second
    gc.collect()
    assert dropped() is None
    assert first.heard.get(timeout=60) == Lost(1, "has ended")
    mine.close()


def test_a_replica_that_has_finished_with_a_group_and_ended_is_not_taken_for_one_that_never_made_it() -> None:
    """Worker 1 has completed the group's collective and dropped the group, which worker 0 does not know yet."""
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


def test_worker_on_another_machine_may_be_silent_for_a_minute_or_as_long_as_the_user_says() -> None:
    hello = Hello("1", ("CPU:0",), "host", "a machine that is not this one", 1)
    stopped = "has been silent for 61 s, though its system answers: it is stopped"
    for silent in (control.SUSPICIOUS_SECONDS / 2, control.SILENT_SECONDS - 1, control.SILENT_SECONDS + 1):
        assert control.trouble(hello, silent, 0.0) == (stopped if silent > control.SILENT_SECONDS else None)
        assert control.trouble(hello, silent, 90.0) is None


def test_pulse_tells_for_how_long_a_loop_is_silent_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("aiodist._workers.control.time.monotonic", lambda: now)
    questions: list[Callable[[], Any]] = []

    def ask(answer: Callable[[], Any]) -> bool:
        questions.append(answer)
        return True

    pulse = control.Pulse(ask)
    now = 50.6
    pulse.beat(now)
    pulse.beat(now)
    (answer,) = questions
    assert pulse.silent_seconds < 1
    now = 52.0
    assert pulse.silent_seconds > 1
    with monkeypatch.context() as unlocked:
        unlocked.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        assert pulse.silence() == ("its event loop has been silent for 2.0 s: something blocks it", "", 0)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    told, file, _ = pulse.silence()
    assert file.endswith("control.py")
    assert told.startswith("its event loop has been silent for 2.0 s: something blocks it. Its thread:\n")
    assert re.search(r"test_control\.py\", line \d+, in test_pulse_tells_for_how_long", told)
    answer()
    now = 53.5
    assert pulse.silent_seconds < 1
