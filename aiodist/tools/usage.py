"""Bad usage of the command line."""

from __future__ import annotations


class UsageError(Exception):
    """The arguments do not go together; the text is for a person."""
