"""The workers: how each introduces itself, and which replicas live on which."""

from __future__ import annotations

import os
import platform
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from aiodist._version import __version__


class Layout:
    """Replicas by worker: worker 0's first, then worker 1's, and so on. Workers may have different numbers of them.

    Attributes:
        rank: this worker.
        workers, replicas: how many there are in all.
        hosts, devices, counts, ids: by worker, its host's name, its replicas' devices, their number and their ids.
        names: by replica id, its device as reports name it.
    """

    def __init__(self, rank: int, devices: Sequence[Sequence[str]], hosts: Sequence[str] = ()) -> None:
        self.rank = rank
        self.hosts = tuple(hosts)
        self.devices = tuple(map(tuple, devices))
        self.workers = len(self.devices)
        self.counts = tuple(map(len, self.devices))
        self._offsets = (0, *accumulate(self.counts))
        self.replicas = self._offsets[-1]
        self.ids = tuple(tuple(range(begin, end)) for begin, end in pairwise(self._offsets))
        self.names = tuple(
            device if self.workers == 1 else f"worker {worker} {device}"
            for worker, devices in enumerate(self.devices)
            for device in devices
        )

    def seen_from(self, rank: int) -> Layout:
        """Return this layout as another worker sees it; the two share everything large."""
        other = copy(self)
        other.rank = rank
        return other

    @property
    def own(self) -> range:
        """The ids of this worker's replicas."""
        return range(self._offsets[self.rank], self._offsets[self.rank + 1])

    @property
    def local(self) -> int:
        """The number of this worker's replicas."""
        return self.counts[self.rank]

    def worker_of(self, replica_id: int) -> int:
        """Return the worker that a replica lives on."""
        return bisect_right(self._offsets, replica_id) - 1

    def workers_of(self, replica_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the workers that any of the replicas live on, in ascending order."""
        return tuple(sorted(set(map(self.worker_of, replica_ids))))


class Hello(NamedTuple):
    """How a worker introduces itself."""

    version: str  # of aiodist
    devices: tuple[str, ...]  # of its replicas
    host: str  # its machine's name
    machine: str  # identifies its machine and container: workers with the same one can use loopback
    pid: int
    order_check: str = "call_site"  # of its strategy, like `reduction`
    reduction: str = "fast"

    @classmethod
    def of_this_process(cls, devices: Sequence[str], order_check: str, reduction: str) -> Hello:
        """Return the introduction of this process."""
        this = platform.node(), this_machine(), os.getpid()
        return cls(__version__, tuple(devices), *this, order_check, reduction)


@cache
def this_machine() -> str:
    """Return an identifier of this machine as this process sees it; each container has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])  # noqa: PTH115
    except OSError:  # not Linux
        return f"{platform.node()} {uuid.getnode()}"


def layout_of(hellos: Sequence[Hello]) -> Layout:
    """Return the layout of these workers, as worker 0 sees it.

    Raises:
        RuntimeError: they have different versions of aiodist, whose messages may differ, or different strategies.
    """
    for what, values, advice in (
        ("versions of aiodist", [hello.version for hello in hellos], "install the same for all"),
        ("values of order_check", [hello.order_check for hello in hellos], "pass the same to all strategies"),
        ("values of reduction", [hello.reduction for hello in hellos], "pass the same to all strategies"),
    ):
        if len(set(values)) > 1:
            raise RuntimeError(f"the workers have different {what}: {', '.join(values)}, by rank; {advice}")
    return Layout(0, [hello.devices for hello in hellos], [hello.host for hello in hellos])
