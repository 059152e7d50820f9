"""The record that opens every step, and the digests in it.

    digest     16 bytes   of all calls of the session so far, this one included
    callers    16         by which ways this worker has come to calls at this place so far: see `session`
    flags       1         `FLOAT64`
    notice      1         `Notice`
               14         nothing
    payload   464         a small value, or nothing; between two workers that MPI connects it may be long

Everything before the payload is the head. Mostly all heads are equal, which is checked without unpacking them.

Up to 64 workers, every worker receives every record. With more workers that would cost too much, so a bytewise MIN
all-reduce of 70 bytes takes its place:

    compared   33 bytes   digest, callers, flags: the least; equal to one's own, and so is the least complement, where
    complement 33         all are equal
    least       1         the least notice
    greatest    1         the complement of the greatest notice
    first       1         the first worker's flags; the others contribute 255
                1         nothing

A worker finds its own digest in both minima only if no other worker has a different one, so all workers see the same
result. A worker whose replicas have all joined does not know the digest of the step, and contributes 255 throughout.
"""

from __future__ import annotations

import enum
import functools
import os
import struct
import sys
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from mmap import ACCESS_COPY, mmap
from typing import Final, NamedTuple

import numpy as np

from aiodist._core.call import OrderCheck, Post, digest
from aiodist._workers.transport import RECORD_BYTES, Array, Communicator, Request
from aiodist_kernels import ReduceOp

MOST_IN_FULL: Final = 64
"""Up to how many workers everybody receives every record."""

NO_FLAGS: Final = 0
FLOAT64: Final = 1
"""A flag: float32 sums accumulate in float64. The first worker's counts."""

_HEAD: Final = struct.Struct("<16sQQBB")
_BEGIN: Final = 48  # of the payload: what is in it is aligned
_COMPARED: Final = struct.Struct("<16sQQB")
_LEAST: Final = struct.Struct("<33s33sBBBx")
_CALLERS: Final = (slice(16, 24), slice(24, 32))
_COMPLEMENTS: Final = bytes(range(255, -1, -1))
_MOST: Final = 255

Callers = tuple[int, int]
"""Two sums of 64 bits: of the nearest callers, and of the nearest two."""
ALIKE: Final[Callers] = (0, 0)


class Notice(enum.IntEnum):
    """What the others must know of a worker's part in a step, beside the call."""

    NONE = 0  # all its replicas take part
    ABSENT = 1  # some of them have joined, and take part with nothing
    JOINED = 2  # all of them have
    END = 3  # this is no call: all its replicas have ended


class Agreement(enum.Enum):
    """What the records of all workers say together, and what follows."""

    ALIKE = enum.auto()  # all make the same call, with all their replicas; its values are moved
    WITHOUT_SOME = enum.auto()  # those that have not joined do: all tell each other what each replica contributes
    ALL_JOINED = enum.auto()  # all replicas have joined: all tell each other which was the last
    ENDED = enum.auto()  # all replicas have ended
    DIFFERENT = enum.auto()  # the workers are at different calls


class Record(NamedTuple):
    """What a worker contributes, beside the payload."""

    digest: bytes
    flags: int = NO_FLAGS
    notice: Notice = Notice.NONE
    callers: Callers = ALIKE


class Found(NamedTuple):
    """What all records say."""

    agreement: Agreement  # whether the workers are at the same call
    digest: bytes  # that of those who make a call
    flags: int  # the first worker's
    apart: Callers = ALIKE  # how far the workers' callers are apart; where not all records come, never the same twice


def _zeros(number: int, length: int) -> Array:
    """Return records; long ones take no memory until they are used: there may be thousands of groups of two workers."""
    if length <= RECORD_BYTES:
        return np.zeros((number, length), np.uint8)
    return np.frombuffer(mmap(-1, number * length, access=ACCESS_COPY), np.uint8).reshape(number, length)


class RecordBuffers:
    """The buffers of a communicator's records, used again for every step.

    Attributes:
        in_full: every worker receives every record.
        payload: that of this worker, to be written before its record is posted.
        payloads: those of all, by rank, once the exchange is complete; none where not every record is received.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._rank, size = communicator.rank, communicator.size
        self.in_full = size <= MOST_IN_FULL
        length, records = (communicator.record_bytes, size) if self.in_full else (_LEAST.size, 1)
        rows = _zeros(1 + records, length)
        self._own: Array = rows[0]
        self._all = rows[1:]
        self._view = self._own.data
        self.payload: Array = self._own[_BEGIN:]
        self.payloads: list[Array] = []
        if self.in_full:
            own = self._rank
            self.payloads = [self.payload if rank == own else self._all[rank, _BEGIN:] for rank in range(size)]
            self._others = [self._all[rank, : _HEAD.size].data for rank in range(size) if rank != own]
            self._begin = communicator.exchange_init(self._own, self._all.reshape(-1))
        else:
            self._begin = lambda _: communicator.iallreduce(ReduceOp.MIN, self._own, self._all[0])
        self._record = Record(b"")
        self._head = b""
        self._numbers = count(1)

    def post(self, record: Record, nbytes: int = 0) -> Request:
        """Contribute a record, with so many bytes of the payload: begin the exchange."""
        self._record = record
        if self.in_full:
            self._head = _HEAD.pack(record.digest, *record.callers, record.flags, record.notice)
            self._view[: _HEAD.size] = self._head
        else:
            compared = _COMPARED.pack(record.digest, *record.callers, record.flags)
            complement = compared.translate(_COMPLEMENTS)
            if record.notice is Notice.JOINED:
                compared = complement = bytes([_MOST]) * _COMPARED.size
            first = record.flags if self._rank == 0 else _MOST
            _LEAST.pack_into(self._view, 0, compared, complement, record.notice, _MOST - record.notice, first)
        return self._begin(_BEGIN + nbytes)

    def read(self) -> Found:
        """Return what all records say; the exchange is complete."""
        own = self._record
        if not self.in_full:
            return self._read_least(self._all.tobytes())
        others = [head.tobytes() for head in self._others]
        if own.notice is Notice.NONE and others.count(self._head) == len(others):
            return Found(Agreement.ALIKE, own.digest, own.flags)
        heads = [*map(_HEAD.unpack, others)]
        heads.insert(self._rank, _HEAD.unpack(self._head))
        digests, *callers, flags, notices = zip(*heads, strict=True)
        known = {digest for digest, notice in zip(digests, notices, strict=True) if notice != Notice.JOINED}
        agreement = _agreement(min(notices), max(notices), len(known) <= 1)
        nearest, two = (hash(tuple(n - sums[0] for n in sums)) if len(set(sums)) > 1 else 0 for sums in callers)
        return Found(agreement, next(iter(known), own.digest), flags[0], (nearest, two))

    def _read_least(self, whole: bytes) -> Found:
        compared, complement, least, greatest, first = _LEAST.unpack(whole)
        most = complement.translate(_COMPLEMENTS)
        if compared == most:  # as nearly always
            digests_alike, callers = True, ALIKE
        else:
            digests_alike = compared[:16] == most[:16]
            nearest, two = (0 if compared[at] == most[at] else next(self._numbers) for at in _CALLERS)
            callers = nearest, two
        agreement = _agreement(least, _MOST - greatest, digests_alike)
        digest = self._record.digest if agreement is Agreement.ALL_JOINED else compared[:16]
        return Found(agreement, digest, first, callers)


def _agreement(least: int, greatest: int, digests_alike: bool) -> Agreement:
    if greatest == Notice.END:
        return Agreement.ENDED if least == Notice.END and digests_alike else Agreement.DIFFERENT
    if least == Notice.JOINED:
        return Agreement.ALL_JOINED
    if not digests_alike:
        return Agreement.DIFFERENT
    return Agreement.ALIKE if greatest == Notice.NONE else Agreement.WITHOUT_SOME


# Digests, which are the same on every machine: checkouts may lie in different places.


@functools.lru_cache(maxsize=4096)
def portable(file: str) -> str:
    """Return a file's name from the entry of ``sys.path``, or the working directory, that it lies under."""
    best = ""
    for entry in (*sys.path, os.getcwd()):  # noqa: PTH109  (a string is all that is needed)
        prefix = os.path.join(os.path.abspath(entry), "")  # noqa: PTH100, PTH118  (and quick)
        if file.startswith(prefix) and len(prefix) > len(best):
            best = prefix
    return file[len(best) :]


@functools.lru_cache(maxsize=4096)
def resolved(file: str) -> str:
    """Return the file of this machine that a portable name means; the name itself where there is none."""
    for entry in (*sys.path, os.getcwd()):  # noqa: PTH109
        path = os.path.join(os.path.abspath(entry), file)  # noqa: PTH100, PTH118
        if os.path.isfile(path) and os.path.normpath(path) == path:  # noqa: PTH113  (none with "..")
            return path
    return file


@functools.lru_cache(maxsize=4096)  # workers in one process, of which there may be thousands, share it
def digest_of(order_check: OrderCheck, post: Post) -> bytes:
    """Return 16 bytes that differ where the fingerprints of two calls do, on whichever machine they are made."""
    call = post.call
    if call.function is not None:
        call = replace(call, function=call.function._replace(file=portable(call.function.file)))
    path = tuple(place._replace(file=portable(place.file)) for place in post.path)
    return digest(order_check, [Post(call, path)])


@functools.lru_cache(maxsize=4096)
def callers_of(post: Post) -> Callers:
    """Return numbers that stand for the nearest caller and the nearest two, on whichever machine; `_core.callers`."""
    places = [(portable(place.file), *place[1:3]) for place in post.path[1:3]]
    nearest, two = (blake2b(repr(places[:depth]).encode(), digest_size=8).digest() for depth in (1, 2))
    return int.from_bytes(nearest, "little"), int.from_bytes(two, "little")
