"""Where demos print."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Tell the caller, instead of ending the process from within a replica."""
        raise BrokenPipeError


def open_console(*, quiet: bool = False) -> Console:
    """Return a console on standard output, which obeys NO_COLOR and prints what it is given as it is.

    Args:
        quiet: it prints nothing, as on all workers but the first.
    """
    return _Console(highlight=False, markup=False, emoji=False, quiet=quiet)
