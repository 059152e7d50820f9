"""MPI's shared memory, and its removal.

An MPI removes its shared memory when it is finalised, which a killed worker never does; in a container, where there is
little of it, some failed jobs use up all. What workers have mapped is seen while they run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

_OF_MPI: Final = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")  # noqa: S108  (MPICH's, and Open MPI's)
_FIRST_LOOK_SECONDS: Final = 0.2
_PATIENCE: Final = 0.5


class SharedMemory:
    """The shared memory of a job's workers."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._next_look = self._begun + _FIRST_LOOK_SECONDS
        self._paths: set[str] = set()

    @property
    def look_is_due(self) -> bool:
        """Whether it is time to look again: often at first, when workers map it, and then ever more seldom."""
        return time.monotonic() >= self._next_look

    def look(self, workers: Iterable[int]) -> None:
        """Note what these processes have mapped."""
        now = time.monotonic()
        self._next_look = now + _PATIENCE * (now - self._begun)
        for worker in workers:
            self._paths |= _mapped(worker)

    def remove(self) -> None:
        """Remove what has been noted: all that have used it have ended."""
        for path in self._paths:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108


def _mapped(worker: int) -> set[str]:
    """Return the paths of MPI's shared memory in a process, as Linux shows them."""
    if sys.platform != "linux":
        return set()
    try:
        lines = Path(f"/proc/{worker}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}  # noqa: S108
    return {path for path in paths if path.startswith(_OF_MPI)}
