"""Control connections: workers are let in, strangers are not, whatever they send; and what a worker may send."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import socket
import stat
import struct
import sys
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
from aiodist._tools.launch.run import _folder_of_notes
from aiodist._workers import ending, handshake
from aiodist._workers.control import MOST_BYTES, Peer, TcpControl, packed
from aiodist._workers.coordinator import Coordinator
from aiodist._workers.handshake import MOST_UNPROVEN, Address, Door, connect, own_address, proof
from aiodist._workers.layout import Hello, Layout, check_versions, made_differently
from aiodist._workers.messages import Ask, Lost, Message, OpenGroup, Query, ReleaseGroup, Report, Trouble, Waiting
from aiodist._workers.portable import resolved

HERE = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def hellos(*machines: str) -> list[Hello]:
    return [Hello("1", ("CPU:0",), "host", machine, os.getpid()) for machine in machines]


def has(family: socket.AddressFamily) -> bool:
    """Whether this machine has a family's number of its own."""
    try:
        with socket.create_server((HERE[family], 0), family=family):
            return True
    except OSError:
        return False


NEEDS_IPV6 = pytest.mark.skipif(not has(socket.AF_INET6), reason="this machine has no IPv6")
FAMILIES = [socket.AF_INET, pytest.param(socket.AF_INET6, marks=NEEDS_IPV6)]


@asynccontextmanager
async def door(size: int = 2) -> AsyncIterator[Door]:
    """Let workers in meanwhile."""
    opened = Door(hellos(*("here",) * size))
    admitting = asyncio.create_task(opened.admit_all())
    await asyncio.sleep(0)
    try:
        yield opened
    finally:
        admitting.cancel()
        await asyncio.wait([admitting])
        for connection in opened.admitted.values():
            connection.close()


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
            await self._to_end()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def let_in(opened: Door) -> None:
    """Wait until somebody is."""
    while not opened.admitted:  # noqa: ASYNC110  (the door itself waits for the event)
        await asyncio.sleep(0)


async def admitted(opened: Door) -> None:
    """Let worker 1 in, beside whatever strangers there are."""
    (await connect(opened.address, 1)).close()
    await let_in(opened)
    assert list(opened.admitted) == [1]


# Where the first worker listens.


@pytest.mark.anyio
@pytest.mark.parametrize("family", FAMILIES)
async def test_star_is_made_by_either_family(family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", HERE[family])
    opened = Door(hellos("a", "b", "c"))
    admitting = asyncio.create_task(opened.admit_all())
    others = await asyncio.gather(*(connect(opened.address, rank) for rank in (2, 1)))
    connections = await admitting
    assert sorted(connections) == [1, 2]
    for each in [*connections.values(), *others]:
        each.close()
    with pytest.raises(ConnectionRefusedError):  # nobody listens any more
        socket.create_connection((opened.address.host, opened.address.port))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("machines", "expected"),
    [(("one", "one"), {"127.0.0.1", "::1"}), (("one", "other"), {own_address()})],
)
async def test_workers_on_one_machine_use_loopback_alone(
    machines: Sequence[str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "CONNECT_SECONDS", 0.0)
    opened = Door(hellos(*machines))
    assert opened.address.host in expected
    assert opened._socket.getsockname()[0] not in {"0.0.0.0", "::"}
    with pytest.raises(ConnectionError, match=r"workers \[1\] have not connected to worker 0 at .* within 0 s; "):
        await opened.admit_all()


def test_address_that_is_none_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", "192.0.2.7")
    with pytest.raises(OSError, match=r"cannot listen at 192\.0\.2\.7 .*set AIODIST_CONTROL_ADDRESS"):
        Door(hellos("one", "other"))


# What workers say of themselves.


def workers(count: int) -> list[Hello]:
    return [Hello("1.0", ("CPU:0",) * (rank + 1), f"host {rank}", "machine", rank, "a.py:3") for rank in range(count)]


def test_other_version_of_aiodist_is_refused() -> None:
    told = workers(3)
    check_versions(told)
    told[1] = told[1]._replace(version="2.0")
    with pytest.raises(RuntimeError, match=r"1\.0 on workers 0 and 2; 2\.0 on worker 1"):
        check_versions(told)


def test_strategy_that_is_made_at_different_places() -> None:
    told = workers(3)
    assert made_differently(told) == ""
    told[2] = told[2]._replace(place="a.py:7")
    assert made_differently(told).startswith(
        "The strategy was made by workers 0 and 1 at a.py:3 and by worker 2 at a.py:7"
    )


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
    async with door() as opened:
        stranger = await Stranger.at(opened.address)
        stranger.send(sent(stranger.challenge))
        await stranger.is_turned_away()
        assert not opened.admitted
        await admitted(opened)


@pytest.mark.anyio
async def test_captured_handshake_is_worth_nothing_the_second_time() -> None:
    async with door(3) as opened:
        worker = await Stranger.at(opened.address)
        captured = claim(opened.address.secret, worker.challenge)
        worker.send(captured)
        await worker.read(32)
        await let_in(opened)
        stranger = await Stranger.at(opened.address)
        stranger.send(captured)
        await stranger.is_turned_away()
        mirror = await Stranger.at(opened.address)  # nor is what worker 0 itself says a proof
        mirror.send(mirror.challenge)
        mirror.send(await mirror.read(32))
        await mirror.is_turned_away()
        assert list(opened.admitted) == [1]
        opened.admitted[1].close()
        await worker.is_turned_away()


@pytest.mark.anyio
async def test_worker_does_not_believe_who_listens_without_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1], b"s" * 32)
        coming = asyncio.create_task(handshake._connected(address, 1))
        await asyncio.sleep(0)
        with server.accept()[0] as impostor:
            impostor.sendall(bytes(36) + b"p" * 32)
            with pytest.raises(ConnectionError, match="does not know the secret"):
                await coming


@pytest.mark.anyio
@pytest.mark.parametrize("said", [b"", b"half"], ids=["nothing", "half a proof"])
async def test_many_half_open_connections_are_few_at_a_time_and_keep_nobody_out(said: bytes) -> None:
    async with door() as opened:
        strangers = []
        for _ in range(3 * MOST_UNPROVEN):
            strangers.append(await Stranger.at(opened.address))
            strangers[-1].send(said)
            assert len(opened.unproven) <= MOST_UNPROVEN
        await admitted(opened)
    for stranger in strangers:
        await stranger.is_turned_away()


@pytest.mark.anyio
async def test_who_says_nothing_is_turned_away_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROOF_SECONDS", 0.01)
    async with door() as opened:
        stranger = await Stranger.at(opened.address)
        await stranger.is_turned_away()
        assert not opened.unproven


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
        struct.pack("<I", MOST_BYTES + 1),
        framed(bytes(MOST_BYTES + 1)),
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
    with pytest.raises(ValueError, match=r"."):
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


def both(opened: Door) -> list[tuple[Worker, Any]]:
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
    monkeypatch.setattr(ending, "unfinished", [])
    (first, its_control), (second, control) = both(Door(hellos("here", "here")))
    control.send(OpenGroup(0, ((0, 1), None, 0), (0, 1)))
    control.send(ReleaseGroup(7))  # of a tag that was never given: an error of whoever asks, and not a bad message
    for team in (first, second):
        assert team.heard.get(timeout=60) == Lost(0, "has given up: IndexError: list index out of range")
    assert "the coordinator has failed" in caplog.text
    for each in (its_control, control):
        each.close()


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_connection_that_cannot_be_used_is_an_error_of_the_constructor(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(**_: object) -> None:
        raise kind("no buffer space")

    monkeypatch.setattr("aiodist._workers.control.asyncio.open_connection", fail)
    for _, outcome in both(Door(hellos("here", "here"))):
        assert repr(outcome) == f"{kind.__name__}('no buffer space')"


def test_limit_that_is_no_number_is_an_error_of_the_constructor_and_not_of_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIODIST_LOST_SECONDS", "soon")
    for _, outcome in both(Door(hellos("here", "here"))):
        assert "AIODIST_LOST_SECONDS must" in str(outcome)


def test_a_failing_analysis_still_gives_all_workers_a_report() -> None:
    layout = Layout(0, [["CPU:0"], ["CPU:0"]])
    broken = Snapshot(OrderCheck.CALL_SITE, (), ())  # without the run's own group
    coordinator = Coordinator(layout)
    sent = [each for rank in (0, 1) for each in coordinator.take(rank, Trouble(0, broken))]
    (ranks, message) = sent[-1]
    assert ranks == (0, 1)
    assert isinstance(message, Report)
    assert "the analysis of why failed: IndexError" in message.report.text


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


@pytest.mark.skipif(os.name != "posix", reason="the permissions of files are POSIX's")
@pytest.mark.anyio
async def test_other_users_see_no_secret_in_files_or_variables() -> None:
    with _folder_of_notes() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700  # noqa: PTH116
        async with door() as opened:
            everything = "".join([*environment.with_workers(2, folder).values(), *sys.argv])
            assert opened.address.secret.hex() not in everything


# As many file descriptors as worker 0 needs.


@pytest.mark.parametrize(("count", "soft"), [(700, 1024), (3000, 3256)])
def test_soft_limit_of_files_is_raised_where_it_must_be(count: int, soft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    handshake.allow_connections(count)
    assert limits[-1] == (soft, 4096)
    with pytest.raises(OSError, match=r"needs 4351 file descriptors.* allows it 4096; raise the hard") as raised:
        handshake.allow_connections(4095)
    assert raised.value.errno == errno.EMFILE
