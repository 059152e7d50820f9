"""Equal calls from the same places in another order: values of different calls have met, which torch does not notice.

Places alone say nothing: one rank may publish what others receive elsewhere. But where places differ, and a few calls
later all ranks have been at the same ones with the same calls, each in an order of its own, calls have been swapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from aiodist._core.analysis import analyse
from aiodist._core.call import OrderCheck
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import GroupRecord, Snapshot

_MOST_SWAPPED = 8
"""Over how many calls of a group the order of places is compared."""


class PlaceOrder:
    """Looks for swapped calls in the collectives of one group."""

    def __init__(self) -> None:
        self._since: list[list[tuple[Hashable, Hashable]]] = []

    def swapped(self, asked: Hashable, places: Sequence[Hashable]) -> int:
        """Note the next collective of the group; return how many have been swapped, this one the last, or 0."""
        if len(set(places)) == 1 and (not self._since or self._since[0][0][0] != asked):
            self._since.clear()
            return 0
        if len(self._since) == _MOST_SWAPPED:
            del self._since[0]
        self._since.append([(asked, each) for each in places])
        return next((number for number in range(2, len(self._since) + 1) if self._reordered(number)), 0)

    def _reordered(self, number: int) -> bool:
        walks = list(zip(*self._since[-number:], strict=True))
        return len(set(walks)) > 1 and len({frozenset(Counter(walk).items()) for walk in walks}) == 1


def report_on_swap(snapshot: Snapshot, group: GroupRecord, first: int, last: int) -> CollectiveReport:
    """Return the report on calls of a group that have been swapped, from the first of them to the last."""
    slots = sorted((*group.history, *group.open), key=lambda slot: slot.number)
    swapped = replace(
        group,
        history=tuple(slot for slot in slots if slot.number < first and len(slot.posts) == 1),
        open=tuple(slot._replace(waiting=()) for slot in slots if first <= slot.number <= last),
    )
    root = replace(snapshot.groups[0], history=(), open=())
    shown = (swapped,) if group.key == root.key else (root, swapped)
    return analyse(replace(snapshot, order_check=OrderCheck.CALL_PATH, groups=shown, blocked=(), deadlocked=()))
