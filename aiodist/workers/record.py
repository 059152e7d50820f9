"""The record that opens every step: one buffer of fixed size, exchanged by one collective of fixed kind.

    digest     16 bytes   of all calls of the lane so far, this one among them
    length      8         of what is to be gathered, or broadcast, by this worker, in bytes
    free        8         the lanes that this worker has free, a bit each
    flags       8         `Flag`
    notice      8         `Notice`
    payload   448         a small value, or its first part

Up to 64 workers every worker receives every record. Beyond, the records of all would be more than the step is worth:
the least digest and the least complement of it are found by a reduction, and are equal to one's own where all are
equal. The digest of a worker whose replicas have all joined does not count: there it brings the greatest of both.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

import numpy as np

from aiodist.workers.communicator import Communicator, Request
from aiodist_kernels import ReduceOp

_HEADER: Final = struct.Struct("<16sQQQQ")
SIZE: Final = 512
PAYLOAD: Final = 448
ALL_RECEIVE_ALL: Final = 64
_PAYLOAD_AT: Final = SIZE - PAYLOAD
ALL_FREE: Final = (1 << 64) - 1
_GREATEST: Final = np.uint64(ALL_FREE)


class Flag(enum.IntFlag):
    """What a record says beside its digest. A flag is no part of what must agree."""

    NONE = 0
    FLOAT64 = 1  # float32 sums accumulate in float64


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
    flags: Flag
    payload: memoryview


class Opening:
    """The records of one lane: the buffers, used again for every step.

    Args:
        communicator: the lane's.
        complete: every worker is to receive every record, however many there are.
    """

    def __init__(self, communicator: Communicator, *, complete: bool = False) -> None:
        self._communicator = communicator
        self.complete = complete or communicator.size <= ALL_RECEIVE_ALL
        self._own = np.zeros(SIZE, np.uint8)
        self._all = np.zeros(SIZE * communicator.size, np.uint8) if self.complete else self._own
        self._least = np.zeros(8, np.uint64)
        self._expected = self._least
        self._digest = b""
        self._notice = Notice.NONE

    def post(
        self,
        digest: bytes,
        *,
        length: int = 0,
        free: int = ALL_FREE,
        flags: Flag = Flag.NONE,
        notice: Notice = Notice.NONE,
        payload: bytes | bytearray = b"",
    ) -> Request:
        """Begin the exchange of records."""
        self._digest, self._notice = digest, notice
        if not self.complete:
            return self._post_least(digest, flags, notice)
        own = self._own.data
        _HEADER.pack_into(own, 0, digest, length, free, flags, notice)
        own[_PAYLOAD_AT : _PAYLOAD_AT + len(payload)] = payload
        return self._communicator.iallgather(self._own, self._all)

    def _post_least(self, digest: bytes, flags: Flag, notice: Notice) -> Request:
        words = np.frombuffer(digest + struct.pack("<QQ", flags, notice), np.uint64)
        self._expected = np.concatenate([words, ~words])
        if notice is Notice.JOINED:
            self._expected[[0, 1, 2, 4, 5, 6]] = _GREATEST
        self._least = self._expected.copy()
        return self._communicator.iallreduce(ReduceOp.MIN, self._least)

    def agreed(self) -> bool:
        """Return whether all digests that count are equal; the exchange is complete."""
        if not self.complete:
            if self._notice is Notice.JOINED:
                return self.digest() is None or bool((self._least[:2] == ~self._least[4:6]).all())
            return bool((self._least[[0, 1, 4, 5]] == self._expected[[0, 1, 4, 5]]).all())
        whole, digest = self._all.data, self._digest
        if all(whole[at : at + 16] == digest for at in range(0, len(whole), SIZE)):
            return True
        return len({digest for digest, notice in self._digests() if notice < Notice.JOINED}) <= 1

    def same_flags(self) -> bool:
        """Return whether all flags, and all notices, are equal to one's own."""
        if not self.complete:
            return bool((self._least == self._expected).all())
        flags = self._all[32:48].tobytes()
        return all(self._all[at + 32 : at + 48].tobytes() == flags for at in range(SIZE, len(self._all), SIZE))

    def notice(self) -> Notice:
        """Return the highest notice of all workers."""
        if self.complete:
            return Notice(max(notice for _, notice in self._digests()))
        return Notice(int(~self._least[7]))

    def digest(self) -> bytes | None:
        """Return the digest on which those agree who have not joined; None where all have."""
        if self.complete:
            return next((digest for digest, notice in self._digests() if notice < Notice.JOINED), None)
        return None if Notice(int(self._least[3])) is Notice.JOINED else self._least[:2].tobytes()

    def _digests(self) -> list[tuple[bytes, int]]:
        whole = self._all.data
        found = []
        for at in range(0, len(whole), SIZE):
            digest, _, _, _, notice = _HEADER.unpack_from(whole, at)
            found.append((digest, notice))
        return found

    def rows(self) -> list[Row]:
        """Return the records of all workers, where every worker receives them."""
        whole = self._all.data
        return [_row(whole[at : at + SIZE]) for at in range(0, len(whole), SIZE)]


def _row(record: memoryview) -> Row:
    _, length, free, flags, _ = _HEADER.unpack_from(record)
    return Row(length, free, Flag(flags), record[_PAYLOAD_AT:])
