"""The record that opens every step: one buffer of fixed size, exchanged by one collective of fixed kind.

    digest     16 bytes   of all calls of the lane so far, this one among them
    length      8         of what is to be gathered, or broadcast, by this worker, in bytes
    free        8         the lanes that this worker has free, a bit each
    flags       8         `Flag`
    payload   448         a small value, or its first part

Up to 64 workers every worker receives every record. Beyond, the records of all would be more than the step is worth:
the least digest and the least complement of it are found by a reduction, and are equal to one's own where all are
equal.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

import numpy as np

from aiodist.workers.communicator import Communicator, Request
from aiodist_kernels import ReduceOp

_HEADER: Final = struct.Struct("<16sQQQ")
SIZE: Final = 512
PAYLOAD: Final = 448
ALL_RECEIVE_ALL: Final = 64
_PAYLOAD_AT: Final = SIZE - PAYLOAD
ALL_FREE: Final = (1 << 64) - 1


class Flag(enum.IntFlag):
    """What a record says beside its digest. A flag is no part of what must agree."""

    NONE = 0
    FLOAT64 = 1  # float32 sums accumulate in float64


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
        self._least = np.zeros(6, np.uint64)
        self._expected = self._least
        self._digest = b""

    def post(
        self,
        digest: bytes,
        *,
        length: int = 0,
        free: int = ALL_FREE,
        flags: Flag = Flag.NONE,
        payload: bytes | bytearray = b"",
    ) -> Request:
        """Begin the exchange of records."""
        self._digest = digest
        if not self.complete:
            return self._post_least(digest, flags)
        own = self._own.data
        _HEADER.pack_into(own, 0, digest, length, free, flags)
        own[_PAYLOAD_AT : _PAYLOAD_AT + len(payload)] = payload
        return self._communicator.iallgather(self._own, self._all)

    def _post_least(self, digest: bytes, flags: Flag) -> Request:
        words = np.frombuffer(digest + int(flags).to_bytes(8, "little"), np.uint64)
        self._expected = np.concatenate([words, ~words])
        self._least = np.empty_like(self._expected)
        return self._communicator.iallreduce(ReduceOp.MIN, self._expected, self._least)

    def agreed(self) -> bool:
        """Return whether all digests are equal; the exchange is complete."""
        if not self.complete:
            return bool((self._least[[0, 1, 3, 4]] == self._expected[[0, 1, 3, 4]]).all())
        whole, digest = self._all.data, self._digest
        return all(whole[at : at + 16] == digest for at in range(0, len(whole), SIZE))

    def same_flags(self) -> bool:
        """Return whether all flags are equal to one's own."""
        if not self.complete:
            return bool((self._least == self._expected).all())
        flags = self._all[32:40].tobytes()
        return all(self._all[at + 32 : at + 40].tobytes() == flags for at in range(SIZE, len(self._all), SIZE))

    def rows(self) -> list[Row]:
        """Return the records of all workers, where every worker receives them."""
        whole = self._all.data
        return [_row(whole[at : at + SIZE]) for at in range(0, len(whole), SIZE)]


def _row(record: memoryview) -> Row:
    _, length, free, flags = _HEADER.unpack_from(record)
    return Row(length, free, Flag(flags), record[_PAYLOAD_AT:])
