"""The groups of a run beside its own, as the run's own group knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup


class Branches:
    """The groups of a run beside its own.

    Attributes:
        groups: those that somebody has at hand.
        kept: those that must last to the end of the run.
        watch: looks for replicas that wait for each other in them.

    Args:
        root: the run's own group.
    """

    def __init__(self, root: SyncGroup) -> None:
        from aiodist.collective.cycles import CycleWatch  # few programs have groups

        self.groups: WeakSet[SyncGroup] = WeakSet()
        self.kept: set[SyncGroup] = set()
        self.watch = CycleWatch(root)

    @classmethod
    def of(cls, root: SyncGroup) -> Branches:
        """Return the run's, which there are from now on."""
        if root.branches is None:
            root.branches = cls(root)
            root._handle = root.engine.watched(root._handle)
        return root.branches

    def in_order(self) -> list[SyncGroup]:
        """Return the groups in the order in which they were made."""
        return sorted(self.groups, key=lambda group: group.serial)
