"""The handshake of control connections: worker 0 listens, the others connect, and both sides prove that they belong.

Worker 0 listens on the loopback interface where all workers are on one machine, else on the one address that the others
use, and stops when all of them are connected. Its address and a secret, which is made for each strategy, reach the
others over the engine's own data path; they stand in no file, argument or environment variable.

Each side sends its rank and 32 random bytes, and then its proof: the HMAC, by the secret, of what it has sent and what
it has received. So what somebody has recorded is worth nothing on another connection; and since worker 0 takes no
rank 0, and the others take no other, neither is what a side has said itself. Nothing that a stranger sends says how
much is read. At most so many connections are unproven at a time, each for some seconds, and the oldest makes room for
the next; all are tasks of one thread.
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

MOST_UNPROVEN: Final = 64
PROOF_SECONDS: Final = 5.0
CONNECT_SECONDS: Final = 60.0

_RANDOM_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_RANK: Final = struct.Struct("<I")
_RETRY_SECONDS: Final = 0.05
_OTHER_FILES: Final = 512

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Address(NamedTuple):
    """Where worker 0 listens, and the secret that both sides prove that they know."""

    host: str
    port: int
    secret: bytes


def proof(secret: bytes, sent: bytes, received: bytes) -> bytes:
    """Return what proves to the other side that this one, which has sent and received that, knows the secret."""
    return hmac.digest(secret, sent + received, "sha256")


async def _prove(streams: Streams, secret: bytes, rank: int) -> int:
    """Return the rank of the worker at the other end, once both sides have proved that they belong."""
    reader, writer = streams
    own = _RANK.pack(rank) + secrets.token_bytes(_RANDOM_BYTES)
    async with asyncio.timeout(PROOF_SECONDS):
        writer.write(own)
        others = await reader.readexactly(len(own))
        (other,) = _RANK.unpack_from(others)
        writer.write(proof(secret, own, others))
        others_proof = await reader.readexactly(_PROOF_BYTES)
    proved = hmac.compare_digest(others_proof, proof(secret, others, own))
    if not proved or (rank == 0) == (other == 0):  # a worker 0 that meets one sees its own bytes come back
        raise ConnectionError("who is at the other end does not know the secret of this strategy")
    return int(other)


class Door:
    """Worker 0's listening socket: lets in the workers that are expected, and nobody else.

    Attributes:
        address: where it is, with a new secret.
        admitted: by rank, the connections of those who have proved who they are.
        unproven: the connections of which nothing is known yet, in the order in which they came, as tasks.
    """

    def __init__(self, hellos: Sequence[Hello]) -> None:
        self.admitted: dict[int, Streams] = {}
        self.unproven: dict[Any, None] = {}
        self._size = len(hellos)
        self._changed = asyncio.Event()
        _allow_connections(self._size + MOST_UNPROVEN)
        host = environment.control_address()
        if host is None:
            host = "127.0.0.1" if len({hello.machine for hello in hellos}) == 1 else own_address()
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(found[4][:2], family=found[0], backlog=4096)
        except OSError as error:
            raise OSError(
                error.errno,
                f"worker 0 cannot listen at {host} ({error}); set AIODIST_CONTROL_ADDRESS there to a name or number of "
                "its machine by which the other workers reach it",
            ) from error
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(_RANDOM_BYTES))

    async def admit_all(self) -> dict[int, Streams]:
        """Return the connections of all others, by rank, once they have come; let nobody in after that."""
        with self._socket:
            server = await asyncio.start_server(self._admit, sock=self._socket)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    while len(self.admitted) < self._size - 1:
                        await self._changed.wait()
                        self._changed.clear()
            except TimeoutError:
                missing = sorted(set(range(1, self._size)) - set(self.admitted))
                raise ConnectionError(
                    f"workers {missing} have not connected to worker 0 at {self.address.host} within "
                    f"{CONNECT_SECONDS:.0f} s; where that is the wrong network, set AIODIST_CONTROL_ADDRESS"
                ) from None
            finally:
                server.close()
                for task in self.unproven:
                    task.cancel()
        return self.admitted

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a worker in whose rank is proved, and nobody else."""
        if len(self.unproven) == MOST_UNPROVEN:
            oldest = next(iter(self.unproven))
            oldest.cancel()
            del self.unproven[oldest]
        task = asyncio.current_task()
        self.unproven[task] = None
        rank = self._size
        try:
            with suppress(OSError, EOFError):  # a timeout, too
                rank = await _prove((reader, writer), self.address.secret, 0)
        finally:
            self.unproven.pop(task, None)
            if rank < self._size:
                self.admitted[rank] = reader, writer
                self._changed.set()
            else:
                writer.transport.abort()


def own_address() -> str:
    """Return the number of the interface by which this machine reaches others; its name where there is none."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # reserved for documentation; connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _allow_connections(count: int) -> None:
    """Let this process have so many connections, beside what it has open, as far as its system allows it."""
    if sys.platform != "win32":  # which has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < count + _OTHER_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def connect(address: Address, rank: int) -> Streams:
    """Return this worker's connection to worker 0; one that is cut off before the proofs is tried again."""
    give_up = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            streams = await asyncio.open_connection(address.host, address.port)
            try:
                await _prove(streams, address.secret, rank)
            except BaseException:
                streams[1].transport.abort()
                raise
        except (OSError, EOFError) as error:
            if time.monotonic() > give_up:
                raise ConnectionError(
                    f"worker 0 cannot be reached at {address.host}, port {address.port} ({error}); where that is the "
                    "wrong network, set AIODIST_CONTROL_ADDRESS there"
                ) from error
        else:
            return streams
        await asyncio.sleep(_RETRY_SECONDS)
