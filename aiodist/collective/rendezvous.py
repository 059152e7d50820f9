"""A rendezvous: one collective's meeting. What was asked, what each replica brought, the result, who waits for it."""

from __future__ import annotations

from types import CodeType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from aiodist.collective.signature import KIND, SHAPES, STRUCTURE, Signature
from aiodist.vocabulary import nests
from aiodist_kernels import Accumulate


class OutBuffers(NamedTuple):
    """A replica's own buffers for a result: the leaves, and the nest that they stand in."""

    leaves: list[np.ndarray[Any, Any]]
    nest: Any


class Rendezvous:
    """The meeting of all replicas at their k-th collective.

    The first arrival sets the signature and the call site. A later one that differs in either is kept in ``others``;
    most meetings have none.

    Attributes:
        number: k, the sequence number.
        signature, code, offset: what the first arrival asked, and from where.
        others: by replica id, signature, code and offset of arrivals that are not literally the first one's.
        values: by replica id, what each brought: a leaf, or a list of leaves for a nest; emptied on completion.
        missing: how many replicas have not arrived.
        agreed: every replica has arrived, and all mean the same.
        complete: the result, or the error, is there.
        released: those who wait have been woken; who comes now need not wait.
        outs: by replica id, the buffers that it wants the result in.
        waiters, more_waiters: who waits: by replica id, and the second and further tasks of a replica.
    """

    __slots__ = (
        "accumulate",
        "agreed",
        "code",
        "complete",
        "deadline",
        "error",
        "missing",
        "more_waiters",
        "number",
        "offset",
        "others",
        "outs",
        "released",
        "result",
        "signature",
        "started",
        "traceback",
        "values",
        "waiters",
    )

    def __init__(self, number: int, signature: Signature, code: CodeType, offset: int, size: int) -> None:
        self.number = number
        self.signature = signature
        self.code = code
        self.offset = offset
        self.missing = size
        self.values: list[Any] = [None] * size
        self.waiters: dict[int, Any] = {}
        self.agreed = self.complete = self.released = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None
        self.others: dict[int, tuple[Signature, CodeType, int]] | None = None
        self.more_waiters: list[Any] | None = None
        self.outs: dict[int, OutBuffers] | None = None
        self.started = 0.0
        self.deadline: float | None = None
        self.accumulate: Accumulate = "native"

    def call_of(self, replica_id: int) -> tuple[Signature, CodeType, int]:
        """Return what that replica asked and from where; it has arrived."""
        if self.others is not None and replica_id in self.others:
            return self.others[replica_id]
        return self.signature, self.code, self.offset

    def add_other(self, replica_id: int, signature: Signature, code: CodeType, offset: int) -> None:
        """Keep an arrival that is not literally the first one's."""
        if self.others is None:
            self.others = {}
        self.others[replica_id] = signature, code, offset

    def fail(self, error: BaseException) -> None:
        """Set what went wrong as the outcome."""
        self.error = error
        self.traceback = error.__traceback__  # each replica that raises the error begins from here

    def add_waiter(self, replica_id: int, waiter: Any) -> None:
        """Keep a task of that replica to be woken: its first in replica order, further ones behind all of those."""
        if replica_id not in self.waiters:
            self.waiters[replica_id] = waiter
        elif self.more_waiters is None:
            self.more_waiters = [waiter]
        else:
            self.more_waiters.append(waiter)

    def take_waiters(self) -> list[Any]:
        """Return those who wait, in replica order, and forget them."""
        waiters = self.waiters
        ordered = [waiters[replica_id] for replica_id in sorted(waiters)]
        if self.more_waiters is not None:
            ordered += self.more_waiters
        self.waiters, self.more_waiters = {}, None
        return ordered

    def read(self, replica_id: int) -> Any:
        """Return the result for that replica: its own containers, around leaves that may be shared."""
        signature = self.signature
        if self.outs is not None and replica_id in self.outs:
            return self.outs[replica_id].nest
        result = self.result if signature[KIND].shared else self.result[replica_id]
        structure = signature[STRUCTURE]
        if structure is None or signature[SHAPES] is None:  # a single leaf, or no value at all
            return result
        return nests.unflatten(structure, result)

    def fill_outs(self) -> None:
        """Write the shared result into the buffers that replicas brought."""
        if self.outs is None:
            return
        leaves = self.result if self.signature[STRUCTURE] is not None else [self.result]
        for buffers in self.outs.values():
            for buffer, leaf in zip(buffers.leaves, leaves, strict=True):
                np.copyto(buffer, leaf)
