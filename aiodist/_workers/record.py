"""The record that opens every step: one buffer of fixed size, exchanged by one collective of fixed kind.

    digest     16 bytes   of all calls of the session so far, this one included
    flags       1         `FLOAT64`
    notice      1         `Notice`
    callers    16         by which ways this worker has come to calls at this place so far: see `session`
                6         nothing
    free        8         the channels that this worker has free, a bit each
    payload   480         a small value, or nothing

All but free channels and payload are the head. Mostly all workers' heads are equal, which is seen without taking them
apart.

Up to 64 workers, every worker receives every record. Beyond, the records of all would cost more than the step is worth:
then a MIN all-reduce of 134 bytes tells all that is needed, each byte for itself:

    digest     16 bytes   the least; equal to one's own, and so is the least complement, where all are equal
    flags       1         likewise
    callers    16         likewise
    complement 33         of the three
    least       1         the least notice
    greatest    1         the complement of the greatest notice
    first       1         the first worker's flags; the others contribute 255
    free       64         a byte a channel, 1 where it is free
                1         nothing

A worker sees its own digest in both least ones only if nobody has another: so all workers see the same. The digest of a
worker whose replicas have all joined does not count, for it does not know what the step is: it contributes 255
throughout.
"""

from __future__ import annotations

import enum
import struct
from functools import lru_cache
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from aiodist._workers.transport import Communicator, Request
from aiodist_kernels import ReduceOp

PAYLOAD: Final = 480
MOST_IN_FULL: Final = 64
"""Up to how many workers everybody receives every record."""

ALL_FREE: Final = (1 << 64) - 1
NO_FLAGS: Final = 0
FLOAT64: Final = 1
"""A flag: float32 sums accumulate in float64. The first worker's counts."""

_HEADER: Final = struct.Struct("<16sBBQQ6xQ")
_HEAD: Final = struct.Struct("<16sBBQQ")
_SIZE: Final = _HEADER.size + PAYLOAD
_COMPARED: Final = struct.Struct("<16sBQQ")
_LEAST: Final = struct.Struct("<33s33sBBB64sx")
_PARTS: Final = (slice(0, 16), slice(16, 17), slice(17, 25), slice(25, 33))
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
    END_UNSURE = 4  # likewise, and it has made groups of which it is not known that others have


class Agreement(enum.Enum):
    """What the records of all workers say together, and what follows."""

    ALIKE = enum.auto()  # all make the same call, with all their replicas; its values are moved
    WITHOUT_SOME = enum.auto()  # those that have not joined do: all tell each other what each replica contributes
    ALL_JOINED = enum.auto()  # all replicas have joined: all tell each other which was the last
    ENDED = enum.auto()  # all replicas have ended
    ENDED_UNSURE = enum.auto()  # likewise, and some worker wants to know whether others have made its groups, too
    DIFFERENT = enum.auto()  # the workers are at different calls


class Record(NamedTuple):
    """What a worker contributes."""

    digest: bytes
    flags: int = NO_FLAGS
    notice: Notice = Notice.NONE
    callers: Callers = ALIKE
    free: int = ALL_FREE
    payload: bytes | memoryview = b""


class Found(NamedTuple):
    """What all records say."""

    agreement: Agreement  # whether the workers are at the same call
    digest: bytes  # that of those who make a call
    flags: int  # the first worker's
    flags_alike: bool  # all have the same, so that payloads mean the same
    apart: Callers = ALIKE  # how far the workers' callers are apart; where not all records come, never the same twice


class RecordBuffers:
    """The buffers of a communicator's records, used again for every step.

    Attributes:
        in_full: every worker receives every record.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self.in_full = size <= MOST_IN_FULL
        self._own = np.zeros(_SIZE if self.in_full else _LEAST.size, np.uint8)
        self._all = np.zeros(_SIZE * size if self.in_full else _LEAST.size, np.uint8)
        self._view = self._own.data
        self._begins = range(0, _SIZE * size, _SIZE)
        self._record = Record(b"")
        self._found = b""
        self._numbers = count(1)

    def post(self, record: Record, communicator: Communicator) -> Request:
        """Contribute a record: begin the exchange."""
        self._record = record
        if not self.in_full:
            self._write_least(record)
            return communicator.iallreduce(ReduceOp.MIN, self._own, self._all)
        _HEADER.pack_into(self._view, 0, record.digest, record.flags, record.notice, *record.callers, record.free)
        if record.payload:
            self._view[_HEADER.size : _HEADER.size + len(record.payload)] = record.payload
        return communicator.iallgather(self._own, self._all)

    def _write_least(self, record: Record) -> None:
        compared = _COMPARED.pack(record.digest, record.flags, *record.callers)
        complement = compared.translate(_COMPLEMENTS)
        if record.notice is Notice.JOINED:
            compared = complement = bytes([_MOST]) * _COMPARED.size
        notices = record.notice, _MOST - record.notice
        first = record.flags if self._rank == 0 else _MOST
        _LEAST.pack_into(self._view, 0, compared, complement, *notices, first, _byte_each(record.free))

    def read(self) -> Found:
        """Return what all records say; the exchange is complete."""
        return self._read_all() if self.in_full else self._read_least()

    def _read_all(self) -> Found:
        own = self._record
        whole = self._found = self._all.tobytes()
        if own.notice is Notice.NONE and self._all_begin_with(
            _HEAD.pack(own.digest, own.flags, own.notice, *own.callers)
        ):
            return Found(Agreement.ALIKE, own.digest, own.flags, True)
        digests, flags, notices, *callers = zip(*(_HEAD.unpack_from(whole, at) for at in self._begins), strict=True)
        known = {digest for digest, notice in zip(digests, notices, strict=True) if notice != Notice.JOINED}
        agreement = _agreement(min(notices), max(notices), len(known) <= 1)
        nearest, two = (hash(tuple(n - sums[0] for n in sums)) if len(set(sums)) > 1 else 0 for sums in callers)
        return Found(agreement, next(iter(known), own.digest), flags[0], len(set(flags)) == 1, (nearest, two))

    def _all_begin_with(self, head: bytes) -> bool:
        for begin in self._begins:  # noqa: SIM110  (in the way of every step, where `all` takes three times as long)
            if not self._found.startswith(head, begin):
                return False
        return True

    def _read_least(self) -> Found:
        compared, complement, least, greatest, first, self._found = _LEAST.unpack(self._all.tobytes())
        most = complement.translate(_COMPLEMENTS)
        digests_alike, flags_alike, *callers_alike = (compared[part] == most[part] for part in _PARTS)
        agreement = _agreement(least, _MOST - greatest, digests_alike)
        digest = self._record.digest if agreement is Agreement.ALL_JOINED else compared[:16]
        nearest, two = (0 if alike else next(self._numbers) for alike in callers_alike)
        return Found(agreement, digest, first, flags_alike, (nearest, two))

    def free(self) -> int:
        """Return the channels that all workers have free, a bit each; `read` has been called."""
        if not self.in_full:
            return sum(1 << channel for channel, is_free in enumerate(self._found) if is_free)
        found = ALL_FREE
        for begin in self._begins:
            found &= _HEADER.unpack_from(self._found, begin)[-1]
        return found

    def payloads(self, counts: list[int]) -> list[memoryview]:
        """Return the first bytes of each worker's payload, by rank; `read` has been called, and all are received."""
        whole, skip = memoryview(self._found), _HEADER.size
        return [whole[begin + skip : begin + skip + count] for begin, count in zip(self._begins, counts, strict=True)]


@lru_cache(maxsize=256)
def _byte_each(free: int) -> bytes:
    return bytes(free >> channel & 1 for channel in range(64))


def _agreement(least: int, greatest: int, digests_alike: bool) -> Agreement:
    if greatest >= Notice.END:
        if least < Notice.END or not digests_alike:
            return Agreement.DIFFERENT
        return Agreement.ENDED if greatest == Notice.END else Agreement.ENDED_UNSURE
    if least == Notice.JOINED:
        return Agreement.ALL_JOINED
    if not digests_alike:
        return Agreement.DIFFERENT
    return Agreement.ALIKE if greatest == Notice.NONE else Agreement.WITHOUT_SOME
