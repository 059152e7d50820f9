"""The agent of one worker under `aiodist run`: starts it, passes its output on, and ends it when the job ends.

    python agent.py NOTES WORKERS RANK COMMAND...

NOTES is the folder of the job's journal (`aiodist._workers.ending`), and RANK the variable in which mpiexec says which
worker this is. The agent is a script that imports nothing but the standard library, so that it starts at once.

The worker has a session of its own, so that it can be killed with everything that it has started, and on Linux it dies
with its agent. The agent of a failed worker stays for some seconds: mpiexec ends the whole job when the first of its
processes fails, and the other workers have a report to print; or, after Ctrl-C, something to save.

Ctrl-C and SIGTERM reach the worker from the launcher. Any signal to the agent, and the end of its parent, kill it.

Of several workers, whole lines of output are passed on, each with the worker's rank in front.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

OTHERS_SECONDS: Final = 3.0
_POLL_SECONDS: Final = 0.05
_KILL_SECONDS: Final = 2.0
_LAST_LINES_SECONDS: Final = 1.0
_LINUX: Final = sys.platform == "linux"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def main(notes: Path, workers: int, rank: int, command: Sequence[str]) -> int:
    """Run a worker; return its exit code, as shells have it."""
    parent = os.getppid()
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    die_with_parent(signal.SIGHUP)
    adopt_orphans()
    piped = subprocess.PIPE if workers > 1 else None
    worker = subprocess.Popen(  # noqa: S603  (the command that the user gave)
        command,
        start_new_session=True,
        stdin=None if rank == 0 else subprocess.DEVNULL,  # MPICH's others would wait for what never comes
        stdout=piped,
        stderr=piped,
        close_fds=False,  # mpiexec may speak to it through descriptors that it has inherited
        preexec_fn=lambda: die_with_parent(signal.SIGKILL),  # noqa: PLW1509  (this process has no threads yet)
    )
    output = []
    for source, target in ((worker.stdout, 1), (worker.stderr, 2)):
        if source is not None:
            stream = source, target, f"[{rank}] ".encode()
            output.append(threading.Thread(target=_pass_lines, args=stream, daemon=True))
            output[-1].start()
    _note(notes, f"started {worker.pid} {rank}")
    code = _follow(worker, parent, asked)
    _note(notes, f"ended {worker.pid} {0 if asked else code}")  # what was asked to end has not failed
    kill_descendants()
    until = time.monotonic() + _LAST_LINES_SECONDS
    for thread in output:
        thread.join(max(0.0, until - time.monotonic()))
    if code:
        _wait_for_others(notes, workers, asked)
    return code


def _note(notes: Path, line: str) -> None:
    """Append a line to the journal; without a word where there is no folder, as when the launcher is gone."""
    with suppress(OSError), (notes / "journal").open("a") as file:
        file.write(f"{line}\n")


def _pass_lines(source: IO[bytes], target: int, prefix: bytes) -> None:
    """Write what is read, line by line; when nobody reads that any more, the worker is to know."""
    with source, suppress(OSError):
        for line in source:
            data = prefix + line
            while data:
                data = data[os.write(target, data) :]


def _follow(worker: subprocess.Popen[bytes], parent: int, asked: list[int]) -> int:
    """Wait for a worker's end, or bring it about when that is asked for; return its exit code."""
    while worker.poll() is None:
        if asked or os.getppid() != parent:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            worker.wait(_POLL_SECONDS)
    return worker.returncode if worker.returncode >= 0 else 128 - worker.returncode


def _wait_for_others(notes: Path, workers: int, asked: list[int]) -> None:
    """Wait for some seconds, or until all workers have ended, or a signal ends that."""
    until = time.monotonic() + OTHERS_SECONDS
    with suppress(OSError):
        while time.monotonic() < until and (notes / "journal").read_text().count("\nended ") < workers:
            if asked:
                return
            time.sleep(_POLL_SECONDS)


# Processes, as Linux shows them.


def die_with_parent(number: int) -> None:
    """Let this process get a signal when the one that has started it ends; on Linux."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


_older: set[int] = set()


def adopt_orphans() -> None:
    """Let what this process's children leave behind become children of this one, to be killed in the end; on Linux.

    Children that it has by now, as a shell that became this process may have had, are not of the job.
    """
    if _LINUX:
        _older.update(_descendants())
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    state, parent, *_ = status.rpartition(")")[2].split()
    return state, int(parent)


def kill_descendants() -> None:
    """Kill all processes below this one but those older than the job, and wait until they are gone; on Linux.

    They are looked at one after the other. One whose parent ends meanwhile may seem to be below nobody, until the next
    look, for which it has been adopted.
    """
    until = time.monotonic() + _KILL_SECONDS
    empty_looks = 0
    while _LINUX and empty_looks < 2 and time.monotonic() < until:
        left = _descendants()
        empty_looks = 0 if left else empty_looks + 1
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01 if left else 0.0)


def _descendants() -> list[int]:
    """List what of the job lives below this process; an ended child that nobody has waited for does not."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  (names are what is wanted)
        if entry.isdigit():
            state, parent = _state_and_parent(int(entry))
            if state not in {"", "Z"} and int(entry) not in _older:
                children.setdefault(parent, []).append(int(entry))
    found, parents = [], [os.getpid()]
    while parents:
        parents = [child for parent in parents for child in children.get(parent, ())]
        found += parents
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(os.environ.get(sys.argv[3], "0")), sys.argv[4:]))
