"""The record that opens every step, and the digests in it.

    digest     16 bytes   of all calls of the session so far, including this one
    callers    16         two sums over the callers of the calls at this place so far; see `session`
    flags       1         `FLOAT64`
    notice      1         `Notice`
               14         padding
    payload   464         small values; longer between two workers that MPI connects

The fields before the payload are the head. Usually all heads are equal, which is checked without unpacking them.

Up to 64 workers, every worker receives every record. More workers reduce 70 bytes with a bytewise MIN instead:

    compared   33 bytes   digest, callers, flags: their minimum
    complement 33         the minimum of their complements, hence their maximum; all are equal if both minima match
    least       1         the least notice
    greatest    1         the complement of the greatest notice
    first       1         the flags of worker 0; the other workers contribute 255
                1         padding

A worker whose replicas have all joined does not know the digest of the step; it contributes 255 throughout.
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
"""The largest number of workers of which each receives every record."""

NO_FLAGS: Final = 0
FLOAT64: Final = 1
"""Float32 sums accumulate in float64. Worker 0's flags count for all."""

_DIGEST: Final = 16  # bytes
_HEAD: Final = struct.Struct("<16sQQBB")
_PAYLOAD_BEGIN: Final = 48  # a multiple of the alignment of values
_COMPARED: Final = struct.Struct("<16sQQB")
_LEAST: Final = struct.Struct("<33s33sBBBx")
_CALLERS: Final = (slice(16, 24), slice(24, 32))
_COMPLEMENTS: Final = bytes(range(255, -1, -1))
_MOST: Final = 255

WRAP: Final = (1 << 64) - 1
Callers = tuple[int, int]
"""Two sums of hashes, modulo 2**64: of each call's nearest caller, and of its nearest two."""
ALIKE: Final[Callers] = (0, 0)


class Notice(enum.IntEnum):
    """How a worker takes part in a step."""

    NONE = 0  # with all its replicas
    ABSENT = 1  # without those that have joined
    JOINED = 2  # without any: all have joined
    END = 3  # it does not: all its replicas have ended


NONE: Final = Notice.NONE  # to read an enum's attribute takes as long as a call


class Agreement(enum.Enum):
    """What the records of all workers say together."""

    ALIKE = enum.auto()  # the same call, with all replicas
    WITHOUT_SOME = enum.auto()  # the same call, without the replicas that have joined
    ALL_JOINED = enum.auto()  # all replicas have joined
    ENDED = enum.auto()  # all replicas have ended
    DIFFERENT = enum.auto()  # different calls


class Found(NamedTuple):
    """What all records say."""

    agreement: Agreement
    flags: int  # worker 0's
    digest: int = 0  # of the workers that make a call; 0 if all make one
    apart: Callers = ALIKE  # hashes of the differences between the workers' callers; unique ones if these are unknown


_USUAL: Final = tuple(Found(Agreement.ALIKE, flags) for flags in (NO_FLAGS, FLOAT64))
"""By flags, what equal records say."""


def _zeros(number: int, length: int) -> Array:
    """Return records. Long ones take no memory until they are used, as there may be thousands of groups."""
    if length <= RECORD_BYTES:
        return np.zeros((number, length), np.uint8)
    return np.frombuffer(mmap(-1, number * length, access=ACCESS_COPY), np.uint8).reshape(number, length)


class RecordBuffers:
    """The buffers of a communicator's records, reused for every step.

    Attributes:
        in_full: every worker receives every record.
        payload: this worker's, written before its record is posted.
        payloads: all workers', by rank, once the exchange is complete; empty unless ``in_full``.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._rank, size = communicator.rank, communicator.size
        self.in_full = size <= MOST_IN_FULL
        length, records = (communicator.record_bytes, size) if self.in_full else (_LEAST.size, 1)
        rows = _zeros(1 + records, length)
        self._own: Array = rows[0]
        self._all = rows[1:]
        self.payload: Array = self._own[_PAYLOAD_BEGIN:]
        self.payloads: list[Array] = []
        if self.in_full:
            own = self._rank
            self.payloads = [self.payload if rank == own else self._all[rank, _PAYLOAD_BEGIN:] for rank in range(size)]
            self._head = self._own[: _HEAD.size].data
            self._others = [self._all[rank, : _HEAD.size].data for rank in range(size) if rank != own]
            self._begin = communicator.exchange_init(self._own, self._all.reshape(-1))
        else:
            self._begin = lambda _: communicator.iallreduce(ReduceOp.MIN, self._own, self._all[0])
        self._usual: Found | None = None  # what the records say if they are equal
        self._numbers = count(1)

    def post(
        self, digest: int, flags: int, callers: Callers = ALIKE, notice: Notice = NONE, nbytes: int = 0
    ) -> Request:
        """Begin the exchange of a record with the first bytes of the payload."""
        chain = digest.to_bytes(_DIGEST, "little")
        self._usual = _USUAL[flags] if notice is NONE else None
        if self.in_full:
            _HEAD.pack_into(self._head, 0, chain, *callers, flags, notice)
        else:
            compared = _COMPARED.pack(chain, *callers, flags)
            complement = compared.translate(_COMPLEMENTS)
            if notice is Notice.JOINED:
                compared = complement = bytes([_MOST]) * _COMPARED.size
            first = flags if self._rank == 0 else _MOST
            _LEAST.pack_into(self._own.data, 0, compared, complement, notice, _MOST - notice, first)
        return self._begin(_PAYLOAD_BEGIN + nbytes)

    def read(self) -> Found:
        """Return what all records say, once the exchange is complete."""
        if not self.in_full:
            return self._read_least(self._all.tobytes())
        if self._usual is not None and self._others.count(self._head) == len(self._others):
            return self._usual
        heads = [*map(_HEAD.unpack, self._others)]
        heads.insert(self._rank, _HEAD.unpack(self._head))
        digests, *callers, flags, notices = zip(*heads, strict=True)
        known = {digest for digest, notice in zip(digests, notices, strict=True) if notice != Notice.JOINED}
        agreement = _agreement(min(notices), max(notices), len(known) <= 1)
        nearest, two = (
            hash(tuple((n - sums[0]) & WRAP for n in sums)) if len(set(sums)) > 1 else 0 for sums in callers
        )
        return Found(agreement, flags[0], int.from_bytes(next(iter(known), b""), "little"), (nearest, two))

    def _read_least(self, whole: bytes) -> Found:
        compared, complement, least, greatest, first = _LEAST.unpack(whole)
        most = complement.translate(_COMPLEMENTS)
        if compared == most:  # the usual case
            digests_alike, callers = True, ALIKE
        else:
            digests_alike = compared[:_DIGEST] == most[:_DIGEST]
            nearest, two = (0 if compared[at] == most[at] else next(self._numbers) for at in _CALLERS)
            callers = nearest, two
        digest = int.from_bytes(compared[:_DIGEST], "little")
        return Found(_agreement(least, _MOST - greatest, digests_alike), first, digest, callers)


def _agreement(least: int, greatest: int, digests_alike: bool) -> Agreement:
    if greatest == Notice.END:
        return Agreement.ENDED if least == Notice.END and digests_alike else Agreement.DIFFERENT
    if least == Notice.JOINED:
        return Agreement.ALL_JOINED
    if not digests_alike:
        return Agreement.DIFFERENT
    return Agreement.ALIKE if greatest == Notice.NONE else Agreement.WITHOUT_SOME


# Digests are the same on every machine, even if the program lies in different folders.


@functools.lru_cache(maxsize=4096)
def portable(file: str) -> str:
    """Return a file's path relative to the entry of ``sys.path``, or the working directory, that contains it."""
    best = ""
    for entry in (*sys.path, os.getcwd()):  # noqa: PTH109  (faster than Path)
        prefix = os.path.join(os.path.abspath(entry), "")  # noqa: PTH100, PTH118
        if file.startswith(prefix) and len(prefix) > len(best):
            best = prefix
    return file[len(best) :]


@functools.lru_cache(maxsize=4096)
def resolved(file: str) -> str:
    """Return this machine's file for a portable name; the name itself if there is none."""
    for entry in (*sys.path, os.getcwd()):  # noqa: PTH109
        path = os.path.join(os.path.abspath(entry), file)  # noqa: PTH100, PTH118
        if os.path.isfile(path) and os.path.normpath(path) == path:  # noqa: PTH113  (none with "..")
            return path
    return file


@functools.lru_cache(maxsize=4096)  # shared by thousands of simulated workers
def digest_of(order_check: OrderCheck, post: Post) -> int:
    """Return a number of 128 bits that stands for a call's fingerprint on every machine."""
    call = post.call
    if call.function is not None:
        call = replace(call, function=call.function._replace(file=portable(call.function.file)))
    path = tuple(place._replace(file=portable(place.file)) for place in post.path)
    return int.from_bytes(digest(order_check, [Post(call, path)]), "little")


@functools.lru_cache(maxsize=4096)
def callers_of(post: Post) -> Callers:
    """Return hashes of the nearest caller and of the nearest two, equal on every machine; see `_core.callers`."""
    places = [(portable(place.file), *place[1:3]) for place in post.path[1:3]]
    nearest, two = (blake2b(repr(places[:depth]).encode(), digest_size=8).digest() for depth in (1, 2))
    return int.from_bytes(nearest, "little"), int.from_bytes(two, "little")
