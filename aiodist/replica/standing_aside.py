"""Standing aside: steps in which replicas, here or elsewhere, have joined (`workers.absence`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodist.collective import joining
from aiodist.replica.cargo import Cargo, nbytes_of
from aiodist.workers.absence import Presence, result_of, tell
from aiodist.workers.lane import Disagreement
from aiodist.workers.transfers import Steps, by_hand
from aiodist_kernels import policy

if TYPE_CHECKING:
    from aiodist.collective.rendezvous import Rendezvous
    from aiodist.replica.carrying import Carrier


def carry_out_without(carrier: Carrier, cargo: Cargo) -> Steps[Any]:
    """Make a result without the replicas, here or elsewhere, that have joined."""
    signature, places, hands = cargo.signature, carrier.group.places, carrier.hands
    values = yield from cargo.one_by_one(hands)
    own = {places[position]: value for position, value in values.items()}
    told = yield from tell_presence(carrier, Presence(cargo.accumulate, own))
    if policy.blocks(sum(nbytes_of(value) for presence in told for value in presence.values.values())):
        return (yield from by_hand(hands, result_of, signature, told, carrier.span))
    return result_of(signature, told, carrier.span)


def stand_by(carrier: Carrier, meeting: Rendezvous) -> Steps[None]:
    """Take part in the others' steps with nothing, until all replicas everywhere have joined."""
    group, lane = carrier.group, carrier.lane
    last = group.places[meeting.values[0]]
    own = Presence(group.options.accumulate, joined=(joining.number_of_join(group), last))
    while True:
        carrier.moving = False
        if not (yield from lane.stand_by()):
            lane.in_exchange = False
            continue
        latest = [presence.joined for presence in (yield from tell_presence(carrier, own))]
        if None not in latest:
            break
    number, replica_id = max(filter(None, latest))
    if not meeting.complete:
        joining.complete(group, meeting, number)
        meeting.take(replica_id)
        group.finish_merge(meeting, replica_id, None)


def tell_presence(carrier: Carrier, own: Presence) -> Steps[list[Presence]]:
    """Return what all workers bring.

    Raises:
        Disagreement: the replicas of one have ended, where others have joined.
    """
    carrier.moving = True
    told = yield from tell(carrier.lane, own, carrier.hands)
    carrier.lane.in_exchange = False
    if any(presence.ended for presence in told):
        raise Disagreement
    return told
