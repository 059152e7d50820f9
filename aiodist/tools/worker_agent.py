"""The agent of one worker under `aiodist run`: starts it, notes how it ended, and lets the others end, too.

    python worker_agent.py NOTES WORKERS COMMAND...

It is a script, and starts without the package: nothing here imports anything but the standard library.

The worker has a session of its own, so that it can be killed with everything that it has started, and where the system
can do that (Linux) it dies with its agent. A failed worker's agent stays for some seconds: a launcher ends the whole
job when the first of its processes fails, and the other workers have a report to print.

SIGINT and SIGTERM are passed on, and the worker is killed where it has not ended some seconds later. SIGHUP, and the
end of the agent's parent, kill it at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

LAST_WORDS_SECONDS: Final = 3.0
ENDING_SECONDS: Final = 3.0
_TURN_SECONDS: Final = 0.05
_KILL_SECONDS: Final = 2.0
_LINUX: Final = sys.platform == "linux"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def main(notes: Path, workers: int, command: list[str]) -> int:
    """Run a worker; return its exit code, as shells have it."""
    parent = os.getppid()
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    die_with_parent(signal.SIGHUP)
    adopt_orphans()
    worker = subprocess.Popen(  # noqa: S603  (the command that the user gave)
        command,
        start_new_session=True,
        close_fds=False,  # a launcher may speak to it through descriptors that it has inherited
        preexec_fn=die_with_parent,  # noqa: PLW1509  (this process has no threads)
    )
    _note(notes, f"started.{worker.pid}", f"{os.getpid()} {worker.pid}")
    code = _follow(worker, parent, asked)
    kill_descendants()
    _note(notes, f"ended.{worker.pid}", str(code))
    if code and not asked:
        _wait_for_last_words(notes, workers)
    return code


def _note(notes: Path, name: str, text: str) -> None:
    """Leave a note in one piece; on another machine than the launcher's there is no such folder."""
    with suppress(OSError):
        draft = notes / f"draft.{name}"
        draft.write_text(text)
        draft.rename(notes / name)


def _follow(worker: subprocess.Popen[bytes], parent: int, asked: list[int]) -> int:
    """Wait for a worker's end, or bring it about when that is asked for; return its exit code."""
    passed_on, kill_at = 0, float("inf")
    while worker.poll() is None:
        if os.getppid() != parent or signal.SIGHUP in asked or time.monotonic() > kill_at:
            _signal_group(worker, signal.SIGKILL)
        for number in asked[passed_on:]:
            passed_on += 1
            kill_at = min(kill_at, time.monotonic() + ENDING_SECONDS)
            _pass_on(worker, number)
        with suppress(subprocess.TimeoutExpired):
            worker.wait(_TURN_SECONDS)
    return worker.returncode if worker.returncode >= 0 else 128 - worker.returncode


def _pass_on(worker: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal as a terminal and as `kill` do: Ctrl-C is for all of a session, SIGTERM for a process."""
    if number == signal.SIGINT:
        _signal_group(worker, number)
    else:
        worker.send_signal(number)


def _signal_group(worker: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, number)


def _wait_for_last_words(notes: Path, workers: int) -> None:
    """Wait until all workers of this machine have ended, if they are all of the job, or for some seconds."""
    until = time.monotonic() + LAST_WORDS_SECONDS
    while time.monotonic() < until and len(list(notes.glob("ended.*"))) < workers:
        time.sleep(_TURN_SECONDS)


# Processes, as Linux shows them.


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let this process get a signal when the one that has started it ends; on Linux."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Let what this process's children leave behind become children of this one, to be killed in the end; on Linux."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def state_of(pid: int) -> str:
    """Return a process's state, such as ``R``, ``S``, ``T``, ``Z``; empty where it is gone, ``?`` if nobody knows."""
    return _state_and_parent(pid)[0] if _LINUX else "?"


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    state, parent, *_ = status.rpartition(")")[2].split()
    return state, int(parent)


def kill_descendants() -> None:
    """Kill all processes below this one, and wait until they are gone; on Linux."""
    until = time.monotonic() + _KILL_SECONDS
    while _LINUX and (left := _descendants()) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _descendants() -> list[int]:
    """List what lives below this process; an ended child that nobody has waited for does not."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  (names are what is wanted)
        if entry.isdigit():
            state, parent = _state_and_parent(int(entry))
            if state not in {"", "Z"}:
                children.setdefault(parent, []).append(int(entry))
    found, parents = [], [os.getpid()]
    while parents:
        parents = [child for parent in parents for child in children.get(parent, ())]
        found += parents
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
