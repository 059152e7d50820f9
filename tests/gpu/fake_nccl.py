"""NCCL for simulated workers on planted GPUs: an operation occupies its stream until all workers have come to it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist.gpu import nccl
from aiodist_kernels import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from aiodist.gpu.nccl import Buffer
    from tests.gpu.fake_driver import FakeDriver

UFUNCS = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}


@dataclass
class Operation:
    """One step: what each worker's stream has come to it with."""

    brought: dict[int, list[np.ndarray]] = field(default_factory=dict)
    done: bool = False


@dataclass
class Clique:
    """The workers of one link."""

    size: int
    members: dict[int, FakeLink] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)


class FakeLink:
    """A worker's part of it.

    Attributes:
        aborted: it has been ended.
        error: what it tells of from now on.
    """

    def __init__(self, owner: FakeNccl, clique: Clique, rank: int) -> None:
        self.owner, self.clique, self.rank = owner, clique, rank
        self.aborted = False
        self.error: str | None = None
        self.count = 0
        clique.members[rank] = self

    def is_ready(self) -> bool:
        assert not self.aborted
        if self.error is not None:
            raise RuntimeError(self.error)
        return len(self.clique.members) == self.clique.size

    def all_reduce(self, op: ReduceOp, buffers: Sequence[Buffer], stream: int) -> None:
        self._enqueue(op, buffers, stream)

    def broadcast(self, root: int, buffers: Sequence[Buffer], stream: int) -> None:
        self._enqueue(root, buffers, stream)

    def _enqueue(self, op: ReduceOp | int, buffers: Sequence[Buffer], stream: int) -> None:
        assert not self.aborted
        assert self.is_ready(), "the link is not made yet"
        self.owner.steps.append((self.rank, op, tuple(buffer.kind for buffer in buffers)))
        if self.owner.refuse == self.rank:
            raise RuntimeError("NCCL cannot reduce: planted")
        if self.count == len(self.clique.operations):
            self.clique.operations.append(Operation())
        operation = self.clique.operations[self.count]
        self.count += 1
        if self.rank in self.owner.late:
            self.owner.driver.queues["own", stream].append(lambda: self.aborted)
            return
        self.owner.driver.queues["own", stream].append(lambda: self._carry_out(operation, op, buffers))

    def _carry_out(self, operation: Operation, op: ReduceOp | int, buffers: Sequence[Buffer]) -> bool:
        if self.aborted:
            return True
        operation.brought.setdefault(self.rank, [_array(buffer) for buffer in buffers])
        if not operation.done and len(operation.brought) == self.clique.size:
            operation.done = True
            with np.errstate(all="ignore"):
                for alike in zip(*(operation.brought[rank] for rank in range(self.clique.size)), strict=True):
                    total = _total(op, alike)
                    for each in alike:
                        each[...] = total
        return operation.done

    def abort(self) -> None:
        self.aborted = True


class FakeNccl:
    """The library.

    Attributes:
        steps: what was reduced, or broadcast: by whom, the op or the root, what kinds of numbers.
        fail: the worker that cannot be linked.
        refuse: the worker whose reductions are refused.
        late: workers whose streams never come to an operation.
    """

    version = "2.32.3"

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.cliques: dict[bytes, Clique] = {}
        self.steps: list[tuple[int, ReduceOp | int, tuple[str, ...]]] = []
        self.links: list[FakeLink] = []
        self.fail: int | None = None
        self.refuse: int | None = None
        self.late: set[int] = set()

    def new_id(self) -> bytes:
        return len(self.cliques).to_bytes(nccl.ID_BYTES, "big")

    def link(self, size: int, rank: int, known_by: bytes) -> FakeLink:
        if rank == self.fail:
            raise RuntimeError("NCCL cannot link the workers: planted")
        link = FakeLink(self, self.cliques.setdefault(known_by, Clique(size)), rank)
        self.links.append(link)
        return link

    @property
    def open_links(self) -> int:
        """How many links nobody has ended."""
        return sum(not link.aborted for link in self.links)


def _total(op: ReduceOp | int, brought: Sequence[np.ndarray]) -> np.ndarray:
    if isinstance(op, int):
        return brought[op].copy()
    total = brought[0].copy()
    for other in brought[1:]:
        total = UFUNCS[op](total, other)
    return total


def _array(buffer: Buffer) -> np.ndarray[Any, Any]:
    dtype = np.dtype(buffer.kind)
    memory: Any = (ctypes.c_ubyte * (buffer.length * dtype.itemsize)).from_address(buffer.address)
    return np.frombuffer(memory, dtype)


def planted_nccl(patch: pytest.MonkeyPatch, driver: FakeDriver) -> FakeNccl:
    """Let this machine have NCCL."""
    found = FakeNccl(driver)
    patch.setattr(nccl, "library", lambda: found)
    return found
