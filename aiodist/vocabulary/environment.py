"""Environment variables, all of them: this file alone reads them.

``AIODIST_TRACE``: where to write a trace of every run of the process; see `aiodist.trace`.
"""

from __future__ import annotations

import os
import sys


def trace_path() -> str | None:
    """Return where the trace of the whole process goes; None for no trace."""
    return os.environ.get("AIODIST_TRACE") or None


def fix_hashes(seed: int) -> None:
    """Start this process again with that seed of string hashes, unless ``PYTHONHASHSEED`` is set already.

    The order of a set of strings then is the same whenever the command is run again. Where a process cannot be replaced
    by another (Windows), nothing happens.
    """
    if "PYTHONHASHSEED" not in os.environ and hasattr(os, "fork"):
        os.execve(  # noqa: S606  (the same interpreter with the same arguments)
            sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": str(seed)}
        )
