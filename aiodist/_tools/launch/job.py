"""A job followed to its end, or brought to it: no process of it is left on this machine, and no memory of MPI's.

A job ends when all its processes have; or some seconds after the first worker has failed, in which the others may tell
of it; or some seconds after the user has asked for it, in which the workers may end by themselves. A second Ctrl-C ends
it at once. It ends, too, when workers wait to make a strategy with one that has ended: MPI would let them wait on.

The job's exit code is that of the first worker that has failed by itself. One that ends while others need it makes them
fail, too, and may come to its end after them: these say that they are echoes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from aiodist._tools.launch import agent
from aiodist._workers.journal import Journal, shared_memory

LAST_WORDS_SECONDS: Final = 3.5
ENDING_SECONDS: Final = 4.0
_POLL_SECONDS: Final = 0.05
_FAREWELL_SECONDS: Final = 1.0


def follow(process: subprocess.Popen[bytes], folder: str) -> int:
    """Wait for the end of a job, or bring it about; return the exit code of the worker that failed first, or 0.

    ``folder`` is that of its journal.
    """
    with _noted_signals() as signals:
        job = _Job(process, folder, signals)
        try:
            while process.poll() is None and not job.is_over():
                _wait(process, _POLL_SECONDS)
            failure = Journal(folder).first_failure()  # before those that are left are killed
        finally:
            job.end()
        if signal.SIGINT in signals:
            raise KeyboardInterrupt
        if signals:
            return 128 + signals[0]
        if job.complaint:
            print(f"Error: {job.complaint}", file=sys.stderr)
            return 1
        code = process.wait()
        return failure or Journal(folder).first_failure() or (code if code >= 0 else 128 - code)


@contextmanager
def _noted_signals() -> Iterator[Sequence[int]]:
    """Note the signals that ask for the end (Ctrl-C, SIGTERM, the end of the terminal) instead of ending."""
    received: list[int] = []
    names = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        names.append(signal.SIGHUP)
    before = {name: signal.signal(name, lambda number, _: received.append(number)) for name in names}
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


class _Job:
    """The processes of a job.

    Attributes:
        complaint: why the job has been ended though no worker has failed.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: str, signals: Sequence[int]) -> None:
        self._process = process
        self._folder = folder
        self._signals = signals
        self._passed_on = 0
        self._memory: set[str] = set()
        self._over_at: float | None = None
        self._in_vain_since: float | None = None
        self.complaint: str | None = None

    def is_over(self) -> bool:
        """Return whether the time has come to kill what still runs; look at what has happened since."""
        now, journal = time.monotonic(), Journal(self._folder)
        if len(self._signals) > self._passed_on:
            self._over_at = now if self._passed_on else now + ENDING_SECONDS
            self._passed_on = len(self._signals)
            self._look_at_memory(journal)
            first = self._signals[0]
            _signal_agents(journal, signal.SIGTERM if first == signal.SIGHUP else first)  # SIGHUP would give no time
        if self._over_at is None and journal.first_failure():
            self._over_at = now + LAST_WORDS_SECONDS
            self._look_at_memory(journal)
        if self._over_at is None and (complaint := self._waits_in_vain(journal, now)):
            self.complaint, self._over_at = complaint, now
        return self._over_at is not None and now >= self._over_at

    def end(self) -> None:
        """End what is left: workers, what they have started, and mpiexec; remove the shared memory of all.

        When the agents have ended, mpiexec ends by itself, and removes its own files.
        """
        journal = Journal(self._folder)
        self._look_at_memory(journal)
        for end in (partial(_signal_agents, journal, signal.SIGHUP), self._process.terminate, self._process.kill):
            end()
            _wait(self._process, _FAREWELL_SECONDS)
        agent.kill_descendants()
        for path in self._memory | Journal(self._folder).maps:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108

    def _look_at_memory(self, journal: Journal) -> None:
        """Note the shared memory of workers that may not have got to noting it themselves.

        An MPI removes it when it is finalised, which a killed worker never does; in a container, where there is little
        of it, some failed jobs would use up all.
        """
        for worker, _ in journal.running():
            self._memory |= shared_memory(worker)

    def _waits_in_vain(self, journal: Journal, now: float) -> str | None:
        """Return what is to be said where workers wait to meet one that has ended; None where none does."""
        made, text = journal.waiting_in_vain() or (0, None)
        self._in_vain_since = (self._in_vain_since or now) if text else None
        if made and now - (self._in_vain_since or now) < LAST_WORDS_SECONDS:
            return None  # those that have an earlier strategy know by that, and raise it themselves
        return text


def _signal_agents(journal: Journal, number: int) -> None:
    for _, its_agent in journal.running():
        with suppress(ProcessLookupError):
            os.kill(its_agent, number)
