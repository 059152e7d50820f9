"""A connection to another worker: messages, each a name and its arguments, pickled behind their length.

Nothing here blocks. What is sent is kept until the system takes it. The system gives a connection up whose other end
does not acknowledge for some seconds what was sent (`TCP_USER_TIMEOUT`); that end's system does so, whatever its
program is at.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Final

CUT_OFF_SECONDS: Final = 2.0
LENGTH: Final = struct.Struct("<I")


def message(name: str, *arguments: Any) -> bytes:
    """Return a message as it is sent."""
    pickled = pickle.dumps((name, *arguments))
    return LENGTH.pack(len(pickled)) + pickled


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

    def send(self, name: str, *arguments: Any) -> None:
        """Let a message be sent at the next `flush`."""
        self.put(message(name, *arguments))

    def put(self, message: bytes) -> None:
        """Let a message that has been made be sent at the next `flush`."""
        self._to_send += message

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

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """Yield the messages that have come.

        Raises:
            EOFError: the other end is closed.
            OSError: the connection is lost.
        """
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self.heard = time.monotonic()
        self._received += data
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            if len(self._received) < LENGTH.size + length:
                return
            taken = pickle.loads(bytes(self._received[LENGTH.size : LENGTH.size + length]))  # noqa: S301  (from a worker of this job)
            del self._received[: LENGTH.size + length]
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
