"""Reductions of what one local replica brings, in one accumulator: the shortest way, and that of most training loops.

There is nothing to fold here before the engine reduces. One array that needs no conversion goes, segment by segment,
from its own memory into the result's; what is converted, or a nest, is put together first where it is one segment. Of a
call that comes again all is known but the arrays: `Alone` holds that, for all of the call's steps.
What is given is what `Reduction` gives, which serves where the engine does not reduce the dtype, or an array cannot be
sent as it lies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from aiodist.workers.communicator import Array, Communicator, Request
from aiodist.workers.layout import Layout
from aiodist.workers.leaves import Leaf, finished, lies_well
from aiodist.workers.reduction import Reduction, in_order_of
from aiodist.workers.transfers import SEGMENT, Hands, OfFixedSize, Steps
from aiodist_kernels import ReduceOp
from aiodist_kernels.pool import results as pool
from aiodist_kernels.rounding import rounded
from aiodist_kernels.rules import Finish, Rule


class Alone:
    """What is known of such reductions before there are arrays.

    Args:
        rule: how the leaves are reduced, all of them.
        shapes: the leaves'.
        layout: the workers.

    Attributes:
        fold: the op by which the engine reduces: SUM, PRODUCT, MIN or MAX.
        as_it_lies: there is one leaf, which needs no conversion.
        ranges: by leaf, where it lies in the whole.
        segments: what of the whole is reduced at a time.
        whole: the whole is reduced at a time.
        plain: the total is the result, as it is.
        reduced_by: the latest communicator that has said that it reduces the dtype.
    """

    __slots__ = (
        "as_it_lies",
        "flat",
        "fold",
        "layout",
        "plain",
        "ranges",
        "reduced_by",
        "room",
        "rule",
        "segments",
        "shapes",
        "whole",
    )

    def __init__(self, rule: Rule, shapes: Sequence[tuple[int, ...]], layout: Layout) -> None:
        self.fold = ReduceOp.SUM if rule.op is ReduceOp.MEAN else rule.op
        self.rule = rule
        self.reduced_by: Communicator | None = None
        self.shapes = shapes
        self.layout = layout
        self.as_it_lies = len(shapes) == 1 and rule.dtype == rule.accumulator == rule.result
        self.ranges = list(pairwise(accumulate(map(prod, shapes), initial=0)))
        size = self.ranges[-1][1]
        step = max(1, SEGMENT // rule.accumulator.itemsize)
        self.flat = (size,)
        self.room = size * rule.accumulator.itemsize
        self.segments = [(begin, min(begin + step, size)) for begin in range(0, size, step)]
        self.whole = len(self.segments) == 1
        self.plain = self.whole and self.as_it_lies and self.flat == shapes[0] and rule.finish is Finish.NOTHING

    @property
    def serves(self) -> bool:
        """Whether this is a way for them."""
        return self.as_it_lies or self.whole


class AloneReduction(OfFixedSize):
    """The reduction of a step's arrays.

    Args:
        known: what is known of them.
        arrays: the leaves, all of one dtype, in native byte order.

    Attributes:
        send: what is reduced, in one piece, when it is ready.
        total: takes the total; None as long as it is not ready, or where this is no way for these arrays.
    """

    __slots__ = ("_arrays", "_known", "room", "send", "total")

    def __init__(self, known: Alone, arrays: Sequence[Array]) -> None:
        self._known = known
        self._arrays = arrays
        self.send: Array | None = None
        self.total: Array | None = None
        self.room = known.room

    def fits(self, room: int, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return whether it fits, which is the same on every worker."""
        return self.room <= room

    @property
    def data(self) -> Array:
        """Never called: what fits into a record goes other ways."""
        raise NotImplementedError

    def from_records(self, parts: Sequence[memoryview]) -> list[Any]:
        """Never called, likewise."""
        raise NotImplementedError

    def get_ready(self, communicator: Communicator) -> None:
        """Make the memory ready, where this is a way for these arrays; best while a record is on its way."""
        known = self._known
        if known.reduced_by is not communicator:
            if not communicator.reduces(known.fold, known.rule.accumulator):
                return
            known.reduced_by = communicator
        if not known.as_it_lies:
            flat = [array.reshape(-1) for array in self._arrays]
            self.send = np.concatenate(flat, dtype=known.rule.accumulator, casting="same_kind")
        elif lies_well(self._arrays[0]):
            send, own = self._arrays[0], known.rule.dtype
            if send.ndim > 1:
                send = send.reshape(-1)
            # there are equal dtypes of other names, of which an engine may know one
            self.send = send if send.dtype is own else send.view(own)
        else:
            return
        self.total = pool.empty(known.flat, known.rule.accumulator)

    def end(self) -> list[Any]:
        """Return the results, where all is reduced."""
        known, total = self._known, self.total
        assert total is not None
        if known.plain:
            total.setflags(write=False)
            return [total]
        if known.whole:
            finished(known.rule, total, known.layout.replicas)
        if known.rule.result != known.rule.accumulator:
            with np.errstate(all="ignore"):
                total = rounded(total, known.rule.result)
        results = []
        for (begin, end), shape in zip(known.ranges, known.shapes, strict=True):
            result = total[begin:end].reshape(shape)
            result.setflags(write=False)
            results.append(result)
        return results

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None, hands: Hands) -> Steps[list[Any]]:
        """Reduce them, segment by segment."""
        if self.total is None:
            self.get_ready(communicator)
        if self.send is None or self.total is None:
            return (yield from self._as_others().carry_out(communicator, lengths, hands))
        if self._known.whole:
            yield communicator.iallreduce(self._known.fold, self.send, self.total)
        else:
            yield from self._in_segments(communicator, self.send, self.total)
        return self.end()

    def _in_segments(self, communicator: Communicator, send: Array, total: Array) -> Steps[None]:
        depth, pending = communicator.segment_depth, deque[tuple[Request, Array]]()
        for begin, end in self._known.segments:
            if len(pending) == depth:
                yield from self._finish(pending)
            part = total[begin:end]
            pending.append((communicator.iallreduce(self._known.fold, send[begin:end], part), part))
        while pending:
            yield from self._finish(pending)

    def _finish(self, pending: deque[tuple[Request, Array]]) -> Steps[None]:
        request, part = pending.popleft()
        yield request
        finished(self._known.rule, part, self._known.layout.replicas)

    def _as_others(self) -> Reduction:
        known = self._known
        leaves = [Leaf(known.rule, [array], scalar=False) for array in self._arrays]
        return Reduction(known.fold, leaves, known.layout.replicas, in_order_of(known.layout))
