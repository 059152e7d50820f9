"""The journal of a job of `aiodist run`: a file to which the job's processes append what its launcher must know.

An engine that waits for a worker does so in its own code, and tells nobody who has not come. Each line is a kind, the
process of a worker, and what belongs to it:

    started PROCESS AGENT RANK    by its agent, as `aiodist._tools.launch.agent` has it
    ended PROCESS CODE            likewise
    waits PROCESS                 for the others, to make a strategy
    goes-on PROCESS               it waits no more
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from aiodist._arrays import environment

_NAME: Final = "journal"


def _note(kind: str) -> None:
    """Append a line of this worker's, where there is a launcher."""
    if folder := environment.notes():
        with suppress(OSError), open(os.path.join(folder, _NAME), "a", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(f"{kind} {os.getpid()}\n")


@contextmanager
def noted_rendezvous() -> Iterator[None]:
    """Note that this worker waits for the others, and when it does no more."""
    _note("waits")
    try:
        yield
    finally:
        _note("goes-on")


class Journal:
    """What a job's journal says by now; all by process.

    Attributes:
        started: each worker's agent and rank.
        ended: the exit codes, in the order in which the workers have ended.
        waiting: who waits to make a strategy.
    """

    def __init__(self, folder: str | None) -> None:
        self.started: dict[int, tuple[int, int]] = {}
        self.ended: dict[int, int] = {}
        self.waiting: set[int] = set()
        text = ""
        with suppress(OSError), open(os.path.join(folder or "", _NAME), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            text = file.read()
        for line in text.split("\n")[:-1]:
            kind, *words = line.split(" ")
            process, *numbers = map(int, words)
            match kind:
                case "started":
                    agent, rank = numbers
                    self.started[process] = agent, rank
                case "ended":
                    (self.ended[process],) = numbers
                case "waits":
                    self.waiting.add(process)
                case "goes-on":
                    self.waiting.discard(process)

    def running(self) -> dict[int, int]:
        """Return the agents of the workers that have started and not ended, by the worker's process."""
        return {process: agent for process, (agent, _) in self.started.items() if process not in self.ended}

    def failure(self) -> int:
        """Return the exit code of the first worker that has failed by itself; 0 where none has.

        The others fail because of it, perhaps before it has ended: by an exception, and so with 1.
        """
        codes = [code for code in self.ended.values() if code]
        return next((code for code in codes if code != 1), 1 if codes else 0)

    def waits_in_vain(self) -> bool:
        """Return whether all workers that run wait to make a strategy, and others have ended."""
        return bool(self.ended) and bool(self.waiting) and self.waiting.issuperset(self.running())

    def missing(self) -> str:
        """Return which workers have not come to a rendezvous, for the end of a sentence."""
        absent = sorted((rank, process) for process, (_, rank) in self.started.items() if process not in self.waiting)
        who = ", ".join(f"worker {rank} (process {process} on {platform.node()})" for rank, process in absent)
        return f"; {who} has not come" if who else ""
