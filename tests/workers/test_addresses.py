"""Where workers listen, and how they are reached: by IPv4 and IPv6."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from aiodist._workers.addresses import Listening, first_connection, own_numbers
from aiodist._workers.connection import connected
from aiodist._workers.hello import Hello

HERE = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


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
def listening() -> Iterator[Listening]:
    found = Listening()
    with closing(found.socket):
        yield found


@pytest.mark.parametrize("family", FAMILIES)
def test_worker_is_reached_by_either_family(family: socket.AddressFamily) -> None:
    with (
        listening() as here,
        closing(first_connection(["name.invalid", HERE[family]], here.address.port)),
        closing(here.socket.accept()[0]) as connection,
    ):
        assert connection.getpeername()[0].endswith(HERE[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_star_is_made_by_either_family(family: socket.AddressFamily) -> None:
    here = Listening()
    address = replace(here.address, hosts=(HERE[family],))
    hellos = [Hello("1", ("CPU:0",), f"machine {rank}", 1, address) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda rank: connected(rank, hellos, here if rank == 0 else None), range(3)))
    assert [sorted(peers) for peers in made] == [[1, 2], [0], [0]]
    for peers in made:
        for peer in peers.values():
            peer.connection.close()


def test_machine_without_ipv6_listens_to_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listening() as here:
        assert here.socket.family == socket.AF_INET


def test_own_numbers_are_of_use_to_others_and_those_of_ipv4_come_first() -> None:
    found = own_numbers()
    assert not any(number.startswith(("127.", "::1", "fe80:")) for number in found)
    families = [socket.AF_INET6 if ":" in number else socket.AF_INET for number in found]
    assert families == sorted(families, key=[socket.AF_INET, socket.AF_INET6].index)


@NEEDS_IPV6
def test_address_that_the_user_has_chosen_may_be_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_CONTROL_ADDRESS", "::1")
    with listening() as here:
        assert here.address.hosts == ("::1",)
