"""Flights: the way of leaves from GPU to GPU, through NCCL. The record of the step has agreed by then."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from aiodist.collective.brought import Brought
from aiodist.collective.device_flight import Takeoff, Touchdown, buffer_of, bytes_of
from aiodist.collective.portion import Portion
from aiodist.collective.signature import DETAIL, KIND, OP, STRUCTURE
from aiodist.replica.device_steps import wait_for
from aiodist.vocabulary.reports import Reason
from aiodist.workers.layout import Layout
from aiodist.workers.nccl_plane import Use
from aiodist.workers.transfers import Hands, Steps, by_hand
from aiodist_kernels import Accumulate, ReduceOp

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup


class Flight:
    """The way of one meeting's leaves.

    Args:
        portion: those leaves.
        group: the local replicas, all of which have arrived.
        use: the run's use of NCCL.
        layout: of the workers.
    """

    def __init__(self, portion: Portion, group: SyncGroup, use: Use, layout: Layout) -> None:
        positions, names = [member.position for member in group.members], [member.device for member in group.members]
        values = [portion.values[position] for position in positions]
        self._brought = Brought(portion.signature, values, portion.options, positions, names)
        self._outs = portion.outs
        self._use = use
        self._layout = layout

    def carry_out(self, accumulate: Accumulate, hands: Hands) -> Steps[dict[int, Any]]:
        """Carry the leaves over to the other workers; return each local replica's result, by position.

        Raises:
            RuntimeError: NCCL has failed.
        """
        signature, options, layout = self._brought.signature, self._brought.options, self._layout
        brought = self._brought._replace(options=dataclasses.replace(options, accumulate=accumulate))
        root, place = (0, 0) if signature[KIND].detail is not Reason.SOURCE else layout.worker_of(signature[DETAIL])
        takeoff = Takeoff(brought, self._use.ordinal, place if root == layout.rank else None)
        work = takeoff.work()
        if work.ready is None:  # its kernels are to be compiled
            yield from by_hand(hands, wait_for, work)
        parts = takeoff.parts()
        totals = parts[0] if signature[STRUCTURE] is None else parts
        touchdown = Touchdown(brought, totals, self._outs, layout.replicas, layout.mine)
        if not touchdown.is_loaded():
            yield from by_hand(hands, touchdown.load)
        there = [part for part in parts if 0 not in part.shape]
        if signature[OP] is None:
            buffers = list(map(bytes_of, there))
            yield from self._use.take(lambda link, stream: link.broadcast(root, buffers, stream), hands)
        else:
            op = ReduceOp.SUM if signature[OP] is ReduceOp.MEAN else signature[OP]
            buffers = list(map(buffer_of, there))
            yield from self._use.take(lambda link, stream: link.all_reduce(op, buffers, stream), hands)
        yield from self._use.finish(touchdown.enqueue(), hands)
        return touchdown.results_by_position()
