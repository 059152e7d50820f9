"""The star: connections between the first worker and every other one, as they are made when the workers have met."""

from __future__ import annotations

import contextlib
import hmac
import platform
import socket
from collections.abc import Sequence
from typing import Final

from aiodist.workers.addresses import (
    TOKEN_BYTES,
    Address,
    Listening,
    allow_connections,
    first_connection,
    plain_number,
    receive_exactly,
    ways_to,
)
from aiodist.workers.joining import Hello
from aiodist.workers.peer import LENGTH, Peer

_CONNECT_SECONDS: Final = 60.0


def connected(rank: int, hellos: Sequence[Hello], listening: Listening | None) -> dict[int, Peer]:
    """Return this worker's connections by rank: to all others from the first one, whose socket is closed, else to it.

    Args:
        rank: this worker.
        hellos: what the workers have told of themselves.
        listening: this worker's socket; the first one has one, where there are others.

    Raises:
        ConnectionError: the first worker cannot be reached, or others do not come to it.
        OSError: the system allows too few connections.
    """
    if len(hellos) == 1:
        return {}
    if rank > 0:
        return {0: Peer(0, _to_the_first(rank, hellos[0]))}
    assert listening is not None
    allow_connections(len(hellos) - 1)
    peers: dict[int, Peer] = {}
    while len(peers) < len(hellos) - 1:
        _accept(listening, peers, len(hellos))
    listening.socket.close()
    return peers


def _to_the_first(rank: int, first: Hello) -> socket.socket:
    address: Address = first.address
    hosts = ways_to(address, same_machine=first.host == platform.node())
    connection = first_connection(hosts, address.port)
    connection.sendall(address.token + LENGTH.pack(rank))
    return connection


def _accept(listening: Listening, peers: dict[int, Peer], size: int) -> None:
    listening.socket.settimeout(_CONNECT_SECONDS)
    try:
        connection, _ = listening.socket.accept()
    except TimeoutError:
        missing = sorted(set(range(1, size)) - set(peers))
        raise ConnectionError(
            f"workers {missing} have not connected to the first worker at {listening.address.hosts} within "
            f"{_CONNECT_SECONDS:.0f} s; where that is the wrong network, set AIODIST_CONTROL_ADDRESS"
        ) from None
    connection.settimeout(_CONNECT_SECONDS)
    with contextlib.suppress(OSError):
        said = receive_exactly(connection, TOKEN_BYTES + LENGTH.size)
        if hmac.compare_digest(said[:TOKEN_BYTES], listening.address.token):
            (rank,) = LENGTH.unpack(said[TOKEN_BYTES:])
            peers[rank] = Peer(rank, connection)
            return
    connection.close()


def numbers(peers: dict[int, Peer]) -> dict[int, str]:
    """Return by which numbers the connected workers' machines are reached; one may be gone already."""
    found = {}
    for rank, peer in peers.items():
        with contextlib.suppress(OSError):
            found[rank] = plain_number(peer.connection.getpeername()[0])
    return found
