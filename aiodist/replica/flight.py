"""Flights: the way of leaves from GPU to GPU, through NCCL. The record of the step has agreed by then."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from aiodist.collective.brought import Brought
from aiodist.collective.device_flight import Takeoff, Touchdown, buffer_of
from aiodist.collective.portion import Portion
from aiodist.collective.signature import OP, STRUCTURE
from aiodist.replica.device_steps import wait_for
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
        replicas: how many there are over all workers.
    """

    def __init__(self, portion: Portion, group: SyncGroup, use: Use, replicas: int) -> None:
        positions, names = [member.position for member in group.members], [member.device for member in group.members]
        values = [portion.values[position] for position in positions]
        self._brought = Brought(portion.signature, values, portion.options, positions, names)
        self._outs = portion.outs
        self._use = use
        self._replicas = replicas

    def carry_out(self, accumulate: Accumulate, hands: Hands) -> Steps[dict[int, Any]]:
        """Reduce the leaves over the workers; return each local replica's, by position.

        Raises:
            RuntimeError: NCCL has failed.
        """
        signature, options = self._brought.signature, self._brought.options
        brought = self._brought._replace(options=dataclasses.replace(options, accumulate=accumulate))
        takeoff = Takeoff(brought, self._use.ordinal)
        work = takeoff.work()
        if work.ready is None:  # its kernels are to be compiled
            yield from by_hand(hands, wait_for, work)
        parts = takeoff.parts()
        totals = parts[0] if signature[STRUCTURE] is None else parts
        touchdown = Touchdown(brought, totals, self._outs, self._replicas)
        if not touchdown.is_loaded():
            yield from by_hand(hands, touchdown.load)
        op = ReduceOp.SUM if signature[OP] is ReduceOp.MEAN else signature[OP]
        yield from self._use.reduce(op, [buffer_of(part) for part in parts if 0 not in part.shape], hands)
        yield from self._use.finish(touchdown.enqueue(), hands)
        return touchdown.results_by_position()
