"""Jobs of `aiodist run`, watched from outside: what they print, how they end, and what they leave behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.tools.command import environment

LIMIT_SECONDS = 50


@dataclass
class Job:
    """A job that runs.

    Attributes:
        process: the launcher.
        mark: stands in the environment of all its processes.
        output: what has been read of it so far.
    """

    process: subprocess.Popen[bytes]
    mark: str
    begun: float = field(default_factory=time.monotonic)
    output: str = ""

    def read_until(self, pattern: str, count: int = 1) -> list[tuple[str, ...]]:
        """Read on until a pattern has been found so often; return what it has found."""
        assert self.process.stdout is not None
        while len(found := re.findall(pattern, self.output)) < count:
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise AssertionError(f"no {pattern!r} in {self.output!r}")
            self.output += chunk.decode()
        return found

    def workers(self, count: int) -> list[tuple[int, int]]:
        """Wait until so many workers of `endings` have started; return their agents and processes."""
        return [(int(agent), int(worker)) for worker, agent in self.read_until(r"worker (\d+) of agent (\d+)", count)]

    def end(self, seconds: float = LIMIT_SECONDS) -> tuple[int, float]:
        """Wait for the end; return the exit code, and the seconds that it took from now."""
        begun = time.monotonic()
        assert self.process.stdout is not None
        while True:
            left = max(0.1, begun + seconds - time.monotonic())
            assert select.select([self.process.stdout], [], [], left)[0], f"still running: {self.output!r}"
            assert time.monotonic() < begun + seconds, "still printing"
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                return self.process.wait(left), time.monotonic() - begun
            self.output = (self.output + chunk.decode(errors="replace"))[-1_000_000:]

    def left(self) -> list[str]:
        """List the processes of the job that still live; a moment is allowed for what was killed to go."""
        until = time.monotonic() + 2
        while (found := _marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.01)
        return found


def _marked(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in environ and state not in {"Z", "X"}:
                found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
        except OSError:
            continue
    return found


class Jobs:
    """Starts jobs, and ends each by its own process."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def start(self, arguments: Sequence[str], *, before: Sequence[str] = (), **variables: str) -> Job:
        """Start `aiodist run` with these arguments; `before` stands before the command."""
        mark = variables.setdefault("AIODIST_MARK", uuid.uuid4().hex)
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "aiodist", "run", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(**variables),
        )
        self._jobs.append(Job(process, mark))
        return self._jobs[-1]

    def close(self) -> None:
        """End what still runs."""
        for job in self._jobs:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGTERM)
                try:
                    job.process.wait(10)
                except subprocess.TimeoutExpired:
                    job.process.kill()
            assert job.process.stdout is not None
            job.process.stdout.close()
            job.process.wait()
