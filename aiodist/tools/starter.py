"""What stands in for mpiexec where there is no MPI: starts the workers' agents on this machine, and passes output on.

    python starter.py WORKERS COMMAND...

Each agent finds its rank in ``AIODIST_RANK``. What workers print is passed on by whole lines, so that lines of several
workers do not run into each other. It ends when all agents have; they end when it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, Final

_LAST_LINES_SECONDS: Final = 1.0


def main(workers: int, command: list[str]) -> int:
    """Run the command for every worker; return the first exit code that is not 0, by rank."""
    agents = [_start(rank, command) for rank in range(workers)]
    lock = threading.Lock()
    passing = [
        threading.Thread(target=_pass_lines, args=(source, target, lock), daemon=True)
        for agent in agents
        for source, target in ((agent.stdout, sys.stdout.buffer), (agent.stderr, sys.stderr.buffer))
    ]
    for thread in passing:
        thread.start()
    codes = [agent.wait() for agent in agents]
    until = time.monotonic() + _LAST_LINES_SECONDS  # what a worker has started may hold the other ends for longer
    for thread in passing:
        thread.join(max(0.0, until - time.monotonic()))
    return next((code for code in codes if code), 0)


def _start(rank: int, command: list[str]) -> subprocess.Popen[bytes]:
    os.putenv("AIODIST_RANK", str(rank))  # of this process, which the next one inherits
    return subprocess.Popen(  # noqa: S603  (the command that the user gave)
        command,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _pass_lines(source: IO[bytes], target: IO[bytes], lock: threading.Lock) -> None:
    """Write what is read, a line at a time; when nobody reads that any more, the worker is to know."""
    with source, suppress(BrokenPipeError):
        for line in source:
            with lock:
                target.write(line)
                target.flush()


if __name__ == "__main__":
    code = main(int(sys.argv[1]), sys.argv[2:])
    os._exit(code & 0xFF)  # threads that still read do not matter any more, and everything is flushed
