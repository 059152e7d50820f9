"""Connections between worker 0 and the others: messages as JSON behind their length. A star, made when they meet.

Nothing here blocks but the making. What is sent is kept until the system takes it. The system gives a connection up
whose other end does not acknowledge for some seconds what was sent (``TCP_USER_TIMEOUT``); that end's system does so,
whatever its program is at.
"""

from __future__ import annotations

import contextlib
import hmac
import platform
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final

from aiodist._workers.addresses import (
    TOKEN_BYTES,
    Listening,
    allow_connections,
    first_connection,
    receive_exactly,
    ways_to,
)
from aiodist._workers.hello import Hello
from aiodist._workers.messages import Message, decode, encode

CUT_OFF_SECONDS: Final = 2.0
MOST_BYTES: Final = 1 << 28
"""How long a message may be."""

_LENGTH: Final = struct.Struct("<I")
_TOKEN: Final = 2 * TOKEN_BYTES
_CONNECT_SECONDS: Final = 60.0


def packed(message: Message) -> bytes:
    """Return a message as it is sent."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


class Peer:
    """A worker at the other end of a connection.

    Attributes:
        rank: which.
        connection: the connection.
        heard: when something came last, by the monotonic clock.
        farewell: why it ends, once it has said so.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(CUT_OFF_SECONDS * 1000))
        self.rank = rank
        self.connection = connection
        self.heard = time.monotonic()
        self.farewell: str | None = None
        self._received = bytearray()
        self._to_send = bytearray()

    def put(self, data: bytes) -> None:
        """Let a message, as `packed` gave it, be sent at the next `flush`."""
        self._to_send += data

    def flush(self) -> bool:
        """Give the system as much as it takes; return whether that was all.

        Raises:
            OSError: the connection is lost.
        """
        try:
            while self._to_send:
                sent = self.connection.send(self._to_send)
                del self._to_send[:sent]
        except BlockingIOError:
            return False
        return True

    def messages(self) -> Iterator[Message]:
        """Yield the messages that have come.

        Raises:
            EOFError: the other end is closed.
            OSError: the connection is lost.
            ValueError: what came is no message.
        """
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self.heard = time.monotonic()
        self._received += data
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MOST_BYTES:
                raise ValueError(f"a message of {length} bytes")
            if len(self._received) < _LENGTH.size + length:
                return
            taken = decode(self._received[_LENGTH.size : _LENGTH.size + length])
            del self._received[: _LENGTH.size + length]
            yield taken

    def why_lost(self, error: Exception) -> str:
        """Return what is to be told of a worker whose connection has ended so."""
        if self.farewell is not None:
            return self.farewell
        if isinstance(error, TimeoutError):
            return f"is cut off: its machine has not answered for {CUT_OFF_SECONDS:.0f} s"
        if isinstance(error, (EOFError, ConnectionError)):
            return "has died: its connection was closed without a farewell"
        return f"is cut off: {error}"


def connected(rank: int, hellos: Sequence[Hello], listening: Listening | None) -> dict[int, Peer]:
    """Return this worker's connections by rank: to all others from worker 0, whose socket is closed then; else to it.

    Args:
        rank: this worker.
        hellos: what the workers have said of themselves.
        listening: worker 0's socket.

    Raises:
        ConnectionError: worker 0 cannot be reached, or others do not come to it.
        OSError: the system allows too few connections.
    """
    if len(hellos) == 1:
        return {}
    if rank > 0:
        return {0: Peer(0, _to_first(rank, hellos))}
    assert listening is not None
    allow_connections(len(hellos) - 1)
    peers: dict[int, Peer] = {}
    while len(peers) < len(hellos) - 1:
        _accept(listening, peers, len(hellos))
    listening.socket.close()
    return peers


def _to_first(rank: int, hellos: Sequence[Hello]) -> socket.socket:
    address = hellos[0].address
    assert address is not None
    hosts = ways_to(address, same_machine=hellos[0].host == platform.node())
    connection = first_connection(hosts, address.port)
    connection.sendall(address.token.encode() + _LENGTH.pack(rank))
    return connection


def _accept(listening: Listening, peers: dict[int, Peer], size: int) -> None:
    listening.socket.settimeout(_CONNECT_SECONDS)
    try:
        connection, _ = listening.socket.accept()
    except TimeoutError:
        missing = sorted(set(range(1, size)) - set(peers))
        raise ConnectionError(
            f"workers {missing} have not connected to worker 0 at {listening.address.hosts} within "
            f"{_CONNECT_SECONDS:.0f} s; where that is the wrong network, set AIODIST_CONTROL_ADDRESS"
        ) from None
    connection.settimeout(_CONNECT_SECONDS)
    with contextlib.suppress(OSError):
        said = receive_exactly(connection, _TOKEN + _LENGTH.size)
        (rank,) = _LENGTH.unpack(said[_TOKEN:])
        if hmac.compare_digest(said[:_TOKEN], listening.address.token.encode()) and 0 < rank < size:
            peers[rank] = Peer(rank, connection)
            return
    connection.close()
