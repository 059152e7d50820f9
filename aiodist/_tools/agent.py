"""The agent of one worker under `aiodist run`: starts it, forwards its output, and ends it when the job ends.

    python agent.py NOTES WORKERS COMMAND...

NOTES is the folder of the job's journal (`aiodist._workers.journal`). The agent is a script that imports only the
standard library, so that it starts at once.

The worker has a session of its own, so that it can be killed with everything that it has started, and on Linux it dies
with its agent. mpiexec ends the whole job when the first of its processes fails, while the other workers still have a
report to print or, after Ctrl-C, something to save. So the agent of a failed worker stays until all workers have ended.

Ctrl-C and SIGTERM reach the worker from the launcher. Any signal to the agent, and the end of its parent, kill it.

The output of several workers is forwarded in whole lines, each prefixed with the worker's rank.
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

_POLL_SECONDS: Final = 0.05
_KILL_SECONDS: Final = 2.0
_LAST_LINES_SECONDS: Final = 3.0
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def main(journal: Path, workers: int, rank: int, command: Sequence[str]) -> int:
    """Run a worker; return its exit code, as shells do."""
    parent = os.getppid()
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    adopt_orphans()
    piped = subprocess.PIPE if workers > 1 else None
    worker = subprocess.Popen(  # noqa: S603  (the command that the user gave)
        command,
        start_new_session=True,
        stdin=None if rank == 0 else subprocess.DEVNULL,  # under MPICH others would wait for input forever
        stdout=piped,
        stderr=piped,
        close_fds=False,  # mpiexec may talk to the worker through inherited descriptors
        preexec_fn=die_with_parent,  # noqa: PLW1509  (this process has no threads yet)
    )
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # which MPICH's mpiexec sends when another process has failed
    output = [
        threading.Thread(target=_forward_lines, args=(source, target, f"[{rank}] ".encode()), daemon=True)
        for source, target in ((worker.stdout, 1), (worker.stderr, 2))
        if source is not None
    ]
    for thread in output:
        thread.start()
    _note(journal, f"started {worker.pid} {rank}")
    while worker.poll() is None:
        if received or os.getppid() != parent:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            worker.wait(_POLL_SECONDS)
    code = worker.returncode if worker.returncode >= 0 else 128 - worker.returncode
    kill_children()
    until = time.monotonic() + _LAST_LINES_SECONDS
    for thread in output:
        thread.join(max(0.0, until - time.monotonic()))
    # Only now, because the other agents may end then, and with them all of the job. A worker that was asked to end has
    # not failed.
    _note(journal, f"ended {worker.pid} {0 if received else code}")
    with suppress(OSError):  # the launcher is gone, and the journal with it
        while code and not received and os.getppid() == parent and journal.read_text().count("\nended ") < workers:
            time.sleep(_POLL_SECONDS)
    return code


def _note(journal: Path, line: str) -> None:
    """Append a line to the journal, unless the launcher is gone, and its folder with it."""
    with suppress(OSError), journal.open("a") as file:
        file.write(f"{line}\n")


def _forward_lines(source: IO[bytes], target: int, prefix: bytes) -> None:
    """Write what is read, line by line. If nobody reads that any more, close the source, so that the worker knows."""
    with source, suppress(OSError):
        for line in source:
            data = prefix + line.removesuffix(b"\n") + b"\n"  # which the last line may lack
            while data:
                data = data[os.write(target, data) :]


# Processes, on Linux.


def die_with_parent() -> None:
    """Have this process killed when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_older: set[int] = set()


def adopt_orphans() -> None:
    """Make orphans among this process's descendants its children, to be killed by `kill_children`.

    Children that it has by now are not of the job: a shell that became this process may have had some.
    """
    if sys.platform == "linux":
        _older.update(_children())
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children() -> None:
    """Kill all children of this process that are not older than the job, and the orphans that they leave to it.

    A killed process is a child until it is waited for here, and by then its own children are, too. So when there are no
    children, nothing is left.
    """
    until = time.monotonic() + _KILL_SECONDS
    while (left := _children() - _older) and time.monotonic() < until:
        for pid in left:
            with suppress(OSError):  # it has been waited for elsewhere, or is another user's
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _children() -> set[int]:
    """Return the children of this process, including those that have ended and have not been waited for."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # just ended
            fields = status.read_text().rpartition(")")[2].split()  # the name before that may contain anything
            if int(fields[1]) == os.getpid():
                found.add(int(status.parent.name))
    return found


if __name__ == "__main__":
    _, folder, workers, *command = sys.argv
    given = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
    rank = 0 if workers == "1" else int(given)  # one worker has no mpiexec: a variable would be of a job around it
    sys.exit(main(Path(folder, "journal"), int(workers), rank, command))
