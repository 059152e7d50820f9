"""The handshake of control connections: worker 0 listens, the others connect, and both sides prove that they belong.

Worker 0 listens on the loopback interface where all workers are on one machine, else on the one address that the others
use, and stops when all of them are connected. Its address and a secret, which is made for each strategy, reach the
others over the engine's own data path; they stand in no file, argument or environment variable.

    worker 0 to the other    32 bytes, drawn for this connection
    the other to worker 0     4 bytes, its rank; 32 bytes, drawn for this connection; 32 bytes, its proof
    worker 0 to the other    32 bytes, its own proof

A proof is the HMAC, by the secret, of the side's name and all that both have drawn and said: what somebody has recorded
is worth nothing on another connection, nor in the other direction. All parts have fixed sizes, so nothing that a
stranger sends says how much is read. One selector serves all who have not proved anything yet; they are so many at
most, each for some seconds, and the one that has waited longest makes room for the next.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Final, NamedTuple

from aiodist._arrays import environment
from aiodist._workers.layout import Hello

MOST_UNPROVEN: Final = 64
PROOF_SECONDS: Final = 5.0
CONNECT_SECONDS: Final = 60.0

_DRAWN: Final = 32
_PROOF: Final = 32
_RANK: Final = struct.Struct("<I")
_CLAIM: Final = _RANK.size + _DRAWN + _PROOF
_RETRY_SECONDS: Final = 0.05
_OTHER_FILES: Final = 256


class Address(NamedTuple):
    """Where worker 0 listens, and the secret that both sides prove that they know."""

    host: str
    port: int
    secret: bytes


# Where worker 0 listens.


def _loopback() -> str:
    with suppress(OSError), closing(socket.create_server(("127.0.0.1", 0))):
        return "127.0.0.1"
    return "::1"


def own_address() -> str:
    """Return the number of the interface by which this machine reaches others; its name where there is none."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # reserved for documentation; connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


def allow_connections(count: int) -> None:
    """Let this process have so many connections, beside what it has open."""
    if sys.platform == "win32":  # which has no such limit
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            errno.EMFILE,
            f"the first worker keeps a connection with each of the others, and so needs {needed} file descriptors, but "
            f"its system allows it {hard}; raise the hard limit on its machine (ulimit -Hn, nofile in "
            "/etc/security/limits.conf), or start fewer workers with more replicas each",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


# Proofs.


def _proof(secret: bytes, side: bytes, challenge: bytes, answer: bytes) -> bytes:
    return hmac.digest(secret, side + challenge + answer, "sha256")


class _Claim:
    """A connection of which it is not known yet whose it is."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.connection = connection
        self.until = until
        self._challenge = secrets.token_bytes(_DRAWN)
        self._said = b""
        connection.setblocking(False)
        connection.send(self._challenge)

    def read(self, secret: bytes) -> int | None:
        """Read what has come; return the rank once that is proved."""
        try:
            data = self.connection.recv(_CLAIM - len(self._said))
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionError("closed")
        self._said += data
        if len(self._said) < _CLAIM:
            return None
        answer, proof = self._said[:-_PROOF], self._said[-_PROOF:]
        if not hmac.compare_digest(proof, _proof(secret, b"worker", self._challenge, answer)):
            raise ValueError("a wrong proof")
        self.connection.send(_proof(secret, b"worker 0", self._challenge, answer))
        (rank,) = _RANK.unpack_from(answer)
        return int(rank)


class Door:
    """Worker 0's listening socket: lets in the workers that are expected, and nobody else.

    Attributes:
        address: where it is, with a new secret.
        connections: by rank, the connections of those who have proved who they are.
        unproven: those of which nothing is known yet, in the order in which they came.
    """

    def __init__(self, hellos: Sequence[Hello]) -> None:
        self.connections: dict[int, socket.socket] = {}
        self.unproven: dict[socket.socket, _Claim] = {}
        self._size = len(hellos)
        allow_connections(self._size - 1 + MOST_UNPROVEN)
        host = environment.control_address()
        if host is None:
            host = _loopback() if len({hello.machine for hello in hellos}) == 1 else own_address()
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(found[4][:2], family=found[0], backlog=4096)
        except OSError as error:
            raise OSError(
                error.errno,
                f"worker 0 cannot listen at {host} ({error}); set AIODIST_CONTROL_ADDRESS there to a name or number of "
                "its machine by which the other workers reach it",
            ) from error
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(_DRAWN))
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def admit_all(self) -> dict[int, socket.socket]:
        """Return the connections of all others, by rank, once they have come."""
        give_up = time.monotonic() + CONNECT_SECONDS
        try:
            while len(self.connections) < self._size - 1:
                if time.monotonic() > give_up:
                    missing = sorted(set(range(1, self._size)) - set(self.connections))
                    raise ConnectionError(
                        f"workers {missing} have not connected to worker 0 at {self.address.host} within "
                        f"{CONNECT_SECONDS:.0f} s; where that is the wrong network, set AIODIST_CONTROL_ADDRESS"
                    )
                self.serve(0.1)
        finally:
            self.close()
        return self.connections

    def serve(self, seconds: float) -> None:
        """Take what comes within so many seconds."""
        for key, _ in self._selector.select(seconds):
            key.data()
        now = time.monotonic()
        for claim in [claim for claim in self.unproven.values() if claim.until < now]:
            self._turn_away(claim)

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()
        for claim in list(self.unproven.values()):
            self._turn_away(claim)
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone again, or there is no file descriptor left
            connection, _ = self._socket.accept()
            if len(self.unproven) == MOST_UNPROVEN:
                self._turn_away(next(iter(self.unproven.values())))
            claim = self.unproven[connection] = _Claim(connection, time.monotonic() + PROOF_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._read, claim))

    def _read(self, claim: _Claim) -> None:
        if claim.connection not in self.unproven:  # turned away within the same look
            return
        try:
            rank = claim.read(self.address.secret)
        except (OSError, ValueError):
            self._turn_away(claim)
            return
        if rank is not None and 0 < rank < self._size:
            self._selector.unregister(claim.connection)
            self.connections[rank] = claim.connection
            del self.unproven[claim.connection]

    def _turn_away(self, claim: _Claim) -> None:
        if self.unproven.pop(claim.connection, None) is not None:
            with suppress(KeyError, ValueError):  # it has failed before it was registered
                self._selector.unregister(claim.connection)
            claim.connection.close()


def connect(address: Address, rank: int) -> socket.socket:
    """Return this worker's connection to worker 0; one that is cut off before the proofs is tried again."""
    give_up = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return _connected(address, rank)
        except OSError as error:
            if time.monotonic() > give_up:
                raise ConnectionError(
                    f"worker 0 cannot be reached at {address.host}, port {address.port} ({error}); where that is the "
                    "wrong network, set AIODIST_CONTROL_ADDRESS there"
                ) from error
        time.sleep(_RETRY_SECONDS)


def _connected(address: Address, rank: int) -> socket.socket:
    with ExitStack() as undone:
        connection = socket.create_connection((address.host, address.port), timeout=PROOF_SECONDS)
        undone.callback(connection.close)
        challenge = _receive_exactly(connection, _DRAWN)
        answer = _RANK.pack(rank) + secrets.token_bytes(_DRAWN)
        connection.sendall(answer + _proof(address.secret, b"worker", challenge, answer))
        proof = _receive_exactly(connection, _PROOF)
        if not hmac.compare_digest(proof, _proof(address.secret, b"worker 0", challenge, answer)):
            raise ConnectionError("who listens there does not know the secret of this strategy")
        undone.pop_all()
    return connection


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data
