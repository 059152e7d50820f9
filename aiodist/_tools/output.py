"""The console that commands print on, and the style of their tables and reports."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raise an error instead of ending the process, perhaps from within a replica."""
        raise BrokenPipeError(errno.EPIPE, "the output has no reader")


def open_console(*, quiet: bool = False) -> Console:
    """Return a console on standard output that prints text unchanged; a quiet one prints nothing.

    Rich decides on colour by NO_COLOR, FORCE_COLOR and TERM. Output to a pipe may have long lines; so do tables on a
    narrow terminal, where rich would cut numbers off.
    """
    console = _Console(highlight=False, markup=False, emoji=False, quiet=quiet)
    console.width = max(console.width, 80) if console.is_terminal else 200
    return console


def print_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], more: int = 0, *, title: str = ""
) -> None:
    """Print a table if it has rows, with numbers aligned on the right. `more` is the number of rows left out."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for heading, cells in zip(headings, zip(*rows, strict=True), strict=True):
        numbers = all(cell[:1].isdigit() or not cell for cell in cells)
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)
    if more:
        console.print(f"… and {more} more")


def print_report(console: Console, text: str) -> None:
    """Print the report on an error, with the first line and the suspects in red."""
    for number, line in enumerate(text.splitlines()):
        style = "bold red" if number == 0 else "red" if line.startswith(">") else ""
        console.print(Text(line, style), soft_wrap=True)
