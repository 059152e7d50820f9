"""Steps in which replicas are absent, because they have joined: what the others bring, and the result of that.

A worker whose replicas have all joined does not know what the step is, and one with a replica left does not know who
else is there. So the workers tell each other: what each brings, by replica, goes to all of them, and each makes the
result as a single worker would that had all these replicas. It costs more than a step of everybody, and there are few
of them: the last ones of uneven data.

What was rejected: sending what the step is first, so that an absent worker could take part in the engine's reduction
with neutral values (for MIN there is none, and adding 0 to -0.0 changes it); folding by shares with holes in them (one
more round for each step, to learn who is there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiodist.collective.kinds import collective_of
from aiodist.collective.signature import KIND, Signature
from aiodist.workers.crossing import Span
from aiodist.workers.lane import Agreed, Lane
from aiodist.workers.layout import Layout
from aiodist.workers.local import LocalCommunicator
from aiodist.workers.objects import Gathering
from aiodist.workers.record import Opening
from aiodist.workers.transfers import AtOnce, Hands, Steps
from aiodist_kernels import Accumulate


@dataclass(frozen=True, slots=True)
class Presence:
    """What a worker brings to a step in which replicas are absent.

    Attributes:
        accumulate: the accumulator that it wants; worker 0's counts.
        values: by the ids of its replicas that are there, what each brings.
        joined: of a worker whose replicas have all joined, how many collectives the last of them has made, and its id.
        ended: its replicas have ended, so that none of them will join.
    """

    accumulate: Accumulate = "native"
    values: Mapping[int, Any] = field(default_factory=dict)
    joined: tuple[int, int] | None = None
    ended: bool = False


ENDED = Presence(ended=True)


def tell(lane: Lane, own: Presence, hands: Hands) -> Steps[list[Presence]]:
    """Return what all workers bring, by rank."""
    return Gathering(own).carry_out(lane.communicator, None, hands)


def result_of(signature: Signature, told: Sequence[Presence], span: Span) -> Any:
    """Return the result of what all workers have brought: what a single worker would make of it.

    Raises:
        ValueError: it takes a value of a replica that is absent.
    """
    values = {replica_id: value for presence in told for replica_id, value in presence.values.items()}
    there = sorted(values)
    if signature[KIND].computes is not None:
        collective_of(signature).check_present([i for i in range(span.layout.replicas) if i not in values])
    alone = Span(Layout(0, [[""] * len(there)], [there], span.layout.size), span.ordered)
    across = signature[KIND].across
    assert across is not None
    plan = across(signature, [values[i] for i in there], told[0].accumulate, alone)
    communicator = LocalCommunicator()
    steps = Lane(communicator, 0).carry_out(Agreed(plan, Opening(communicator)), AtOnce())
    return plan.finish(_at_once(steps))


def _at_once(steps: Steps[Any]) -> Any:
    """Return what steps give whose requests are complete when they are made."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value
