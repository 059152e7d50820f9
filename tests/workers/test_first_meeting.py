"""The first meeting of workers that are processes of their own: what they tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from aiodist.workers.communicator import Array, Request
from aiodist.workers.joining import Hello, Joining
from aiodist.workers.local import LocalCommunicator

HELLO = Hello(("CPU:0",), "a machine", 1, None)


class Others(LocalCommunicator):
    """A worker of three, whose others tell what it tells, changed.

    Args:
        change: changes it.
    """

    def __init__(self, change: Callable[[Array], Array]) -> None:
        super().__init__()
        self.size = 3
        self._change = change

    def iallgather(self, send: Array, receive: Array) -> Request:
        receive[...] = np.tile(send, 3)
        return super().iallgather(send[:0], receive[:0])

    def iallgatherv(
        self, send: Array, receive: Array, counts: Sequence[int], places: Sequence[int] | None = None
    ) -> Request:
        assert list(counts) == [len(send)] * self.size
        receive[...] = np.concatenate([send, self._change(send.copy()), send])
        return super().iallgather(send[:0], receive[:0])


def other_version(told: Array) -> Array:
    told[:32] = np.frombuffer(b"0.0.9".ljust(32, b"\0"), np.uint8)
    told[32:] = 255  # which nobody can read
    return told


def test_workers_hear_of_all() -> None:
    assert Joining(Others(lambda told: told), HELLO).hellos == [HELLO] * 3


def test_other_version_of_aiodist_is_told_before_anything_else_of_it_is_read() -> None:
    joining = Joining(Others(other_version), HELLO)
    told = r"different versions of aiodist: \S+ on workers 0 and 2; 0\.0\.9 on worker 1\. Install the same one for all"
    with pytest.raises(RuntimeError, match=told):
        _ = joining.layout
