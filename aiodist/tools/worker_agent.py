"""The agent of one worker under `aiodist run`: starts it, notes how it ended, and lets the others end, too.

    python worker_agent.py NOTES WORKERS COMMAND...

The worker has a session of its own, so that it can be killed with everything that it has started, and where the system
can do that (Linux) it dies with its agent. A failed worker's agent stays for some seconds: a launcher ends the whole
job when the first of its processes fails, and the other workers have a report to print.
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
_PR_SET_PDEATHSIG: Final = 1


def main(notes: Path, workers: int, command: list[str]) -> int:
    """Run a worker; return its exit code, as shells have it."""
    _die_with_parent()
    worker = subprocess.Popen(  # noqa: S603  (the command that the user gave)
        command,
        start_new_session=True,
        close_fds=False,  # a launcher may speak to it through descriptors that it has inherited
        preexec_fn=_die_with_parent,  # noqa: PLW1509  (this process has no threads)
    )
    note = notes / f"started.{worker.pid}"
    with suppress(OSError):  # on another machine there is no such folder
        note.write_text(str(worker.pid))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _kill(worker))
    code = worker.wait()
    code = code if code >= 0 else 128 - code
    with suppress(OSError):
        (notes / f"ended.{worker.pid}").write_text(str(code))
    if code:
        _wait_for_last_words(notes, workers)
    return code


def _wait_for_last_words(notes: Path, workers: int) -> None:
    """Wait until all workers of this machine have ended, if they are all of the job, or for some seconds."""
    until = time.monotonic() + LAST_WORDS_SECONDS
    while time.monotonic() < until and len(list(notes.glob("ended.*"))) < workers:
        time.sleep(0.05)


def _kill(worker: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
