"""The record that opens every step: one buffer of fixed size, exchanged by one collective of fixed kind.

    digest     16 bytes   of the call, of the use of the lane, and of how many records have come before
    flags       8         `Flag`
    notice      8         `Notice`
    length      8         of what is to be gathered, or broadcast, by this worker, in bytes
    free        8         the lanes that this worker has free, a bit each
    payload   448         a small value, or its first part

The first three are the head. Mostly all workers' heads are equal, which is seen without taking them apart.

Up to 64 workers every worker receives every record. Beyond, the records of all would be more than the step is worth. A
MIN all-reduce of 100 bytes then tells all that is needed, each byte for itself:

    digest     16 bytes   the least; equal to one's own, and so is the least complement, where all are equal
    complement 16
    flags       1         of all, and their complement, likewise
    complement  1
    first       1         the first worker's flags; the others bring the greatest number
    free       64         a byte a lane, 1 where it is free
    notice      1         the complement of the highest

A worker sees its own digest in both least ones only if nobody has another: so all workers see the same.
The digest and the flags of a worker whose replicas have all joined do not count: it brings the greatest of each.
"""

from __future__ import annotations

import enum
import struct
from functools import reduce
from operator import and_
from typing import Final, NamedTuple

import numpy as np

from aiodist.workers.communicator import Communicator, Request
from aiodist_kernels import ReduceOp

_HEADER: Final = struct.Struct("<16sQQQQ")
_HEAD: Final = struct.Struct("<16sQQ")
SIZE: Final = 512
PAYLOAD: Final = 448
ALL_RECEIVE_ALL: Final = 64
_PAYLOAD_AT: Final = SIZE - PAYLOAD
ALL_FREE: Final = (1 << 64) - 1
_COMPARED: Final = slice(0, 17)
_COMPLEMENT: Final = slice(17, 34)
_FIRST: Final = 34
_FREE: Final = slice(35, 99)
_NOTICE: Final = 99
_LEAST: Final = 100
_GREATEST: Final = 255


class Flag:
    """What a record says beside its digest, no part of what must agree: bits of plain numbers, as all steps have some.

    Attributes:
        FLOAT64: float32 sums accumulate in float64.
        FAILED: the call has failed on this worker before its record was brought. It comes with no other.
    """

    NONE: Final = 0
    FLOAT64: Final = 1
    FAILED: Final = 2


class Notice(enum.IntEnum):
    """What the others must know of a worker before anything moves. The highest of all workers counts.

    Attributes:
        NONE: nothing; all its replicas have arrived.
        GROUPS: it has ended, and has groups across workers that are not closed.
        PENDING: it has ended, and others have not made a group that it has made, as far as it knows.
        ABSENT: some of its replicas have joined.
        JOINED: all of them have, so that it does not know what the step is.
    """

    NONE = 0
    GROUPS = 1
    PENDING = 2
    ABSENT = 3
    JOINED = 4


class Row(NamedTuple):
    """One worker's record."""

    length: int
    free: int
    flags: int
    payload: memoryview


class Opening:
    """The records of one lane: the buffers, used again for every step.

    Args:
        communicator: the lane's.

    Attributes:
        complete: every worker receives every record.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.complete = communicator.size <= ALL_RECEIVE_ALL
        self._own = np.zeros(SIZE if self.complete else _LEAST, np.uint8)
        self._all = np.zeros(SIZE * communicator.size if self.complete else _LEAST, np.uint8)
        self._view = self._own.data
        self._begins = range(0, SIZE * communicator.size, SIZE)
        self._head = self._found = b""
        self._notice = Notice.NONE

    def post(
        self,
        digest: bytes,
        length: int = 0,
        free: int = ALL_FREE,
        flags: int = Flag.NONE,
        notice: Notice = Notice.NONE,
        payload: bytes = b"",
    ) -> Request:
        """Begin the exchange of records."""
        self._notice = notice
        if not self.complete:
            return self._post_least(digest, free, flags, notice)
        own = self._view
        self._head = _HEAD.pack(digest, flags, notice)
        _HEADER.pack_into(own, 0, digest, flags, notice, length, free)
        if payload:
            own[_PAYLOAD_AT : _PAYLOAD_AT + len(payload)] = payload
        return self._communicator.iallgather(self._own, self._all)

    def _post_least(self, digest: bytes, free: int, flags: int, notice: Notice) -> Request:
        own = self._own
        own[_COMPARED] = np.frombuffer(digest + bytes([flags]), np.uint8)
        np.invert(own[_COMPARED], out=own[_COMPLEMENT])
        own[_NOTICE] = _GREATEST - notice
        if notice is Notice.JOINED:
            own[_COMPARED] = own[_COMPLEMENT] = _GREATEST
        own[_FIRST] = flags if self._communicator.rank == 0 else _GREATEST
        own[_FREE] = np.unpackbits(np.frombuffer(free.to_bytes(8, "little"), np.uint8), bitorder="little")
        return self._communicator.iallreduce(ReduceOp.MIN, own, self._all)

    # What the records say, once the exchange is complete; `alike` is asked first.

    def alike(self) -> bool:
        """Return whether all workers bring the same digest and flags, and no notice: mostly they do."""
        if not self.complete:
            alike = self._notice is Notice.NONE and self._same(_COMPARED) and self._same(_COMPLEMENT)
            return alike and bool(self._all[_NOTICE] == _GREATEST)
        found = self._found = self._all.tobytes()
        if self._notice:
            return False
        head = self._head
        for begin in self._begins:  # noqa: SIM110  (in the way of every step, where `all` takes three times as long)
            if not found.startswith(head, begin):
                return False
        return True

    def agreed(self) -> bool:
        """Return whether all digests that count are equal."""
        if not self.complete:
            if self._notice is not Notice.JOINED:
                return self._same(slice(0, 16)) and self._same(slice(17, 33))
            return self.digest() is None or bool((self._all[:16] == ~self._all[17:33]).all())
        return len({digest for digest, notice in self._digests() if notice != Notice.JOINED}) <= 1

    def notice(self) -> Notice:
        """Return the highest notice of all workers."""
        if self.complete:
            return Notice(max(notice for _, notice in self._digests()))
        return Notice(_GREATEST - int(self._all[_NOTICE]))

    def digest(self) -> bytes | None:
        """Return the digest on which those agree whose replicas have not all joined; None where there are none."""
        if self.complete:
            return next((digest for digest, notice in self._digests() if notice != Notice.JOINED), None)
        nobody = bool((self._all[:16] == _GREATEST).all() and (self._all[17:33] == _GREATEST).all())
        return None if nobody else self._all[:16].tobytes()

    def _digests(self) -> list[tuple[bytes, int]]:
        found = []
        for begin in self._begins:
            digest, _, notice, _, _ = _HEADER.unpack_from(self._found, begin)
            found.append((digest, notice))
        return found

    def _same(self, part: slice) -> bool:
        return self._all[part].tobytes() == self._own[part].tobytes()

    def first_flags(self) -> int:
        """Return the first worker's flags."""
        return self.rows()[0].flags if self.complete else int(self._all[_FIRST])

    def failed(self) -> tuple[bool, bool]:
        """Return whether the call has failed on some worker, and on all but those whose replicas have joined."""
        if self.complete:
            heads = (_HEAD.unpack_from(self._found, begin) for begin in self._begins)
            found = [flags & Flag.FAILED for _, flags, notice in heads if notice != Notice.JOINED]
            return any(found), all(found)
        return self._greatest_flags() >= Flag.FAILED, int(self._all[_COMPARED][-1]) >= Flag.FAILED

    def _greatest_flags(self) -> int:
        return _GREATEST - int(self._all[_COMPLEMENT][-1])

    def free(self) -> int:
        """Return the lanes that all workers have free, a bit each."""
        if self.complete:
            return reduce(and_, (row.free for row in self.rows()))
        return int.from_bytes(np.packbits(self._all[_FREE], bitorder="little").tobytes(), "little")

    def rows(self) -> list[Row]:
        """Return the records of all workers; none where not every worker receives them."""
        whole = memoryview(self._found)
        return [_row(whole[begin : begin + SIZE]) for begin in self._begins] if self.complete else []

    def payloads(self) -> list[memoryview]:
        """Return what the records of all workers hold; every worker has received them."""
        whole = memoryview(self._found)
        return [whole[begin + _PAYLOAD_AT : begin + SIZE] for begin in self._begins]


def _row(record: memoryview) -> Row:
    _, flags, _, length, free = _HEADER.unpack_from(record)
    return Row(length, free, flags, record[_PAYLOAD_AT:])
