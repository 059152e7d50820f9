"""The notes of a job: files in a folder, by which agents and workers tell the launcher how far they have come.

All are named by the worker's process. Its agent leaves ``started.PID`` (agent and rank), ``ended.PID`` (the exit code),
and ``echo.PID`` where the end was asked for. A worker, as `aiodist._workers.ending` has it, leaves ``rendezvous.PID``
while it waits for the others to make a strategy, ``met.PID`` (how often they have met), ``leaving.PID`` when it is
ready to end, which MPI keeps it from until all are, ``echo.PID`` where it ends because another has, and
``memory.PID`` (what it has mapped of files, as Linux shows it) where it ends without finalising MPI.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiodist._tools.usage import UsageError


class Notes:
    """A job's folder of notes, as the launcher reads it.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def running(self) -> list[tuple[int, int]]:
        """Return the workers that have started and not ended: each one's process, and its agent's."""
        ended = self._pids("ended")
        started = {_pid(note): note for note in self.folder.glob("started.*")}
        return [(pid, int(note.read_text().split()[0])) for pid, note in started.items() if pid not in ended]

    def maps(self) -> list[Path]:
        """Return the files that show what memory workers have mapped: those that run, and those that say so."""
        return [*self.folder.glob("memory.*"), *(Path(f"/proc/{worker}/maps") for worker, _ in self.running())]

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
        count = sum(met.get(pid, 0) >= made for pid in self._pids("rendezvous") - ended)
        if not count:
            return None
        note = self.folder / f"started.{first}"
        who = f"worker {note.read_text().split()[1]}" if note.exists() else "a worker"
        what, where = "without making a MultiWorkerMirroredStrategy", "there"
        if made:
            what, where = f"after making {made} MultiWorkerMirroredStrategy", "to make the next"
        others = "1 other waits" if count == 1 else f"{count} others wait"
        return made, (f"{who} has ended {what}, and {others} for it {where}; every worker must run the same program")

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
