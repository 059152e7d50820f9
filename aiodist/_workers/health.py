"""Whether a silent worker's process is stopped, as far as it can be told from here.

It may be at a long call that holds the interpreter lock, which is no fault. On this machine the system knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aiodist._arrays import environment
from aiodist._workers.hello import Hello, this_machine

SUSPICIOUS_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 60.0


def trouble(hello: Hello, silent: float) -> str | None:
    """Return why a worker counts as stopped that has been silent for so many seconds; None if it does not."""
    allowed = environment.lost_seconds() or 0.0
    if silent < max(SUSPICIOUS_SECONDS, allowed):
        return None
    if hello.machine == this_machine():
        return "is stopped: the system has halted its process" if _is_stopped(hello.pid) else None
    if silent > max(SILENT_SECONDS, allowed):
        return f"has been silent for {silent:.0f} s, though its system answers: it is stopped"
    return None


def _is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, as by SIGSTOP or a debugger."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in {"T", "t"}
