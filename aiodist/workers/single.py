"""One array of one local replica, reduced by the engine from its own memory into the result's: the shortest way.

It is what most steps of a training loop are. Of a call that comes again all is known but the array: `Single` holds
that, and is shared by all of the call's steps; nothing in it changes. What it gives is what `Reduction` gives, which
serves where the array cannot be sent as it lies, or the engine does not reduce its dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiodist.workers.communicator import Array, Communicator, Request
from aiodist.workers.layout import Layout
from aiodist.workers.leaves import Leaf, finished
from aiodist.workers.reduction import Reduction, in_order_of
from aiodist.workers.transfers import SEGMENT, Hands, Steps
from aiodist_kernels import ReduceOp
from aiodist_kernels.pool import results as pool
from aiodist_kernels.rules import Rule


class Single:
    """What is known of such reductions before there is an array.

    Args:
        op: SUM, PRODUCT, MIN or MAX.
        rule: how it is reduced, without any conversion.
        shape: the array's.
        layout: the workers.
    """

    __slots__ = ("flat", "layout", "op", "room", "rule", "segments", "shape")

    def __init__(self, op: ReduceOp, rule: Rule, shape: tuple[int, ...], layout: Layout) -> None:
        self.op = op
        self.rule = rule
        self.shape = shape
        self.layout = layout
        size = int(np.prod(shape, dtype=int))
        step = max(1, SEGMENT // rule.dtype.itemsize)
        self.flat = (size,)
        self.room = size * rule.dtype.itemsize
        self.segments = [(begin, min(begin + step, size)) for begin in range(0, size, step)]


class SingleReduction:
    """The reduction of one array.

    Args:
        known: what it shares with others.
        array: the array, in native byte order.
    """

    __slots__ = ("_array", "_known", "room")
    is_light = True

    def __init__(self, known: Single, array: Array) -> None:
        self._known = known
        self._array = array
        self.room = known.room

    def fits(self, room: int, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return whether it fits, which is the same on every worker."""
        return self.room <= room

    @property
    def data(self) -> Array:
        """Never called: what fits into a record is a `SmallReduction`."""
        raise NotImplementedError

    def from_records(self, parts: Sequence[memoryview]) -> list[Array]:
        """Never called, likewise."""
        raise NotImplementedError

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None, hands: Hands) -> Steps[list[Any]]:
        """Reduce it, segment by segment."""
        known, array = self._known, self._array
        rule = known.rule
        if not array.flags.c_contiguous or not communicator.reduces(known.op, rule.dtype):
            return (yield from self._reduction().carry_out(communicator, lengths, hands))
        send, out = array.reshape(-1), pool.empty(known.flat, rule.dtype)
        if len(known.segments) == 1:
            yield communicator.iallreduce(known.op, send, out)
            finished(rule, out, known.layout.replicas)
        else:
            yield from self._in_segments(communicator, send, out)
        out = out.reshape(known.shape)
        out.setflags(write=False)
        return [out]

    def _in_segments(self, communicator: Communicator, send: Array, out: Array) -> Steps[None]:
        depth, pending = communicator.segment_depth, deque[tuple[Request, Array]]()
        for begin, end in self._known.segments:
            if len(pending) == depth:
                yield from self._finish(pending)
            total = out[begin:end]
            pending.append((communicator.iallreduce(self._known.op, send[begin:end], total), total))
        while pending:
            yield from self._finish(pending)

    def _finish(self, pending: deque[tuple[Request, Array]]) -> Steps[None]:
        request, total = pending.popleft()
        yield request
        finished(self._known.rule, total, self._known.layout.replicas)

    def _reduction(self) -> Reduction:
        leaf = Leaf(self._known.rule, [self._array], scalar=False)
        return Reduction(self._known.op, [leaf], self._known.layout.replicas, in_order_of(self._known.layout))
