"""Jobs of real workers, started by `aiodist run`, each with a wall-clock limit."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tests.tools.jobs import Jobs

JOB = Path(__file__).with_name("job.py")


def job(workers: int, *arguments: str) -> tuple[int, str]:
    """Run the program; return its exit code, and what it printed. It leaves no process."""
    with closing(Jobs()) as jobs:
        started = jobs.start(["-n", str(workers), str(JOB), *arguments])
        return started.end(), started.output
