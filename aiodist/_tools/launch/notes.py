"""The notes of a job: files in a folder, by which agents and workers tell the launcher how far they have come.

All are named by the worker's process. Its agent leaves ``started.PID`` (agent and rank), ``ended.PID`` (the exit code),
and ``echo.PID`` where the end was asked for. A worker, as `aiodist._workers.launcher` has it, leaves ``meeting.PID``
while it waits for the others to make a strategy, ``met.PID`` (how often they have met), ``leaving.PID`` when it is
ready to end, which MPI keeps it from until all are, and ``echo.PID`` where it ends because another has.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from aiodist._tools.usage import UsageError


class Worker(NamedTuple):
    """A worker that has started: its process, its agent's, its rank, and whether it is known to have ended."""

    pid: int
    agent: int
    rank: int
    ended: bool


class Notes:
    """A job's folder of notes, as the launcher reads it.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def workers(self) -> list[Worker]:
        """Return the workers that have started."""
        ended = self._pids("ended")
        told = {_pid(note): note.read_text().split() for note in self.folder.glob("started.*")}
        return [Worker(pid, int(agent), int(rank), pid in ended) for pid, (agent, rank) in told.items()]

    def first_failure(self) -> int:
        """Return the exit code of the first worker that has failed by itself, else of the first that has; else 0."""
        ended = sorted(self.folder.glob("ended.*"), key=lambda note: note.stat().st_mtime_ns)
        codes = {_pid(note): code for note in ended if (code := int(note.read_text() or 0))}
        echoes = self._pids("echo")
        own = (code for pid, code in codes.items() if pid not in echoes)
        return next(own, next(iter(codes.values()), 0))

    def waiting_in_vain(self) -> tuple[int, str] | None:
        """Return whether workers wait to make a strategy with one that has ended.

        All meet at once: one that has ended, and has met the others no more often than one that waits, never comes.

        Returns:
            How many strategies the one that has ended has made, and what is to be said; None if nobody waits in vain.
        """
        ended = self._pids("ended") | self._pids("leaving")
        if not ended:
            return None
        met = {_pid(note): int(note.read_text() or 0) for note in self.folder.glob("met.*")}
        first = min(sorted(ended), key=lambda pid: met.get(pid, 0))
        made = met.get(first, 0)
        count = sum(met.get(pid, 0) >= made for pid in self._pids("meeting") - ended)
        if not count:
            return None
        rank = next((str(worker.rank) for worker in self.workers() if worker.pid == first), f"of process {first}")
        what, where = "without making a MultiWorkerMirroredStrategy", "there"
        if made:
            what, where = f"after making {made} MultiWorkerMirroredStrategy", "to make the next"
        others = "1 other waits" if count == 1 else f"{count} others wait"
        return made, (
            f"worker {rank} has ended {what}, and {others} for it {where}; every worker must run the same program"
        )

    def _pids(self, kind: str) -> set[int]:
        return {_pid(note) for note in self.folder.glob(f"{kind}.*")}


def _pid(note: Path) -> int:
    return int(note.suffix[1:])


@contextmanager
def folder_of_notes() -> Iterator[Notes]:
    """Make a job's folder, into which nobody else can look, and remove it in the end.

    Raises:
        UsageError: there is no place for it.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="aiodist-run-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(
            f"a folder for the job's notes cannot be made ({error}); set TMPDIR to one with room"
        ) from None
    with made as name:
        yield Notes(Path(name))
