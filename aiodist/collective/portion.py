"""Portions: some of the leaves of a meeting, as if the replicas had asked for these alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiodist.collective.out_buffers import OutBuffers
from aiodist.collective.signature import DETAIL, DTYPES, SHAPES, STRUCTURE, TYPES, Signature
from aiodist.vocabulary.options import CommunicationOptions

if TYPE_CHECKING:
    from aiodist.collective.rendezvous import Rendezvous


class Portion(NamedTuple):
    """Some of the leaves of a meeting.

    Attributes:
        signature, values, options, absent, outs: as the meeting has them, of these leaves.
    """

    signature: Signature
    values: Sequence[Any]
    options: CommunicationOptions
    absent: tuple[int, ...] | None
    outs: Mapping[int, OutBuffers] | None


def portion_of(meeting: Rendezvous, places: Sequence[int]) -> Portion:
    """Return the leaves at these places."""
    signature, values, outs = meeting.signature, meeting.values, meeting.outs
    if signature[STRUCTURE] is not None:
        fields = list(signature)
        by_leaf = [SHAPES, DTYPES, TYPES]
        if isinstance(signature[DETAIL], tuple):  # an axis for each
            by_leaf.append(DETAIL)
        for field in by_leaf:
            fields[field] = _taken(signature[field], places)
        signature = tuple(fields)
        values = [list(_taken(row, places)) for row in values]
        if outs is not None:
            outs = {
                position: OutBuffers(list(_taken(buffers.leaves, places)), buffers.nest)
                for position, buffers in outs.items()
            }
    return Portion(signature, values, meeting.options, meeting.absent, outs)


def _taken(items: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    return tuple([items[place] for place in places])
