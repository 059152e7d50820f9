"""Who a replica is: its place in a sync group, its devices, and for how long its context may be used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from aiodist.replica import arguments, refusal
from aiodist.replica.current import Block

if TYPE_CHECKING:
    from aiodist.collective.member import Member
    from aiodist.replica.worker import DeviceWorker


class Identity(Block):
    """What a `ReplicaContext` says of its replica; see there."""

    __slots__ = ("__weakref__", "_branches", "_member", "_run", "_strategy", "_thread", "_worker")

    def __init__(self, strategy: Any, replica_id_in_sync_group: int) -> None:
        if not hasattr(strategy, "_standing_group"):
            raise TypeError(f"ReplicaContext expects a strategy, got {strategy!r}")
        members = strategy._standing_group().members
        index = arguments.replica_id(replica_id_in_sync_group, "replica_id_in_sync_group")
        if not 0 <= index < len(members):
            raise ValueError(f"replica_id_in_sync_group must be from 0 to {len(members) - 1}, got {index}")
        self._bind(strategy, members[index], None)

    @classmethod
    def _of(cls, strategy: Any, member: Member, worker: DeviceWorker | None) -> Self:
        """Return the context of a replica that runs."""
        context = cls.__new__(cls)
        context._bind(strategy, member, worker)
        return context

    def _bind(self, strategy: Any, member: Member, worker: DeviceWorker | None) -> None:
        Block.__init__(self)
        self._strategy = strategy
        self._member = member
        self._worker = worker
        self._thread = member.group.thread
        self._run: Self | None = None
        self._branches: WeakSet[Self] | None = None

    @property
    def _of_run(self) -> Self:
        """The same replica's context in the run's own group."""
        return self._run or self

    def _retire(self) -> None:
        """Refuse collectives from now on: the replica's function is over."""
        self._thread = refusal.RETIRED
        for branch in self._branches or ():
            branch._thread = refusal.RETIRED

    def __repr__(self) -> str:
        group, me = self._member.group, f"replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}"
        where = f"{me} in {group.label}" if group.label is not None else me
        return f"<ReplicaContext: {where} on {self._member.device}>"

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's id, from 0; in a group that `new_group` made, its position there."""
        return self._member.group.places[self._member.position]

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas the sync group has."""
        return self._member.group.world_size

    @property
    def strategy(self) -> Any:
        """The strategy that the replica belongs to."""
        return self._strategy

    @property
    def devices(self) -> tuple[str, ...]:
        """The replica's devices, in canonical form."""
        return (self._member.device,)
