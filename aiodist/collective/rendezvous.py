"""A rendezvous: one collective's meeting. What was asked, what each replica brought, the result, who waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, TracebackType
from typing import Any

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.leaves import has_foreign
from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives.execution import Executor, executor
from aiodist._collectives.host import HostExecutor, in_native_order
from aiodist._collectives.work import Work
from aiodist.collective.kinds import collective_of
from aiodist.collective.out_buffers import OutBuffers
from aiodist.collective.signature import KIND, SHAPES, STRUCTURE, TYPES, Signature


class Rendezvous:
    """The meeting of all replicas at their k-th collective.

    The first arrival sets the signature and the call site. A later one that differs in either is kept in ``others``;
    most meetings have none.

    Attributes:
        number: k, the sequence number.
        size: how many replicas the group has.
        signature, code, offset: what the first arrival asked, and from where.
        others: by id in the run, signature, code and offset of arrivals that are not literally the first one's.
        values: by position in the group, what each brought: a leaf, or a list of them; emptied on completion.
        options: how the result is to be made.
        started: when the first arrived, on the event loop's clock.
        missing: how many replicas have not arrived.
        last: the position of the replica whose arrival completed it.
        plain: the result is what every replica gets, as it is.
        shared_nest: the result is a list of leaves, which every replica gets in containers of its own.
        by_replica: there is a result for each replica, by its id, also where one would serve all.
        agreed: every replica has arrived, and all mean the same.
        under_way: worker threads make the result, from what all have brought.
        complete: the result, or the error, is there.
        released: those who wait have been woken; who comes now need not wait.
        absent: the positions of replicas that take part with nothing, for they have joined.
        outs: by position, the buffers that it wants the result in.
        waiters: who waits, by position, and behind them the second and further tasks of replicas.
    """

    # One is made for every collective. Defaults stand in the class, so that making one writes only what it needs.
    agreed = under_way = complete = released = plain = shared_nest = by_replica = False
    last = -1
    options = CommunicationOptions()
    result: Any = None
    error: BaseException | None = None
    traceback: TracebackType | None = None
    deadline: float | None = None
    others: dict[int, tuple[Signature, CodeType, int]] | None = None
    outs: dict[int, OutBuffers] | None = None
    absent: tuple[int, ...] | None = None

    def __init__(
        self, number: int, signature: Signature, code: CodeType, offset: int, size: int, started: float
    ) -> None:
        self.number = number
        self.signature = signature
        self.code = code
        self.offset = offset
        self.missing = self.size = size
        self.started = started
        self.values: list[Any] = [None] * size
        self.waiters: list[Any] = [None] * size

    @property
    def call(self) -> tuple[Signature, CodeType, int]:
        """What the first arrival asked, and from where."""
        return self.signature, self.code, self.offset

    def call_of(self, replica_id: int) -> tuple[Signature, CodeType, int]:
        """Return what that replica asked and from where; it has arrived."""
        if self.others is not None and replica_id in self.others:
            return self.others[replica_id]
        return self.call

    def add_other(self, replica_id: int, signature: Signature, code: CodeType, offset: int) -> None:
        """Keep an arrival that is not literally the first one's."""
        if self.others is None:
            self.others = {}
        self.others[replica_id] = signature, code, offset

    def fail(self, error: BaseException) -> None:
        """Set what went wrong as the outcome."""
        self.error = error
        self.traceback = error.__traceback__  # each replica that raises the error begins from here

    def add_waiter(self, position: int, waiter: Any) -> None:
        """Keep a task of that replica to be woken: its first in replica order, further ones behind all of those."""
        if self.waiters[position] is None:
            self.waiters[position] = waiter
        else:
            self.waiters.append(waiter)

    def has_waiters(self) -> bool:
        """Whether anybody waits."""
        return any(waiter is not None for waiter in self.waiters)

    def read(self, position: int, structure: nests.Structure | None) -> Any:
        """Return the result for that replica: containers of its own, around leaves that may be shared.

        Args:
            position: the replica's, in the group.
            structure: the structure of what it brought.
        """
        signature = self.signature
        if self.outs is not None and position in self.outs:
            return self.outs[position].nest
        result = self.result if signature[KIND].shared and not self.by_replica else self.result[position]
        if structure is None or signature[SHAPES] is None:  # a single leaf, or no value at all
            return result
        return nests.unflatten(structure, result)

    def combine(self, executor: Executor | None) -> Work | None:
        """Compute the result of what the replicas brought, and keep it; or return the work that it is.

        Args:
            executor: what carries it out; None for kinds of their own.
        """
        signature, kind = self.signature, self.signature[KIND]
        if self.others is not None:
            self.put_in_native_order()
        if executor is None:
            absent = self.absent or ()
            values = [value for position, value in enumerate(self.values) if position not in absent]
            result = kind.combine(signature, values, self.options)
        else:
            self.by_replica = kind.shared and not executor.shared
            if self.outs is None:
                result = executor.run(self.values, self.options.bytes_per_pack)
            else:
                result = executor.run(self.values, self.options.bytes_per_pack, self._buffers())
        if type(result) is Work:
            return result
        self.take(result)
        return None

    def executor(self, devices: tuple[str, ...]) -> Executor | None:
        """Return what carries it out; None for kinds of their own.

        Args:
            devices: the replicas'.

        Raises:
            ValueError: it takes a value of a replica that has joined.
        """
        if self.signature[KIND].computes is None:
            return None
        collective, absent = collective_of(self.signature), self.absent or ()
        if absent:
            collective.check_present(absent)
        return executor(collective, self.size, absent, self.options.accumulate, devices)

    def _buffers(self) -> dict[int, Sequence[Any]]:
        return {position: buffers.leaves for position, buffers in (self.outs or {}).items()}

    def put_in_native_order(self) -> None:
        """Give what the replicas brought one byte order, where arrivals differ from the first."""
        if self.others is not None:
            self.values = list(map(in_native_order, self.values))

    def take_from_afar(self, result: Any) -> None:
        """Keep a result in which replicas elsewhere have a part, and put it where the local ones want it."""
        if self.outs is not None:
            leaves = result if self.signature[STRUCTURE] is not None else [result]
            for buffers in self.outs.values():
                for buffer, leaf in zip(buffers.leaves, leaves, strict=True):
                    np.copyto(buffer, leaf)
        foreign = self.signature[TYPES] is not None and has_foreign(self.signature[TYPES])
        self.take(self._handed_out(result) if foreign else result)

    def take(self, result: Any) -> None:
        """Keep a result."""
        self.result = result
        if not self.by_replica and self.outs is None and self.signature[KIND].shared:
            self.plain = self.signature[STRUCTURE] is None
            self.shared_nest = not self.plain

    def _handed_out(self, result: Any) -> Any:
        """Turn a result's arrays, where replicas brought another framework's, into that framework's again."""
        host = HostExecutor(collective_of(self.signature), self.size, self.absent or ())
        self.by_replica = self.signature[KIND].shared
        single, of_each = self.signature[STRUCTURE] is None, not self.by_replica
        rows = [[row] if single else row for row in (result if of_each else [result])]
        return host.handed_out(list(zip(*rows, strict=True)), self._buffers())
