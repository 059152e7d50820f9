"""What stands in for mpiexec where there is no MPI: starts the workers' agents, and passes output on.

    python starter.py PLACES ELSEWHERE COMMAND...

PLACES says where each worker starts, separated by commas: the name of a machine that ssh reaches, or nothing for this
one. ELSEWHERE is what a command line begins with on another machine. Each agent finds its rank in ``AIODIST_RANK``.

What workers print is passed on by whole lines, so that lines of several workers do not run into each other. It ends
when all agents have, or some seconds after the first has failed: one may never have started, and the others would wait
for it. Agents end when it does.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final

SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")
_LAST_LINES_SECONDS: Final = 1.0
_OTHERS_SECONDS: Final = 5.0  # longer than the launcher gives workers to end on their own
_POLL_SECONDS: Final = 0.05
_SSH_FAILED: Final = 255


def main(places: Sequence[str], elsewhere: str, command: list[str]) -> int:
    """Run the command for every worker; return the first exit code that is not 0, by rank."""
    agents = [_start(rank, place, elsewhere, command) for rank, place in enumerate(places)]
    lock = threading.Lock()
    passing = [
        threading.Thread(target=_pass_lines, args=(source, target, lock), daemon=True)
        for agent in agents
        for source, target in ((agent.stdout, sys.stdout.buffer), (agent.stderr, sys.stderr.buffer))
    ]
    for thread in passing:
        thread.start()
    codes = _wait(agents)
    until = time.monotonic() + _LAST_LINES_SECONDS  # what a worker has started may hold the other ends for longer
    for thread in passing:
        thread.join(max(0.0, until - time.monotonic()))
    for rank, (place, code) in enumerate(zip(places, codes, strict=True)):
        if place and code == _SSH_FAILED:
            with suppress(OSError):
                print(f"Error: worker {rank} has not started on {place}, or is lost: ssh has failed", file=sys.stderr)
    return next((code for code in codes if code), 0)


def _start(rank: int, place: str, elsewhere: str, command: list[str]) -> subprocess.Popen[bytes]:
    os.putenv("AIODIST_RANK", str(rank))  # of this process, which the next one inherits
    if place:
        command = [*SSH, place, f"{elsewhere} AIODIST_RANK={rank} {shlex.join(command)}"]
    return subprocess.Popen(  # noqa: S603  (the command that the user gave)
        command,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _wait(agents: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait until all have ended, or the first has failed some time ago; return the exit codes."""
    until = float("inf")
    while None in (codes := [agent.poll() for agent in agents]) and time.monotonic() < until:
        if any(codes):
            until = min(until, time.monotonic() + _OTHERS_SECONDS)
        running = agents[codes.index(None)]
        with suppress(subprocess.TimeoutExpired):
            running.wait(_POLL_SECONDS)
    return codes


def _pass_lines(source: IO[bytes], target: IO[bytes], lock: threading.Lock) -> None:
    """Write what is read, a line at a time; when nobody reads that any more, the worker is to know."""
    with source, suppress(BrokenPipeError):
        for line in source:
            with lock:
                target.write(line)
                target.flush()


if __name__ == "__main__":
    code = main(sys.argv[1].split(","), sys.argv[2], sys.argv[3:])
    os._exit(code & 0xFF)  # threads that still read do not matter any more, and everything is flushed
