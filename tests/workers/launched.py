"""Jobs of real workers, started by `aiodist run`, each with a wall-clock limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.tools.command import environment

JOB = Path(__file__).with_name("job.py")
LIMIT_SECONDS = 50


def job(workers: int, *arguments: str, engine: str = "mpi", program: Path = JOB) -> tuple[int, str, float]:
    """Run a program; return its exit code, what it printed, and its seconds."""
    begun = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "aiodist", "run", "-n", str(workers), "--engine", engine, str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            raise
    return process.returncode, output, time.monotonic() - begun


def workers_left(program: Path = JOB) -> list[str]:
    """List the processes of the job that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline") if sys.platform == "linux" else ():
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(program) in line and str(os.getpid()) not in entry.parts:
            found.append(line)
    return found
