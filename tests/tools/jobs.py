"""Jobs of `aiodist run`, seen from outside: what they print, how they end, and what they leave behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tools.command import environment

LIMIT_SECONDS = 150


@dataclass
class Job:
    """A running job.

    Attributes:
        process: the launcher.
        mark: a text in the environment of all its processes.
        output: what has been read so far.
    """

    process: subprocess.Popen[bytes]
    mark: str
    output: str = ""

    def read_until(self, pattern: str, count: int = 1) -> list[tuple[str, ...]]:
        """Read until the output contains this many matches of a pattern; return them."""
        assert self.process.stdout is not None
        while len(found := re.findall(pattern, self.output)) < count:
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            assert chunk, f"no {pattern!r} in {self.output!r}"
            self.output += chunk.decode()
        return found

    def workers(self, count: int) -> list[tuple[int, int]]:
        """Wait until this many workers of `endings` have started; return the ids of their agents and processes."""
        return [(int(agent), int(worker)) for worker, agent in self.read_until(r"worker (\d+) of agent (\d+)", count)]

    def end(self) -> int:
        """Wait for the end; check that no process is left; return the exit code."""
        self.output += (self.process.communicate(timeout=LIMIT_SECONDS)[0] or b"").decode(errors="replace")
        assert [name for process, name in marked(self.mark) if not _ends(process)] == []
        return self.process.returncode


def marked(mark: str) -> list[tuple[int, str]]:
    """Return the ids and names of the processes that have inherited a mark, on Linux."""
    found = []
    for entry in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        try:
            if mark.encode() in (entry / "environ").read_bytes():  # empty for a dead process
                name = (entry / "cmdline").read_bytes().replace(bytes(1), b" ").decode()
                found.append((int(entry.name), name))
        except OSError:
            continue
    return found


def _ends(process: int) -> bool:
    """Wait for the end of a process that may have been killed already; return whether it has ended."""
    try:
        opened = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([opened], [], [], LIMIT_SECONDS / 10)[0])
    finally:
        os.close(opened)


class Jobs:
    """Starts jobs, and ends those that still run."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def start(self, arguments: Sequence[str], python: str = sys.executable, **variables: str) -> Job:
        """Start `aiodist run` with these arguments, under this interpreter."""
        mark = variables.setdefault("AIODIST_MARK", uuid.uuid4().hex)
        process = subprocess.Popen(
            [python, "-m", "aiodist", "run", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(**variables),
        )
        self._jobs.append(Job(process, mark))
        return self._jobs[-1]

    def close(self) -> None:
        """End the jobs that still run."""
        for job in self._jobs:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGTERM)
                try:
                    job.process.wait(10)
                except subprocess.TimeoutExpired:
                    job.process.kill()
            if job.process.stdout is not None:
                job.process.stdout.close()
            job.process.wait()
