"""The straight way: arrays of one dtype that the only local replica brings, to a call that has come before.

It is most of what training loops do, and what they wait for. After a MiB has passed through the caches, whatever is
called takes three times as long as before: so little is called here. All else goes by `Carrier._carry`, which does the
same. Where values move together with their records, they are begun here as there, and looked at as late.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from aiodist.replica.awaiting import InterruptedStep
from aiodist.workers.alone import AloneReduction
from aiodist.workers.record import ALL_FREE, Flag
from aiodist.workers.transfers import Steps

if TYPE_CHECKING:
    from aiodist.collective.rendezvous import Rendezvous
    from aiodist.replica.carrying import Carrier
    from aiodist.replica.courses import Course


def go_straight(carrier: Carrier, meeting: Rendezvous, course: Course) -> Steps[int]:
    """Carry a meeting over whose course is straight; return the lanes that all workers have free.

    Raises:
        Disagreement: the workers do not mean the same.
        InterruptedStep: there is trouble, or the run is over.
        Exception: what went wrong with the values.
    """
    carrier.moving = False
    if meeting.complete:
        raise InterruptedStep
    lane, straight = carrier.lane, course.straight
    assert straight is not None
    reduction = AloneReduction(straight.known, meeting.values if straight.single else meeting.values[0])
    opening, begun = lane.opening, None
    fast = lane.alongside.flag_of_large() if carrier.alongside else Flag.NONE
    record = lane.open_plainly(course.number, course.flags | fast)
    if fast == Flag.BEGUN:
        begun = lane.alongside.begin(reduction, carrier.hands)
    else:
        with suppress(Exception):  # tried again when it is carried out: the record is on its way
            reduction.get_ready(lane.communicator)
    yield record
    wants = fast == Flag.WANTED
    if wants or not opening.alike():
        agreed = lane.agreed(opening, course.recipe(meeting.values), course.flags, wants=wants)
        return (yield from carrier.carry_on(meeting, course, None, agreed, ALL_FREE))
    carrier.moving = True
    send, total = reduction.send, reduction.total
    if begun is not None:
        results = yield from begun.go_on()
    elif send is not None and total is not None and straight.known.whole:
        yield lane.communicator.iallreduce(straight.known.fold, send, total)
        results = reduction.end()
    else:
        results = yield from reduction.carry_out(lane.communicator, None, carrier.hands)
    lane.in_exchange = False
    if not meeting.complete:
        carrier.group.finish_alone(meeting, results[0] if straight.single else results)
    return ALL_FREE
