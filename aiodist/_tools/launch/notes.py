"""The notes of a job: files in a folder, by which agents and workers tell the launcher how far they have come.

All are named by the worker's process. Its agent leaves ``started.PID`` (agent and rank), ``ended.PID`` (the exit code),
and ``echo.PID`` where the end was asked for. A worker, as `aiodist._workers.ending` has it, leaves ``rendezvous.PID``
while it waits for the others to make a strategy, ``met.PID`` (how often they have met), ``leaving.PID`` when it is
ready to end, which MPI keeps it from until all are, ``echo.PID`` where it ends because another has, and
``memory.PID`` (what it has mapped of files, as Linux shows it) where it ends without finalising MPI.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from aiodist._tools.usage import UsageError

_OF_MPI: Final = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")  # noqa: S108  (MPICH's, and Open MPI's)
_FIRST_LOOK_SECONDS: Final = 0.2
_PATIENCE: Final = 0.5


class Notes:
    """A job's folder of notes, as the launcher reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def running(self) -> list[tuple[int, int]]:
        """Return the workers that have started and not ended: each one's process, and its agent's."""
        ended = self._read("ended")
        return [(pid, int(text.split()[0])) for pid, text in self._read("started").items() if pid not in ended]

    def first_failure(self) -> int:
        """Return the exit code of the first worker that has failed by itself, else of the first that has; else 0."""
        codes = {pid: code for pid, text in self._read("ended").items() if (code := int(text or 0))}
        echoes = self._read("echo")
        own = (code for pid, code in codes.items() if pid not in echoes)
        return next(own, next(iter(codes.values()), 0))

    def waiting_in_vain(self) -> tuple[int, str] | None:
        """Return what is to be said where workers wait to make a strategy with one that has ended; else None.

        Before it stands how many strategies the one that has ended has made. All meet at once: one that has ended, and
        has met the others no more often than one that waits, never comes.
        """
        ended = {*self._read("ended"), *self._read("leaving")}
        if not ended:
            return None
        met = {pid: int(text or 0) for pid, text in self._read("met").items()}
        first = min(sorted(ended), key=lambda pid: met.get(pid, 0))
        made = met.get(first, 0)
        count = sum(met.get(pid, 0) >= made for pid in self._read("rendezvous").keys() - ended)
        if not count:
            return None
        started = self._read("started").get(first)
        who = "a worker" if started is None else f"worker {started.split()[1]}"
        what, which = "without making a MultiWorkerMirroredStrategy", ""
        if made:
            what, which = f"after making {made} MultiWorkerMirroredStrategy", " to make the next"
        others = "1 other waits" if count == 1 else f"{count} others wait"
        return made, (f"{who} has ended {what}, and {others} for it{which}; every worker must run the same program")

    def mapped(self) -> Iterator[str]:
        """Yield the files that workers have mapped: those that run, and those that say so at their end."""
        for file in [*self.folder.glob("memory.*"), *(Path(f"/proc/{worker}/maps") for worker, _ in self.running())]:
            with suppress(OSError):
                for line in file.read_text(errors="replace").splitlines():
                    yield line.split(maxsplit=5)[-1]

    def _read(self, kind: str) -> dict[int, str]:
        """Return the notes of a kind by process, the oldest first."""
        found = []
        for note in self.folder.glob(f"{kind}.*"):
            with suppress(FileNotFoundError):  # a worker has met the others meanwhile
                found.append((note.stat().st_mtime_ns, int(note.suffix[1:]), note.read_text()))
        return {pid: text for _, pid, text in sorted(found)}


@contextmanager
def folder_of_notes() -> Iterator[Notes]:
    """Make a job's folder, into which nobody else can look, and remove it in the end."""
    try:
        made = tempfile.TemporaryDirectory(prefix="aiodist-run-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(
            f"cannot make a folder for the job's notes ({error}); set TMPDIR to a folder with free space"
        ) from None
    with made as name:
        yield Notes(Path(name))


class SharedMemory:
    """MPI's shared memory of a job's workers, and its removal.

    An MPI removes it when it is finalised, which a killed worker never does; in a container, where there is little of
    it, some failed jobs use up all. What workers have mapped is seen while they run; one that ends without finalising
    MPI notes it itself.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._begun = time.monotonic()
        self._next_look = self._begun + _FIRST_LOOK_SECONDS
        self._paths: set[str] = set()

    @property
    def look_is_due(self) -> bool:
        """Whether it is time to look again: often at first, when workers map it, and then ever more seldom."""
        return time.monotonic() >= self._next_look

    def look(self) -> None:
        """Note what processes have mapped."""
        now = time.monotonic()
        self._next_look = now + _PATIENCE * (now - self._begun)
        self._paths.update(path for path in self._notes.mapped() if path.startswith(_OF_MPI))

    def remove(self) -> None:
        """Remove what has been noted: all that have used it have ended."""
        for path in self._paths:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
