"""The journal of a job of `aiodist run`: a file to which the job's processes append what its launcher must know.

An engine that waits for a worker that has ended already does so in its own code, and tells nobody; MPI lets no worker
end before all do, who may wait to meet it. The launcher sees it here. Each line is a kind, the process of a worker, and
what belongs to it:

    started PROCESS AGENT RANK    by its agent, as `aiodist._tools.launch.agent` has it
    ended PROCESS CODE            likewise
    waits PROCESS                 for the others, to make a strategy
    met PROCESS                   it has, or:
    failed PROCESS
    maps PROCESS PATH             a file of MPI's in shared memory, which stays where a worker is killed
    leaving PROCESS               it is ready to end, which MPI keeps it from until all are
    echo PROCESS                  it ends because another worker has, or because that was asked for
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from aiodist._arrays import environment

_NAME: Final = "journal"
_OF_MPI: Final = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")  # noqa: S108  (MPICH's, and Open MPI's)


def note(kind: str, *words: str) -> None:
    """Append a line of this worker's, where there is a launcher."""
    if folder := environment.notes():
        with suppress(OSError), open(os.path.join(folder, _NAME), "a", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(f"{' '.join([kind, str(os.getpid()), *words])}\n")


@contextmanager
def noted_rendezvous() -> Iterator[None]:
    """Note that this worker waits for the others, and how that ends."""
    note("waits")
    end = "failed"
    try:
        yield
        end = "met"
    finally:
        note(end)
        for path in shared_memory(os.getpid()) if has_a_launcher() else ():
            note("maps", path)


def has_a_launcher() -> bool:
    """Return whether a launcher reads the journal, on this machine."""
    return os.path.isdir(environment.notes() or "")  # noqa: PTH112  (without pathlib, which takes time to import)


def shared_memory(process: int) -> set[str]:
    """Return the files of MPI's in shared memory that a process has mapped, as Linux shows it."""
    with suppress(OSError), open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
        return {path for line in lines if (path := line.rstrip("\n").split(maxsplit=5)[-1]).startswith(_OF_MPI)}
    return set()


class Journal:
    """What a job's journal says by now; all by process.

    Attributes:
        started: each worker's agent and rank.
        ended: the exit codes, in the order in which the workers have ended.
        waiting: who waits to make a strategy.
        met: how often each has met the others.
        echoes, leaving: who has said so.
        maps: files of MPI's.
    """

    def __init__(self, folder: str | None) -> None:
        self.started: dict[int, tuple[int, int]] = {}
        self.ended: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.met: Counter[int] = Counter()
        self.echoes: set[int] = set()
        self.leaving: set[int] = set()
        self.maps: set[str] = set()
        text = ""
        with suppress(OSError), open(os.path.join(folder or "", _NAME), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            text = file.read()
        for line in text.split("\n")[:-1]:
            kind, process, *words = line.split(" ", 2)
            self._take(kind, int(process), *words)

    def _take(self, kind: str, process: int, words: str = "") -> None:
        match kind:
            case "started":
                agent, rank = words.split()
                self.started[process] = int(agent), int(rank)
            case "ended":
                self.ended[process] = int(words)
            case "waits":
                self.waiting.add(process)
            case "met" | "failed":
                self.waiting.discard(process)
                self.met[process] += kind == "met"
            case "maps":
                self.maps.add(words)
            case "leaving":
                self.leaving.add(process)
            case "echo":
                self.echoes.add(process)

    def running(self) -> list[tuple[int, int]]:
        """Return the workers that have started and not ended: each one's process, and its agent's."""
        return [(process, agent) for process, (agent, _) in self.started.items() if process not in self.ended]

    def first_failure(self) -> int:
        """Return the exit code of the first worker that has failed by itself, else of the first that has; else 0."""
        failed = {process: code for process, code in self.ended.items() if code}
        own = (code for process, code in failed.items() if process not in self.echoes)
        return next(own, next(iter(failed.values()), 0))

    def missing(self) -> str:
        """Return which workers have not come to a rendezvous, for the end of a sentence."""
        absent = sorted((rank, process) for process, (_, rank) in self.started.items() if process not in self.waiting)
        who = ", ".join(f"worker {rank} (process {process} on {platform.node()})" for rank, process in absent)
        return f"; {who} has not come" if who else ""

    def waiting_in_vain(self) -> tuple[int, str] | None:
        """Return what is to be said where workers wait to make a strategy with one that has ended; else None.

        Before it stands how many strategies the one that has ended has made. All meet at once: one that has ended, and
        has met the others no more often than one that waits, never comes.
        """
        over = [*self.ended, *self.leaving]
        if not over:
            return None
        first = min(over, key=self.met.__getitem__)
        made = self.met[first]
        count = sum(self.met[process] >= made for process in self.waiting.difference(over))
        if not count:
            return None
        who = f"worker {self.started[first][1]}" if first in self.started else "a worker"
        what, which = "without making a MultiWorkerMirroredStrategy", ""
        if made:
            what, which = f"after making {made} MultiWorkerMirroredStrategy", " to make the next"
        others = "1 other waits" if count == 1 else f"{count} others wait"
        return made, f"{who} has ended {what}, and {others} for it{which}; every worker must run the same program"
