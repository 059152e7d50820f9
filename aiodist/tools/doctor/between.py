"""What happens between workers: a short job of `aiodist run`, whose first worker prints what it has measured."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Final

from aiodist.tools.doctor import probe
from aiodist.tools.doctor.findings import Finding, Section
from aiodist.tools.doctor.workers import usable_cores

_JOB_SECONDS: Final = 60
_ENDING_SECONDS: Final = 15
_SLOW_MICROSECONDS: Final = 1000


def between(arguments: Namespace) -> Section:
    """Measure between workers."""
    given = {"--hosts": ",".join(arguments.hosts), "--engine": arguments.engine, "--launcher": arguments.launcher}
    options = [word for name, value in given.items() if value for word in (name, value)]
    run = [sys.executable, "-m", "aiodist", "run", "-n", str(arguments.workers), *options, probe.__file__]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:  # noqa: S603
        try:
            output, _ = job.communicate(timeout=_JOB_SECONDS)
        except subprocess.TimeoutExpired:
            job.terminate()
            output, _ = job.communicate(timeout=_ENDING_SECONDS)
            output = f"Error: it has not ended within {_JOB_SECONDS} s\n{output}"
    lines = output.splitlines()
    figures = [line.removeprefix(probe.MARK) for line in lines if line.startswith(probe.MARK)]
    if job.returncode or not figures:
        return Section("between workers", [_failed(lines)])
    return Section("between workers", _findings(arguments.workers, json.loads(figures[0])))


def _failed(lines: Sequence[str]) -> Finding:
    """Tell why a job has failed: by its first line that speaks of an error, or its first."""
    told = [line.strip() for line in lines if "rror" in line] or [*lines, "no output"]
    remedy = "start the doctor's program by itself, `aiodist run -n N " + probe.__file__ + "`, and read on"
    return Finding("job", f"failed: {told[0]}", remedy, needed=True)


def _findings(workers: int, measured: dict[str, Any]) -> list[Finding]:
    machines = len(measured["hosts"])
    here = -(-workers // machines)
    crowded = f"{here} workers share {usable_cores()} cores: fewer are faster" if here > usable_cores() else None
    least = measured["microseconds"]
    slow = "more than expected within one machine" if machines == 1 and least > _SLOW_MICROSECONDS else None
    return [
        Finding("workers", f"{workers} on {_counted(machines, 'machine')}, over {measured['engine']}", crowded),
        Finding("all_reduce of 4 bytes", f"{least:.0f} µs", slow and f"{slow}: are its cores busy?"),
        Finding("all_reduce of 8 MiB", f"{measured['gigabytes']:.2f} GB/s"),
    ]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
