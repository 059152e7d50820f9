"""Admission: who may connect to worker 0, by a handshake that proves on both sides that they know a secret.

Worker 0 listens on the loopback interface if all workers are on one machine, else on the one address that the others
use, and stops when all have connected. Its address and a secret, new for each strategy, reach the others through the
engine's data path. `docs/security.md` has the threat model.

Each side sends its rank and 32 random bytes, and then its proof: the HMAC, keyed by the secret, of what it has sent and
received. A recorded proof is worthless on another connection, and so is an echoed one, since worker 0 accepts no rank 0
and the others accept no other rank. Worker 0 proves itself last: a worker that has received this proof has been
admitted, and one that was dropped before it, to make room, connects again. Nothing that a stranger sends determines how
much is read. (`multiprocessing.connection` has such a handshake, but it blocks: a stranger would keep workers out, or
occupy a thread.)
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

from aiodist._arrays import environment
from aiodist._workers.layout import Hello

MAX_PENDING: Final = 64
HANDSHAKE_SECONDS: Final = 5.0
CONNECT_SECONDS: Final = 60.0

_SECRET_BYTES: Final = 32  # as many as SHA-256 has
_RANK: Final = struct.Struct("<I")
_RETRY_SECONDS: Final = 0.05
_OTHER_FILES: Final = 512
_LISTEN_BACKLOG: Final = 4096

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Address(NamedTuple):
    """Where worker 0 listens, and the secret that both sides prove they know."""

    host: str
    port: int
    secret: bytes


def proof(secret: bytes, sent: bytes, received: bytes) -> bytes:
    """Return the proof that this side, which has sent and received these bytes, knows the secret."""
    return hmac.digest(secret, sent + received, "sha256")


async def _handshake(streams: Streams, secret: bytes, rank: int) -> int:
    """Return the other side's rank once both have proved that they know the secret; otherwise abort the connection."""
    reader, writer = streams
    own = _RANK.pack(rank) + secrets.token_bytes(_SECRET_BYTES)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            writer.write(own)
            others = await reader.readexactly(len(own))
            (other,) = _RANK.unpack_from(others)
            if rank != 0:
                writer.write(proof(secret, own, others))
            others_proof = await reader.readexactly(_SECRET_BYTES)
    except BaseException:
        writer.transport.abort()
        raise
    is_proved = hmac.compare_digest(others_proof, proof(secret, others, own))
    if not is_proved or (rank == 0) == (other == 0):  # two worker 0s: its own bytes were echoed
        writer.transport.abort()
        raise ConnectionError("the other end does not know the secret of this strategy")
    if rank == 0:
        writer.write(proof(secret, own, others))
    return int(other)


class Listener:
    """Worker 0's listening socket: it admits the expected workers and nobody else.

    Attributes:
        address: where it listens, with a new secret.
        admitted: by rank, the connections of workers that have proved who they are.
        pending: the tasks of unfinished handshakes, oldest first.
    """

    def __init__(self, hellos: Sequence[Hello]) -> None:
        self.admitted: dict[int, Streams] = {}
        self.pending: dict[Any, None] = {}
        self._size = len(hellos)
        self._all_admitted = asyncio.Event()
        _allow_connections(self._size + MAX_PENDING)
        host = environment.control_address()
        if host is None:
            host = "127.0.0.1" if len({hello.machine for hello in hellos}) == 1 else own_address()
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(found[4][:2], family=found[0])
        except OSError as error:
            raise OSError(
                f"worker 0 cannot listen at {host} ({error}); set AIODIST_CONTROL_ADDRESS there to a name or address "
                "by which the other workers reach its machine",
            ) from error
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(_SECRET_BYTES))

    async def admit_all(self) -> dict[int, Streams]:
        """Return the connections of all other workers by rank, once they are there, and stop listening."""
        with self._socket:
            # Few connections are accepted per turn of the loop, so that a worker gets some turns before it is replaced.
            server = await asyncio.start_server(self._admit, sock=self._socket, backlog=MAX_PENDING // 4)
            self._socket.listen(_LISTEN_BACKLOG)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._all_admitted.wait()
            except TimeoutError:
                missing = sorted(set(range(1, self._size)) - set(self.admitted))
                raise ConnectionError(
                    f"workers {missing} have not connected to worker 0 at {self.address.host} within "
                    f"{CONNECT_SECONDS:.0f} s; if that is the wrong network, set AIODIST_CONTROL_ADDRESS on worker 0"
                ) from None
            finally:
                server.close()
                for task in self.pending:
                    task.cancel()
        return self.admitted

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.pending) == MAX_PENDING:
            oldest = next(iter(self.pending))
            oldest.cancel()
            del self.pending[oldest]
        task = asyncio.current_task()
        self.pending[task] = None
        with suppress(OSError, EOFError, asyncio.CancelledError):  # asyncio's server would log a cancellation
            rank = await _handshake((reader, writer), self.address.secret, 0)
            self.admitted[rank] = reader, writer
            if len(self.admitted) == self._size - 1:
                self._all_admitted.set()
        self.pending.pop(task, None)


def own_address() -> str:
    """Return the address of the interface by which this machine reaches others, or its name if there is none."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # reserved for documentation; connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _allow_connections(count: int) -> None:
    """Raise the limit on open files for this many connections, as far as the system permits."""
    if sys.platform != "win32":  # which has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = count + _OTHER_FILES
        if 0 <= soft < needed:  # an unlimited one is negative, or greater than anything
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard < 0 else min(needed, hard), hard))


async def connect(address: Address, rank: int) -> dict[int, Streams]:
    """Return this worker's one connection, to worker 0, trying again if it is dropped before the proofs."""
    give_up = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            streams = await asyncio.open_connection(address.host, address.port)
            await _handshake(streams, address.secret, rank)
            return {0: streams}
        except (OSError, EOFError) as error:
            if time.monotonic() > give_up:
                raise ConnectionError(
                    f"worker 0 cannot be reached at {address.host}, port {address.port} ({error}); if that is the "
                    "wrong network, set AIODIST_CONTROL_ADDRESS on worker 0"
                ) from error
        await asyncio.sleep(_RETRY_SECONDS)
