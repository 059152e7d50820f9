"""Following a job to its end, or bringing that about: nothing of it is left on this machine when the launcher returns.

Every agent leaves two notes in the job's folder: that its worker has started, and how it has ended. A job ends when its
processes have; or some seconds after the first worker has failed, which are for the last words of the others; or some
seconds after the user has asked for it, which are for the workers to end on their own. A second Ctrl-C ends it at once.

The job's exit code is that of the first worker that has failed by itself: one that ends while others need it makes them
fail, too, and may come to its end after them. Those note that they are echoes.

A worker notes there, too, that it waits to meet the others for a further strategy, and how often they have met. They
all meet at once, so where one has ended that has met them no more often than one that waits, that one does so in vain;
and likewise where one is ready to end, and MPI keeps it until all are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from aiodist._demos.interruption import INTERRUPTIONS
from aiodist._tools.launch import leftovers, worker_agent
from aiodist._tools.launch.switchboard import Switchboard

LAST_WORDS_SECONDS: Final = 3.5
ENDING_SECONDS: Final = 4.0
_POLL_SECONDS: Final = 0.05
_LOST_AGENT_SECONDS: Final = 1.0
_FAREWELL_SECONDS: Final = 1.0
_WITH: Final = "after making {} MultiWorkerMirroredStrategy"
_WITHOUT: Final = "without making a MultiWorkerMirroredStrategy"


def follow(starters: Sequence[subprocess.Popen[bytes]], notes: Path, elsewhere: Switchboard | None = None) -> int:
    """Wait for the end of a job, or bring it about; return the exit code of the worker that failed first, or 0.

    Args:
        starters: the processes that this one has started for it: a launcher, or agents.
        notes: the folder with the agents' notes.
        elsewhere: connections to the agents on other machines; None where there are none.

    Raises:
        KeyboardInterrupt: the user has asked for the end; it has come.
    """
    with _Asked() as asked:
        job = _Job(starters, notes, asked, elsewhere)
        try:
            while job.runs() and not job.is_over():
                with suppress(subprocess.TimeoutExpired):
                    job.running[0].wait(_POLL_SECONDS)
            told = job.first_failure()  # before those that are left are killed
        finally:
            job.end()
        if signal.SIGINT in asked.numbers:
            INTERRUPTIONS.note()
            raise KeyboardInterrupt
        if asked.numbers:
            return 128 + asked.numbers[0]
        if job.complaint:
            print(f"Error: {job.complaint}", file=sys.stderr)
            return 1
        return told or job.first_failure() or next((code for code in map(_exit_code, starters) if code), 0)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    code = process.wait()
    return code if code >= 0 else 128 - code


class _Asked:
    """Notes the ends that are asked for (Ctrl-C, SIGTERM, the end of the terminal) instead of ending."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __enter__(self) -> Self:
        names = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            names.append(signal.SIGHUP)
        self._before = {name: signal.signal(name, lambda number, _: self.numbers.append(number)) for name in names}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)


class _Job:
    """The processes of a job as the launcher sees them.

    Attributes:
        complaint: why the job has been ended though no worker has failed.
    """

    def __init__(
        self,
        starters: Sequence[subprocess.Popen[bytes]],
        notes: Path,
        asked: _Asked,
        elsewhere: Switchboard | None,
    ) -> None:
        self.running = list(starters)
        self._notes = notes
        self._asked = asked
        self._elsewhere = elsewhere
        self._passed_on = 0
        self._looks = leftovers.Looks()
        self._over_at: float | None = None
        self._agent_lost_at: float | None = None
        self._in_vain_since: float | None = None
        self.complaint: str | None = None

    def runs(self) -> bool:
        """Return whether anything that was started still runs."""
        self.running = [process for process in self.running if process.poll() is None]
        return bool(self.running)

    def is_over(self) -> bool:
        """Return whether the time has come to kill what still runs; look at what has happened since."""
        now = time.monotonic()
        if self._elsewhere is not None:
            self._elsewhere.serve()
        if len(self._asked.numbers) > self._passed_on:
            self._pass_on(now)
        if self._looks.due():
            self._note_memory()
        if self._over_at is None and (self.first_failure() or self._has_lost_an_agent(now)):
            self._over_at = now + LAST_WORDS_SECONDS
            self._note_memory()
        if self._over_at is None and (complaint := self._waits_in_vain(now)):
            self.complaint, self._over_at = complaint, now
        return self._over_at is not None and now >= self._over_at

    def _pass_on(self, now: float) -> None:
        self._over_at = now if self._passed_on else now + ENDING_SECONDS
        self._passed_on = len(self._asked.numbers)
        self._note_memory()
        number = self._asked.numbers[0]
        if number == signal.SIGHUP:  # agents take that for the end of the launcher, and workers get no time
            number = signal.SIGTERM
        for agent, _ in self._started():
            with suppress(ProcessLookupError):
                os.kill(agent, number)
        if self._elsewhere is not None:
            self._elsewhere.send(number)

    def _note_memory(self) -> None:
        workers = [worker for _, worker in self._started() if not (self._notes / f"ended.{worker}").exists()]
        leftovers.note_memory(self._notes, workers)

    def first_failure(self) -> int:
        """Return the exit code of the first worker that has failed, an echo of another's only if all are; else 0."""
        ended = sorted(self._notes.glob("ended.*"), key=lambda note: note.stat().st_mtime_ns)
        codes = {note: code for note in ended if (code := int(note.read_text() or 0))}
        own = (code for note, code in codes.items() if not note.with_name(f"echo{note.suffix}").exists())
        return next(own, next(iter(codes.values()), 0))

    def _started(self) -> list[tuple[int, int]]:
        """Return the agents and workers of this machine, as far as they have come."""
        notes = [note.read_text().split() for note in self._notes.glob("started.*")]
        return [(int(note[0]), int(note[1])) for note in notes if len(note) == 2]

    def _has_lost_an_agent(self, now: float) -> bool:
        """Return whether a worker has ended some time ago, and its agent does not say so: it is stopped."""
        waiting = [
            worker
            for _, worker in self._started()
            if worker_agent.state_of(worker) in {"", "Z"} and not (self._notes / f"ended.{worker}").exists()
        ]
        self._agent_lost_at = (self._agent_lost_at or now) if waiting else None
        return self._agent_lost_at is not None and now - self._agent_lost_at > _LOST_AGENT_SECONDS

    def _waits_in_vain(self, now: float) -> str | None:
        """Return what is to be said where workers wait to meet one that has ended; None where none does."""
        ended = {note.suffix[1:] for kind in ("ended", "leaving") for note in self._notes.glob(f"{kind}.*")}
        met = {note.suffix[1:]: int(note.read_text() or 0) for note in self._notes.glob("met.*")}
        waiting = {note.suffix[1:] for note in self._notes.glob("meeting.*")}  # after how often they had met before
        if not ended:
            return None
        first = min(sorted(ended), key=lambda worker: met.get(worker, 0))
        made = met.get(first, 0)
        in_vain = sum(met.get(worker, 0) >= made for worker in waiting - ended)
        self._in_vain_since = (self._in_vain_since or now) if in_vain else None
        if self._in_vain_since is None or (made and now - self._in_vain_since < LAST_WORDS_SECONDS):
            return None  # those that have an earlier strategy know by that, and raise it themselves
        what, where = (_WITH.format(made), "to make the next") if made else (_WITHOUT, "there")
        return (
            f"the worker of process {first.rpartition('-')[2]} has ended {what}, and {in_vain} "
            f"other{'s wait' if in_vain > 1 else ' waits'} for it {where}; every worker must run the same program"
        )

    def end(self) -> None:
        """End what is left, the workers and theirs and the launcher's own; remove the shared memory of all.

        A launcher whose agents have ended ends by itself, and removes its own files.
        """
        self._note_memory()
        if self._elsewhere is not None:
            self._elsewhere.close()
        self._kill_workers()
        self._wait_for_starters()
        for process in self.running:
            process.terminate()
        self._wait_for_starters()
        for process in self.running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self._kill_workers()
        worker_agent.kill_descendants()
        leftovers.remove_memory(self._notes)

    def _kill_workers(self) -> None:
        for _, worker in self._started():
            with suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)

    def _wait_for_starters(self) -> None:
        until = time.monotonic() + _FAREWELL_SECONDS
        while self.runs() and time.monotonic() < until:
            with suppress(subprocess.TimeoutExpired):
                self.running[0].wait(_POLL_SECONDS)
