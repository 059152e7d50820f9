"""Ids, counts and places as a person reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from aiodist._core.report import Location

_MOST_RUNS = 4


def ids(replicas: Iterable[int], noun: str = "replica") -> str:
    """Return ids as text: ``replica 2``, ``replicas 0 and 1``, ``replicas 0-5, 7 and 9-12``; or of another noun."""
    runs = _runs(sorted(replicas))
    parts = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]
    parts = [part for run in parts for part in run.split(", ")]
    if len(parts) == 1 and "-" not in parts[0]:
        return f"{noun} {parts[0]}"
    head = ", ".join(parts[:-1])
    return f"{noun}s {head} and {parts[-1]}" if head else f"{noun}s {parts[-1]}"


def ids_briefly(replicas: Iterable[int], most_runs: int = _MOST_RUNS) -> str:
    """Return ids as text that stays short whatever they are: ``replicas 0, 2 and 4 …``."""
    members = sorted(replicas)
    if len(_runs(members)) <= most_runs:
        return ids(members)
    return f"{ids(members[:3])} …"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def count(number: int, noun: str) -> str:
    """Return a number of things: ``1 call``, ``2 calls``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(location: Location) -> str:
    """Return a location as text, its file relative to the working directory where it lies below it."""
    return f"{place(location)} in {location.function}" if location.file else ""


def place(location: Location) -> str:
    """Return a location's file and line as text; one without a file is of a program that nobody could look at."""
    return f"{shown_file(location.file)}:{location.line}" if location.file else "an unknown line"


def shown_file(file: str) -> str:
    """Return a file's name, relative to the working directory where it lies below it."""
    from pathlib import Path  # nothing else of what every program imports needs it

    here = f"{Path.cwd()}{os.sep}"
    return file.removeprefix(here)
