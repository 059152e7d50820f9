"""Control connections: workers are let in, strangers are not, whatever they send; and what a worker may send."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiodist._arrays import environment
from aiodist._core.call import Call, OrderCheck, Place
from aiodist._core.ledger import Ledger
from aiodist._core.report import ReplicaState
from aiodist._core.snapshot import Snapshot
from aiodist._tools.launch.notes import folder_of_notes
from aiodist._workers import handshake
from aiodist._workers.control import MOST_BYTES, Peer, TcpControl, packed
from aiodist._workers.coordinator import Coordinator
from aiodist._workers.handshake import MOST_UNPROVEN, Address, Door, connect, own_address
from aiodist._workers.layout import Hello, Layout, check_versions, made_differently
from aiodist._workers.messages import Ask, Beat, Lost, Message, Query, Report, Trouble, Waiting
from aiodist._workers.portable import resolved

HERE = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def hellos(*machines: str) -> list[Hello]:
    return [Hello("1", ("CPU:0",), "host", machine, 1) for machine in machines]


def has(family: socket.AddressFamily) -> bool:
    """Whether this machine has a family's number of its own."""
    try:
        with socket.create_server((HERE[family], 0), family=family):
            return True
    except OSError:
        return False


NEEDS_IPV6 = pytest.mark.skipif(not has(socket.AF_INET6), reason="this machine has no IPv6")
FAMILIES = [socket.AF_INET, pytest.param(socket.AF_INET6, marks=NEEDS_IPV6)]


@contextmanager
def door(size: int = 2) -> Iterator[tuple[Door, Address]]:
    opened = Door(hellos(*("here",) * size))
    try:
        yield opened, opened.address
    finally:
        for connection in opened.connections.values():
            connection.close()
        opened.close()


@contextmanager
def knocking(opened: Door, address: Address) -> Iterator[tuple[socket.socket, bytes]]:
    """A stranger's connection, and what it is challenged with."""
    with closing(socket.create_connection((address.host, address.port), timeout=10)) as connection:
        while len(opened.unproven) == 0 or connection.getsockname() != list(opened.unproven)[-1].getpeername():
            opened.serve(10)
        yield connection, connection.recv(32)


def admitted(opened: Door, address: Address) -> None:
    """Let worker 1 in, beside whatever strangers there are."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(connect, address, 1)
        while not coming.done():
            opened.serve(0.01)
        coming.result().close()
    assert list(opened.connections) == [1]


# Where the first worker listens.


@pytest.mark.parametrize("family", FAMILIES)
def test_star_is_made_by_either_family(family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", HERE[family])
    opened = Door(hellos("a", "b", "c"))
    address = opened.address
    with ThreadPoolExecutor() as pool:
        coming = [pool.submit(connect, address, rank) for rank in (2, 1)]
        connections = opened.admit_all()
        assert sorted(connections) == [1, 2]
        for each in [*connections.values(), *(one.result() for one in coming)]:
            each.close()
    with pytest.raises(ConnectionRefusedError):  # nobody listens any more
        socket.create_connection((address.host, address.port))


@pytest.mark.parametrize(
    ("machines", "expected"),
    [(("one", "one"), {"127.0.0.1", "::1"}), (("one", "other"), {own_address()})],
)
def test_workers_on_one_machine_use_loopback_alone(machines: Sequence[str], expected: set[str]) -> None:
    with closing(Door(hellos(*machines))) as opened:
        assert opened.address.host in expected
        assert opened._socket.getsockname()[0] not in {"0.0.0.0", "::"}


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


def forged(challenge: bytes) -> bytes:
    """A proof with another secret."""
    answer = struct.pack("<I", 1) + b"n" * 32
    return answer + handshake._proof(b"guessed", b"worker", challenge, answer)


@pytest.mark.parametrize(
    "sent",
    [
        lambda _: b"GET / HTTP/1.1\r\nHost: here\r\n" + b"x" * 4096,
        lambda _: b"\xff" * 68,
        lambda _: bytes(4 << 20),
        forged,
    ],
    ids=["http", "ones", "oversized", "forged"],
)
def test_garbage_is_turned_away(sent: Callable[[bytes], bytes]) -> None:
    with door() as (opened, address), knocking(opened, address) as (stranger, challenge):
        stranger.setblocking(False)
        with suppress(BlockingIOError, ConnectionError):
            stranger.send(sent(challenge))
        while opened.unproven:
            opened.serve(10)
        assert not opened.connections
        admitted(opened, address)


def test_captured_handshake_is_worth_nothing_the_second_time() -> None:
    with door(3) as (opened, address):
        with knocking(opened, address) as (worker, challenge):
            answer = struct.pack("<I", 1) + b"n" * 32
            captured = answer + handshake._proof(address.secret, b"worker", challenge, answer)
            worker.sendall(captured)
            while not opened.connections:
                opened.serve(10)
            proof_of_first = worker.recv(32)
        with knocking(opened, address) as (stranger, _):
            stranger.sendall(captured)
            while opened.unproven:
                opened.serve(10)
            assert stranger.recv(1) == b""
        with knocking(opened, address) as (stranger, _):  # nor is what worker 0 has said a proof of a worker's
            stranger.sendall(answer + proof_of_first)
            while opened.unproven:
                opened.serve(10)
        assert list(opened.connections) == [1]


def test_worker_does_not_believe_who_listens_without_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address = Address("127.0.0.1", server.getsockname()[1], b"s" * 32)
        coming = pool.submit(handshake._connected, address, 1)
        with server.accept()[0] as impostor:
            impostor.sendall(b"c" * 32)
            impostor.recv(68)
            impostor.sendall(b"p" * 32)
            with pytest.raises(ConnectionError, match="does not know the secret"):
                coming.result(10)


@pytest.mark.parametrize("said", [b"", b"half"], ids=["nothing", "half a proof"])
def test_many_half_open_connections_are_few_at_a_time_and_keep_nobody_out(said: bytes) -> None:
    with door() as (opened, address):
        strangers = []
        for _ in range(3 * MOST_UNPROVEN):
            strangers.append(socket.create_connection((address.host, address.port)))
            strangers[-1].sendall(said)
            opened.serve(10)
            assert len(opened.unproven) <= MOST_UNPROVEN
        admitted(opened, address)
        for stranger in strangers:
            stranger.close()


def test_who_says_nothing_is_turned_away_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("aiodist._workers.handshake.time.monotonic", lambda: now)
    with door() as (opened, address), knocking(opened, address) as (stranger, _):
        now += handshake.PROOF_SECONDS + 1
        opened.serve(0)
        assert not opened.unproven
        assert stranger.recv(1) == b""


# What a worker may send.


def received(data: bytes) -> list[Message]:
    """Return what a peer makes of these bytes."""
    found: list[Message] = []
    errors: list[Exception | None] = []
    Peer(1, lambda _, message: found.append(message), lambda _, error: errors.append(error)).data_received(data)
    for error in errors:
        assert error is not None
        raise error
    return found


def test_what_is_sent_before_the_connection_is_taken_goes_first() -> None:
    mine, others = socket.socketpair()
    mine.setblocking(False)

    async def send() -> None:
        peer = Peer(1, lambda *_: None, lambda *_: None)
        peer.send(b"early, ")
        await asyncio.get_running_loop().connect_accepted_socket(lambda: peer, mine)
        peer.send(b"late")
        peer.close()

    with others:
        asyncio.run(send())
        assert others.recv(100) == b"early, late"


def test_a_connection_that_is_ended_before_it_is_taken_does_not_stay_open() -> None:
    mine, others = socket.socketpair()
    mine.setblocking(False)

    async def end() -> None:
        peer = Peer(1, lambda *_: None, lambda *_: None)
        peer.close()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: peer, mine)
        await asyncio.sleep(0)

    with others:
        asyncio.run(end())
        assert others.recv(100) == b""


def test_a_failing_analysis_still_gives_all_workers_a_report() -> None:
    layout = Layout(0, [["CPU:0"], ["CPU:0"]])
    broken = Snapshot(OrderCheck.CALL_SITE, (), ())  # without the run's own group
    coordinator = Coordinator(layout)
    sent = [each for rank in (0, 1) for each in coordinator.take(rank, Trouble(0, broken))]
    reports = {rank: message.report for rank, message in sent if isinstance(message, Report)}
    assert reports.keys() == {0, 1}
    assert "the analysis of why failed: IndexError" in reports[0].text


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
    assert list(coordinator.take(0, Waiting(0, snapshots[0]))) == [(1, Query(0))]
    assert not list(coordinator.take(1, Waiting(0, snapshots[1], is_answer=True)))
    without = replace(snapshots[1], groups=snapshots[1].groups[:1])  # as if it had never made the group
    assert list(coordinator.take(1, Waiting(0, without, is_answer=True))) == [(0, Ask(0)), (1, Ask(0))]


def framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MOST_BYTES + 1),
        framed(b"\x80\x04."),
        framed(b'["Beat", {"more": 1}]'),
        framed(b'["__class__", {}]'),
        framed(b'["Lost", {"rank": "1", "why": "x"}]'),
        framed(b'["Trouble", {}]'),
        framed(b"[" * 5000),
    ],
    ids=["oversized", "pickle", "fields", "name", "types", "empty", "deep"],
)
def test_what_is_no_message_is_an_error_of_that_connection(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        received(data)


def test_truncated_message_is_not_taken() -> None:
    whole = packed(Lost(1, "is gone"))
    assert received(packed(Beat()) + whole[:-1]) == [Beat()]
    assert received(whole) == [Lost(1, "is gone")]


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd"])
def test_names_with_path_separators_lead_nowhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(name) == name  # as it was sent, and not as a file that stands here
    monkeypatch.setenv("AIODIST_TRACE", "trace.json")
    monkeypatch.setenv("AIODIST_WORKERS", "2")
    for variable in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.setenv(variable, name)
    assert environment.trace_path() == "trace.0.json"


@pytest.mark.skipif(os.name != "posix", reason="the permissions of files are POSIX's")
def test_other_users_see_no_secret_in_files_or_variables() -> None:
    with folder_of_notes() as notes:
        assert stat.S_IMODE(Path(notes.folder).stat().st_mode) == 0o700
        with door() as (_, address):
            everything = "".join([*environment.with_workers(2, str(notes.folder)).values(), *sys.argv])
            assert address.secret.hex() not in everything


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


def test_limit_that_is_no_number_is_an_error_of_the_constructor_and_not_of_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIODIST_LOST_SECONDS", "soon")
    team: Any = type("Worker", (), {"layout": Layout(1, [("CPU:0",), ("CPU:0",)])})()
    with door() as (opened, address), ThreadPoolExecutor() as others:
        connecting = others.submit(connect, address, 1)
        opened.admit_all()
        with closing(connecting.result()) as connection, pytest.raises(ValueError, match="AIODIST_LOST_SECONDS must"):
            TcpControl(team, hellos("here", "here"), {0: connection})
