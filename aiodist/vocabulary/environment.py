"""Environment variables, all of them: this file alone reads them.

``AIODIST_TRACE``: where to write a trace of every run of the process; see `aiodist.trace`.
"""

from __future__ import annotations

import os


def trace_path() -> str | None:
    """Return where the trace of the whole process goes; None for no trace."""
    return os.environ.get("AIODIST_TRACE") or None
