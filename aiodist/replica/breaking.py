"""Breaking off: what a run's crossing tells and hears of steps that a worker cannot carry out (`workers.breakdown`)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from aiodist.replica.carrying import Carrier
from aiodist.workers.breakdown import OWN_LANE, Breakdown

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.rendezvous import Rendezvous
    from aiodist.collective.spanned import SpannedGroup
    from aiodist.replica.part_crossing import PartCrossing
    from aiodist.replica.team import Team
    from aiodist.workers.lane import Lane
    from aiodist.workers.state import WorkerState
    from aiodist.workers.tribunal import LaneKey, Verdict

_TURNS: Final = 8


class Breaking(Carrier):
    """A run's crossing, as far as such steps go.

    Attributes:
        breakdowns: the steps of its own, and its groups, that this worker cannot carry out.
        half_open: another worker could not open the run.
    """

    key: LaneKey

    def __init__(self, team: Team, lane: Lane, group: SpannedGroup) -> None:
        super().__init__(team, lane, group, team.span)
        self.breakdowns: list[Breakdown] = []
        self._parts: list[PartCrossing] = []
        self._verdict: Verdict | None = None
        self._first_verdict: Verdict | None = None
        self.half_open = False
        self._told: WorkerState | None = None
        self._withheld: list[tuple[Carrier, Rendezvous | None, BaseException]] = []

    @property
    def told(self) -> bool:
        """Whether the coordinator has been told."""
        return self._told is not None

    @abstractmethod
    def tell(self) -> None:
        """Tell the coordinator, once."""

    @abstractmethod
    def _settle(self) -> None:
        """End the group with what is to be raised."""

    def _settle_in_time(self, turns: int = _TURNS) -> None:
        """End the group; first there are some turns of the loop, in which a replica raises what has failed here."""
        engine = self.group.engine
        failed = self._withheld or any(group.failed is not None for group in self.group.groups())
        if turns and failed and engine is not None and not self.group.closed:
            engine.call_soon(partial(self._settle_in_time, turns - 1))
        else:
            self._settle()

    def break_down(self, carrier: Carrier, meeting: Rendezvous | None, error: BaseException, lane: int) -> None:
        """Tell the coordinator of a step, also where a verdict has been given meanwhile: others go on with it."""
        self.breakdowns.append(Breakdown.of(lane, carrier.group, meeting, error))
        self._withheld.append((carrier, meeting, error))
        if self._told is None:
            self.tell()
        else:
            self._told = replace(self._told, breakdowns=tuple(self.all_breakdowns()))
            self._team.report(self.key, self._told)

    def all_breakdowns(self) -> list[Breakdown]:
        """Return those, and the calls that have failed here before their records, and may not have failed elsewhere."""
        return [*self.breakdowns, *(_early(group) for group in self.group.groups() if group.failed is not None)]

    def _break_down(self, meeting: Rendezvous | None, error: BaseException) -> None:
        self.break_down(self, meeting, error, OWN_LANE)

    def amend(self, verdict: Verdict) -> None:
        """Hear a verdict once more: a worker could not go on with what all have begun."""
        assert self._verdict is not None
        self._verdict = replace(self._verdict, broken=self._verdict.broken | verdict.broken)
        self._break_off()

    def _break_off(self) -> None:
        """Wait no more for values of which a worker does not carry out its part; who has failed here raises that."""
        broken = self.broken_lanes
        if OWN_LANE in broken:
            self._values.interrupt()
        for part in self._parts:
            if part.grant is not None and part.grant.number in broken:
                part.interrupt_values()
        for carrier, meeting, error in self._withheld:
            carrier.finish_with(meeting, error)
        if self.group.failed is not None:
            self.group.finish_merge(self.group.failed, None, self.group.failed.error)

    @property
    def broken_lanes(self) -> frozenset[int]:
        """The lanes, of groups by number, that are never used again."""
        heard = frozenset() if self._verdict is None else self._verdict.broken
        return heard | {breakdown.lane for breakdown in self.breakdowns}

    @property
    def lane_is_lost(self) -> bool:
        """Whether others may have left its lane to another run before they could hear that it is broken."""
        if self.half_open:
            return True
        heard = self._first_verdict is None or OWN_LANE in self._first_verdict.broken
        return any(breakdown.number is None or not heard for breakdown in self.breakdowns if breakdown.lane == OWN_LANE)

    @property
    def is_broken(self) -> bool:
        """Whether its own lane is never used again."""
        return OWN_LANE in self.broken_lanes


def _early(group: SyncGroup) -> Breakdown:
    assert group.failed is not None
    assert group.failed.error is not None
    lane, serial = (OWN_LANE, None) if group.root is group else (group.bridge.grant.number, group.bridge.serial)
    found = Breakdown.of(lane, group, group.failed, group.failed.error)
    return replace(found, early=True, serial=serial)
