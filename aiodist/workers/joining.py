"""Joining: the first meeting of a strategy's workers: each tells of its replicas and where it can be reached.

What each tells begins with the version of aiodist, and has a size of its own, so the sizes are exchanged first. On an
engine whose workers share memory nothing is copied, and what all have told is one object for all.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import FrameType
from typing import Any, Final

import numpy as np

from aiodist._arrays import environment
from aiodist._core.errors import StallWarning
from aiodist._core.report import Location
from aiodist._version import __version__
from aiodist.collective.callsite import location
from aiodist.collective.wording import ids_briefly, place
from aiodist.workers.coding import decode, encode
from aiodist.workers.communicator import Array, Communicator, Request, Sharing, SharingCommunicator
from aiodist.workers.layout import Layout

FIRST_MEETING_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.0005
_OURS: Final = ("aiodist.workers", "aiodist.strategy")
_VERSION: Final = np.frombuffer(__version__.encode().ljust(32, b"\0"), np.uint8)


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker tells of itself.

    Attributes:
        devices: its replicas' devices.
        host: its machine's name.
        pid: its process.
        address: where its control plane listens, if it does.
        agent: where the agent beside it answers, "port:token"; None where there is none.
        place: where it makes the strategy, file and line.
    """

    devices: tuple[str, ...]
    host: str
    pid: int
    address: Any
    agent: str | None = None
    place: str = ""

    @classmethod
    def of_this_process(cls, devices: tuple[str, ...], address: Any, place: str = "") -> Hello:
        """Return this process's."""
        return cls(devices, platform.node(), os.getpid(), address, environment.agent(), place)


class Roster:
    """What all workers have told.

    Args:
        hellos: by rank. Of equal parts one is kept.

    Attributes:
        hellos: by rank.
    """

    def __init__(self, hellos: Iterable[Hello]) -> None:
        known: dict[Any, Any] = {}
        self.hellos = [
            replace(h, devices=known.setdefault(h.devices, h.devices), host=known.setdefault(h.host, h.host))
            for h in hellos
        ]

    @cached_property
    def layout(self) -> Layout:
        """The layout as the first worker sees it."""
        return Layout(0, [hello.devices for hello in self.hellos])


class Joining:
    """A first meeting, begun by its construction.

    Args:
        communicator: the strategy's own.
        hello: what this worker tells.
    """

    def __init__(self, communicator: Communicator, hello: Hello) -> None:
        self._communicator = communicator
        self._roster: Roster | None = None
        self._shared: Sharing[Roster] | None = None
        if isinstance(communicator, SharingCommunicator):
            self._shared = communicator.ishare(hello, Roster)
        else:
            self._told = np.concatenate([_VERSION, encode(hello)])
            self._sizes = np.empty(communicator.size, np.int64)
            own = np.array([len(self._told)], np.int64)
            self._begun = communicator.iallgather(own.view(np.uint8), self._sizes.view(np.uint8))

    @property
    def hellos(self) -> Sequence[Hello]:
        """What all workers tell, by rank; the first use waits for them."""
        return self._all().hellos

    @property
    def layout(self) -> Layout:
        """The workers' layout; the first use waits for them."""
        return self._all().layout.seen_from(self._communicator.rank)

    def _all(self) -> Roster:
        if self._roster is None:
            self._roster = self._gathered() if self._shared is None else self._handed_round(self._shared)
        return self._roster

    def _handed_round(self, shared: Sharing[Roster]) -> Roster:
        self._communicator.wait(shared)
        return shared.result()

    def _gathered(self) -> Roster:
        self._communicator.wait(self._begun)
        whole = np.empty(int(self._sizes.sum()), np.uint8)
        self._communicator.wait(self._communicator.iallgatherv(self._told, whole, self._sizes.tolist()))
        bounds = np.cumsum([0, *self._sizes.tolist()])
        told = [whole[a:b].copy() for a, b in pairwise(bounds)]
        _check_versions([one[: len(_VERSION)] for one in told])
        return Roster(decode(one[len(_VERSION) :]) for one in told)


def _check_versions(told: Sequence[Array]) -> None:
    """Refuse workers with another aiodist: what they tell each other would not fit.

    Raises:
        RuntimeError: there are some.
    """
    if all(np.array_equal(one, _VERSION) for one in told):
        return
    versions = [one.tobytes().rstrip(b"\0").decode(errors="replace") for one in told]
    camps: dict[str, list[int]] = {}
    for rank, version in enumerate(versions):
        camps.setdefault(version, []).append(rank)
    who = "; ".join(f"{version} on {ids_briefly(camps[version]).replace('replica', 'worker')}" for version in camps)
    raise RuntimeError(f"the workers have different versions of aiodist: {who}. Install the same one for all")


def wait(request: Request, rank: int, size: int) -> None:
    """Block until a request of the first meeting, to which all workers must come, is complete; warn once meanwhile.

    Raises:
        TimeoutError: another worker has not begun it for five minutes.
    """
    begun = time.monotonic()
    warn_at = begun + (environment.stall_seconds() or FIRST_MEETING_SECONDS)
    while not request.test():
        now = time.monotonic()
        if now > begun + FIRST_MEETING_SECONDS:
            raise TimeoutError(
                f"worker {rank} of {size} has waited {FIRST_MEETING_SECONDS:.0f} s for the others to make their "
                f"MultiWorkerMirroredStrategy{_at()}; every worker must run the same program"
            )
        here = place_of_constructor() if now >= warn_at else None
        if here is not None:
            warn_at = begun + 2 * FIRST_MEETING_SECONDS
            warn(
                f"worker {rank} of {size} has waited {now - begun:.3g} s to make a strategy at {place(here)}, which "
                "every worker is to make (AIODIST_STALL_SECONDS sets the time, 0 turns this off)",
                here,
            )
        time.sleep(_POLL_SECONDS)


def _at() -> str:
    return f" at {place_of_making()}" if place_of_making() else ""


def warn(text: str, at: Location) -> None:
    """Warn that a worker waits for others, at a place of its program."""
    try:
        warnings.warn_explicit(text, StallWarning, at.file, at.line)
    except StallWarning:  # a filter makes errors of warnings; who waits is not to be ended by that
        logging.getLogger("aiodist").error(text)  # noqa: TRY400  (which has no place of its own to show)


def place_of_making() -> str:
    """Return where a strategy is being made, file and line, as text."""
    here = place_of_constructor()
    return "" if here is None else place(here)


def place_of_constructor() -> Location | None:
    """Return where a strategy is being made; None where no frame of a program's is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return None if frame is None else location(frame.f_code, frame.f_lasti)


def made_differently(places: Sequence[str]) -> str:
    """Say so, where the workers have made a strategy at different places; which may be meant."""
    alike: dict[str, list[int]] = {}
    for rank, where in enumerate(places):
        alike.setdefault(where, []).append(rank)
    if len(alike) < 2:
        return ""
    who = [f"by {ids_briefly(ranks).replace('replica', 'worker')} at {where}" for where, ranks in alike.items()]
    return (
        f"The strategy was made {', '.join(who[:-1])} and {who[-1]}: "
        "strategies pair up in the order in which each worker makes them."
    )
