"""How a demo can end without a result; nothing heavy is imported for it."""

from __future__ import annotations


class InterruptedRun(Exception):  # noqa: N818 - no error: a person asked for it
    """Ctrl-C came in the middle of a run; the text says at which step."""
