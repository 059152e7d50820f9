"""MPI's shared memory, and its removal.

An MPI removes its shared memory when it is finalised, which a killed worker never does; in a container, where there is
little of it, some failed jobs use up all. What workers have mapped is seen while they run; one that ends without
finalising MPI notes it itself.
"""

from __future__ import annotations

import os
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

    def look(self, maps: Iterable[Path]) -> None:
        """Note what processes have mapped, as Linux shows it in these files."""
        now = time.monotonic()
        self._next_look = now + _PATIENCE * (now - self._begun)
        for file in maps:
            with suppress(OSError):
                mapped = (line.split(maxsplit=5)[-1] for line in file.read_text(errors="replace").splitlines())
                self._paths.update(path for path in mapped if path.startswith(_OF_MPI))

    def remove(self) -> None:
        """Remove what has been noted: all that have used it have ended."""
        for path in self._paths:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
