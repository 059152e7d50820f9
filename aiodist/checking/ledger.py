"""The ledger of a run: which collectives there were, from where, how much they carried, and who was waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist._core.report import Location
from aiodist.checking.listener import Listener
from aiodist.checking.loop import ControlledLoop
from aiodist.checking.target import TargetError
from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.collective.signature import KIND, Signature, leaf_fields

if TYPE_CHECKING:
    from aiodist._core.errors import CollectiveError
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.rendezvous import Rendezvous


@dataclass(slots=True, eq=False)
class Site:
    """What the collectives of one kind at one place of the program came to.

    Attributes:
        call: the first of them, as text.
        kind: its kind.
        location: where it was called.
        times: how many there were.
        bytes: what all replicas brought to them, as far as sizes are known.
        waited: how long they took from the first arrival to the last, in seconds of the loop's clock.
        longest: the longest of that.
        last: by replica id, how often it was the last to come while others had waited.
    """

    call: str
    kind: str
    location: Location
    times: int = 0
    bytes: int = 0
    waited: float = 0.0
    longest: float = 0.0
    last: Counter[int] = field(default_factory=Counter)


class Ledger(Listener):
    """An observer that writes down the collectives of a program's runs.

    Attributes:
        runs: how many runs of strategies there were.
        replicas: the most replicas that one had.
        verdicts: what was raised in replicas that did not meet, also where the program caught it.
        refusal: why a run was not let begin; None when all were.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.replicas = 0
        self.verdicts: list[CollectiveError] = []
        self.refusal: TargetError | None = None
        self._sites: dict[tuple[str, CodeType, int], Site] = {}

    @property
    def sites(self) -> list[Site]:
        """Every kind and place, in the order in which they first came."""
        return list(self._sites.values())

    @property
    def collectives(self) -> int:
        """How many collectives were completed."""
        return sum(site.times for site in self._sites.values())

    def run_begun(self, group: SyncGroup, fn: Callable[..., Any]) -> None:
        """Note a run.

        Raises:
            TargetError: it is on a loop that is not controlled.
        """
        if not _is_controlled():
            self.refusal = TargetError(
                f"{getattr(fn, '__qualname__', fn)} runs on an event loop that the target chose itself (trio, uvloop); "
                "only asyncio's own can be controlled: leave the choice to asyncio.run or anyio.run"
            )
            raise self.refusal
        self.runs += 1
        self.replicas = max(self.replicas, group.size)

    def completed(self, group: SyncGroup, meeting: Rendezvous) -> None:
        """Note a collective."""
        if meeting.error is not None or meeting.number < 0:
            return
        signature = meeting.signature
        key = signature[KIND].name, meeting.code, meeting.offset
        site = self._sites.get(key)
        if site is None:
            place = location(meeting.code, meeting.offset)
            site = self._sites[key] = Site(call_text(signature), signature[KIND].name, place)
        site.times += 1
        site.bytes += _bytes(signature, meeting.result, group.size)
        waited = group.now() / 1e9 - meeting.started
        if waited > 0:
            site.waited += waited
            site.longest = max(site.longest, waited)
            if meeting.last >= 0:
                site.last[group.members[meeting.last].replica_id] += 1

    def judged(self, group: SyncGroup, verdict: CollectiveError) -> None:  # noqa: ARG002
        """Note that replicas did not meet."""
        self.verdicts.append(verdict)


def _is_controlled() -> bool:
    try:
        return isinstance(asyncio.get_running_loop(), ControlledLoop)
    except RuntimeError:  # trio
        return False


def _bytes(signature: Signature, result: Any, size: int) -> int:
    """Return what all replicas brought; where their sizes differ, as in all_gather, what came out."""
    fields = leaf_fields(signature)
    if any(None in shape for shape, *_ in fields):
        leaves = result if isinstance(result, list) else [result]
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))
    return size * sum(prod(shape) * _itemsize(dtype) for shape, dtype, _ in fields)


def _itemsize(dtype: Any) -> int:
    return int(getattr(dtype, "itemsize", 8))
