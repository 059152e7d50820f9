"""The journal of a job of `aiodist run`: which workers have started, wait for the others, and have ended.

It is a file to which the processes of a job append what the launcher must know, because an engine that waits for a
worker does not say which one is missing. Each line has a kind, a worker's process id and a number:

    started PROCESS RANK    written by the worker's agent, `aiodist._tools.agent`
    ended PROCESS CODE      likewise, once its output is forwarded
    waits PROCESS 1         the worker waits for the others to make a strategy; 0: no longer
    over PROCESS 1          its program has ended, with an error; 0: without. The process may wait in MPI_Finalize
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from aiodist._arrays import environment

ENDED: Final = "has ended"
_JOURNAL: Final = "journal"


def note(kind: str, number: int) -> None:
    """Append a line on this worker, if there is a launcher."""
    if folder := environment.journal_folder():
        with suppress(OSError), open(os.path.join(folder, _JOURNAL), "a", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(f"{kind} {os.getpid()} {number}\n")


@contextmanager
def noted_rendezvous() -> Iterator[None]:
    """Note that this worker waits for the others inside the block."""
    note("waits", 1)
    try:
        yield
    finally:
        note("waits", 0)


class Journal:
    """The contents of a job's journal.

    Attributes:
        started: by process, the ranks.
        ended: by process, the exit codes, in the order in which the workers have ended.
        waiting: the processes that wait to make a strategy.
        over: the processes whose programs have ended, or that have ended themselves.
    """

    def __init__(self, folder: str | None) -> None:
        numbers: defaultdict[str, dict[int, int]] = defaultdict(dict)
        with suppress(OSError), open(os.path.join(folder or "", _JOURNAL), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            for line in file.read().split("\n")[:-1]:
                kind, process, number = line.split(" ")
                numbers[kind][int(process)] = int(number)
        self.started, self.ended = numbers["started"], numbers["ended"]
        self.waiting = {process for process, waits in numbers["waits"].items() if waits}
        programs = {pid: error for pid, error in numbers["over"].items() if pid in self.started}  # no worker's children
        self.over = programs.keys() | self.ended.keys()
        self._has_failed = any(programs.values())

    def failure(self) -> int:
        """Return the exit code of the first worker that failed by itself; 0 if none did.

        The others fail because of it, perhaps before it has ended, with an exception and so with code 1.
        """
        codes = [code for code in self.ended.values() if code]
        return next((code for code in codes if code != 1), 1 if codes or self._has_failed else 0)

    def missing(self) -> str:
        """Return the workers that have not reached a rendezvous, as the end of a sentence."""
        absent = sorted((rank, process) for process, rank in self.started.items() if process not in self.waiting)
        does = ((rank, pid, ENDED if pid in self.over else "has not arrived") for rank, pid in absent)
        workers = [f"worker {rank} (process {pid} on {platform.node()}) {what}" for rank, pid, what in does]
        return f"; {', '.join(workers)}" if workers else ""
