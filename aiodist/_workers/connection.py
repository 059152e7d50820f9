"""Connections between worker 0 and the others: messages as JSON behind their length. Nothing here blocks.

The system gives a connection up whose other end does not acknowledge for some seconds what was sent
(``TCP_USER_TIMEOUT``); that end's system does so, whatever its program is at.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import Final

from aiodist._arrays import environment
from aiodist._workers.messages import Message, decode, encode

CUT_OFF_SECONDS: Final = 10.0
MOST_BYTES: Final = 1 << 26
"""How long a message may be."""

_LENGTH: Final = struct.Struct("<I")


def cut_off_seconds() -> float:
    """Return how long a worker's system need not acknowledge what it is sent."""
    return environment.lost_seconds() or CUT_OFF_SECONDS


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
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(cut_off_seconds() * 1000))
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
            return f"is cut off: its machine has not answered for {cut_off_seconds():.0f} s"
        if isinstance(error, (EOFError, ConnectionError)):
            return "has died: its connection was closed without a farewell"
        if isinstance(error, OSError):
            return f"is cut off: {error}"
        return f"has sent what is no message: {error}"
