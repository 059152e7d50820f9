"""The crossing of a group of some replicas of a run, over a lane of its own between the workers that have members.

It begins when the first local member makes the group: the creation is the first meeting that it carries over, once all
local members have made it and the lane book has granted a lane. It ends with a record, too: a worker brings it when
its members have ended, or have let go of the group's contexts, so that none of them can call anything more. Who then
still waits for them hears of it by that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import CancelScope

from aiodist._core.errors import CollectiveError
from aiodist.collective.group import SyncGroup
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.spanned import SpannedPart
from aiodist.collective.subgroup import SubGroup
from aiodist.replica.awaiting import InterruptedStep
from aiodist.replica.carrying import Carrier
from aiodist.workers.calls import digest
from aiodist.workers.lane_book import Grant, GroupKey
from aiodist.workers.layout import Layout
from aiodist.workers.parts import GroupPart, tell_part
from aiodist.workers.transfers import Steps

if TYPE_CHECKING:
    from aiodist.replica.crossing import Crossing

_CLOSED = digest("no local member calls anything more")


class PartCrossing(Carrier):
    """The crossing of one group.

    Args:
        run: the run's own.
        group: the local members.
        parent: the group that it is made in.
        positions: the members' ids there.
    """

    group: SpannedPart

    def __init__(self, run: Crossing, group: SpannedPart, parent: SyncGroup, positions: tuple[int, ...]) -> None:
        whole = run.span
        self.workers = tuple(sorted({whole.layout.worker_of(replica_id)[0] for replica_id in group.everyone}))
        layout = layout_of(group.everyone, self.workers, whole.layout)
        super().__init__(run.team, None, group, whole._replace(layout=layout))
        self._run = run
        self._parent, self._positions = parent, positions
        self.judged = run.judged
        self.grant: Grant | None = None
        self._contexts = group.size
        self._asked = self._closing = False
        group.connect(self)

    @property
    def serial(self) -> int | None:
        """The number that the lane book has given the group, if it has."""
        return None if self.grant is None else self.grant.serial

    @property
    def key(self) -> GroupKey | None:
        """What it is asked for by; None where the group that it is made in has no number yet."""
        parent = self._parent.bridge
        if not isinstance(parent, PartCrossing):
            return 0, self._positions, self.group.name
        return None if parent.serial is None else (parent.serial, self._positions, self.group.name)

    # What the group, and its contexts, call.

    def cross(self, meeting: Rendezvous) -> None:
        """Take a meeting at which all local members mean the same: the creation first."""
        super().cross(meeting)
        self._ask()

    def _ask(self) -> None:
        """Ask for a lane, as soon as that can be done: groups of one key are asked for in the order of their making."""
        key = self.key
        if not self._asked and self._queue and key is not None and not self._bell.interrupts:
            self._asked = True
            self._run.team.group_lanes.ask(self._run.key, self, key, self.workers)

    def complain(self, group: SyncGroup, overdue: Rendezvous | None) -> None:
        """Have all workers judged."""
        self._run.complain(group, overdue)

    def judge_alone(self) -> CollectiveError:
        """Return the verdict on what is known here."""
        return self._run.judge_alone()

    def close(self) -> None:
        """Hear that no local replica will call anything more in the group."""
        if not self._closing:
            self._closing = True
            self._queue.append(None)
            self._bell.ring()

    @property
    def let_go_by_all(self) -> bool:
        """Whether none of the local members has a context any more."""
        return not self._contexts

    def let_go(self) -> None:
        """Hear that one of the local members' contexts is gone."""
        self._contexts -= 1
        if not self._contexts:
            self.close()

    # What the run's crossing and the lane book call.

    def granted(self, grant: Grant) -> None:
        """Take a lane."""
        self.grant = grant
        self._run.ring_parts()

    def interrupt(self, *, lost: bool = False) -> None:
        """Carry nothing over any more."""
        self._bell.interrupt()
        if lost:
            self.interrupt_values()

    def interrupt_values(self) -> None:
        """Wait for values no more: nobody brings them."""
        self._values.interrupt()

    def ring(self) -> None:
        """Look again what there is: a group has a lane, in which this one may have been made."""
        self._ask()
        self._bell.ring()

    # The way of the group.

    async def drive(self) -> None:
        """Carry meetings over until no local member calls anything more, or everything is over."""
        with CancelScope(shield=True):
            try:
                await self._find_lane()
                await self._carry_all()
            except InterruptedStep:
                pass
            except Exception as error:  # noqa: BLE001  (of the engine, while nobody waits for a value)
                self._team.give_up(error)
            finally:
                self.hands.close()
                self._bell.close()
                self._values.close()
                self._run.parted(self)

    async def _find_lane(self) -> None:
        while self.grant is None:
            await self._pause()
        self._lane = await self._run.team.group_lanes.lane(self.grant.number, self._bell)
        if self._bell.interrupts:
            raise InterruptedStep
        self._lane.begin(self.grant.serial)

    async def _pause(self) -> None:
        if self._bell.interrupts:
            raise InterruptedStep
        await self._bell.wait()

    def _disagree(self, number: int | None) -> None:
        if number is None:
            self._run.tell()
        else:
            self.group.consider_all(number)

    def _end_well(self) -> Steps[int]:
        yield from self._meet(_CLOSED)
        assert self.grant is not None
        self._run.team.group_lanes.free(self.grant.number)
        return 0


def part_of(group: SyncGroup, overdue: tuple[int, float] | None) -> GroupPart:
    """Return what this worker has to tell of a run's group."""
    assert isinstance(group, SubGroup)
    bridge = group.bridge
    known = (bridge.serial, bridge.key) if isinstance(bridge, PartCrossing) else (None, None)
    return tell_part(group, *known, overdue, let_go=isinstance(bridge, PartCrossing) and bridge.let_go_by_all)


def layout_of(everyone: tuple[int, ...], workers: tuple[int, ...], whole: Layout) -> Layout:
    """Return the layout of a group: of the workers that have members, with the ids that those have in it."""
    places: dict[int, list[int]] = {worker: [] for worker in workers}
    devices: dict[int, list[str]] = {worker: [] for worker in workers}
    for place, replica_id in enumerate(everyone):
        worker, local = whole.worker_of(replica_id)
        places[worker].append(place)
        devices[worker].append(whole.devices[worker][local])
    return Layout(workers.index(whole.rank), list(devices.values()), list(places.values()))
