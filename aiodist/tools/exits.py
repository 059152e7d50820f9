"""How the command line ends."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    RAISED = 3
    INTERRUPTED = 130  # 128 + SIGINT, as shells have it
    BROKEN_PIPE = 141  # 128 + SIGPIPE
