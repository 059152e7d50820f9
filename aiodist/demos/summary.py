"""What a demo prints: labelled lines, the weights of every replica side by side, where the time went."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from aiodist.demos.digest import weights_digest
from aiodist.demos.timing import Account
from aiodist.demos.training import Trained


def count(number: int, noun: str) -> str:
    """Return ``1 replica``, ``4 replicas``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tell(console: Console, label: str, text: str) -> None:
    """Print a labelled line."""
    console.print(Text.assemble((f"{label:<11}", "bold"), text), soft_wrap=True)


def tell_weights(console: Console, trained: Sequence[Trained]) -> bool:
    """Print the digest of every replica's weights, and return whether all are equal."""
    digests = [weights_digest(one.weights) for one in trained]
    for replica, (one, digest) in enumerate(zip(trained, digests, strict=True)):
        tell(console, "weights" if replica == 0 else "", f"{digest}  replica {replica}  {one.device}")
    equal = len(set(digests)) == 1
    tell(console, "", "equal in every bit" if equal else "DIFFERENT: replicas did not make the same updates")
    return equal


def tell_time(console: Console, seconds: float, times: Account) -> None:
    """Print where the time of an average replica went."""
    parts = f"computing {times.computing:.1f}, reducing {times.reducing:.1f}, waiting {times.waiting:.1f}"
    tell(console, "time", f"{seconds:.1f} s; an average replica: {parts}")


def tell_sample(console: Console, label: str, text: str) -> None:
    """Print a text of several lines, indented, its longest lines broken."""
    console.print(label, style="bold")
    for line in text.rstrip().splitlines():
        console.print(textwrap.fill(line, 78, initial_indent="  ", subsequent_indent="  "), soft_wrap=True)


def tell_table(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """Print a table, its columns set to the right; the first row names them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        line = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        console.print(line, style=None if number else "bold", soft_wrap=True)
