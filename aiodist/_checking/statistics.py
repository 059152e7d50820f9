"""Statistics: which collectives a program made and where, how many bytes they carried, and who was waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist._checking.loop import ControlledLoop
from aiodist._checking.target import TargetError
from aiodist._core.call import Call, place
from aiodist._core.instrument import ObservedRun, Observer
from aiodist._core.report import Location

if TYPE_CHECKING:
    from aiodist._core.errors import CollectiveError


@dataclass(slots=True, eq=False)
class Site:
    """The collectives of one kind at one place of the program; its fields are what the JSON has.

    What all replicas contributed counts as far as sizes are known. Waiting is from the first post to the last, in
    seconds of the loop's clock; by replica id, it counts who was the last to come while others had waited.
    """

    kind: str
    call: str
    location: Location
    times: int = 0
    bytes: int = 0
    waited_seconds: float = 0.0
    longest_wait_seconds: float = 0.0
    last_to_come: Counter[int] = field(default_factory=Counter)


class Statistics(Observer):
    """An observer that counts a program's runs and, unless it is of runs alone, their collectives.

    Attributes:
        runs: how many runs of strategies there were.
        replicas: the most replicas that one of them had.
        errors: what was raised in replicas that disagreed, also where the program caught it.
        refusal: why a run was not allowed to begin; None when all were.
    """

    def __init__(self, *, of_runs_alone: bool = False) -> None:
        self.of_runs_alone = of_runs_alone
        self.runs = 0
        self.replicas = 0
        self.errors: list[CollectiveError] = []
        self.refusal: TargetError | None = None
        self._clock: Callable[[], float] = float
        self._sites: dict[tuple[str, CodeType, int], Site] = {}

    def run_begun(self, run: ObservedRun, fn: Callable[..., Any]) -> None:
        """Count a run, unless its loop is not controlled: that is a `TargetError`."""
        if not _is_controlled():
            self.refusal = TargetError(
                f"{getattr(fn, '__qualname__', fn)} runs on an event loop that the target chose itself (trio, uvloop); "
                "only asyncio's own can be controlled: leave the choice to asyncio.run or anyio.run"
            )
            raise self.refusal
        self.runs += 1
        self.replicas = max(self.replicas, len(run.ledger.replicas))
        self._clock = run.clock

    def reported(self, run: ObservedRun, error: CollectiveError) -> None:  # noqa: ARG002
        """Note that replicas disagreed."""
        self.errors.append(error)

    @property
    def sites(self) -> list[Site]:
        """Every kind and place, in the order of their first collectives."""
        return list(self._sites.values())

    @property
    def collectives(self) -> int:
        """How many collectives were completed."""
        return sum(site.times for site in self._sites.values())

    def completed(self, slot: Any) -> None:
        """Count a collective."""
        if self.of_runs_alone or slot.error is not None or slot.number < 0:
            return
        call, members = slot.call, slot.group.members
        key = call.kind, slot.code, slot.offset
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(call.kind, str(call), place(slot.code, slot.offset).location)
        site.times += 1
        site.bytes += _bytes(call, slot.result, len(members))
        waited = self._clock() - slot.started
        if waited > 0:
            site.waited_seconds = round(site.waited_seconds + waited, 9)
            site.longest_wait_seconds = max(site.longest_wait_seconds, round(waited, 9))
            if slot.last >= 0:
                site.last_to_come[members[slot.last].replica_id] += 1


def _is_controlled() -> bool:
    try:
        return isinstance(asyncio.get_running_loop(), ControlledLoop)
    except RuntimeError:  # trio
        return False


def _bytes(call: Call, result: Any, size: int) -> int:
    """Return how many bytes all replicas contributed; where their sizes differ, as in all_gather, the result's."""
    contributed = 0
    for shape, dtype, array in call.leaves:
        sizes = [dim for dim in shape if dim is not None]
        if len(sizes) < len(shape):
            leaves = result if isinstance(result, list) else [result]
            return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))
        contributed += prod(sizes) * (8 if array == "number" else np.dtype(dtype).itemsize)
    return size * contributed
