"""Ids, counts, times, sizes and places as text."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TypeVar

from aiodist._core.terms import Location
from aiodist._core.wire import runs

K = TypeVar("K")
T = TypeVar("T")

WIDTH = 100
"""How many columns a report has, but for the name of the error that Python puts in front of it."""

MOST_LINES = 40
_MOST_RUNS = 4
_LONGEST_WORD = 60
_PLACE = re.compile(r":\d+\W*$")

_noun = ContextVar("noun", default="replica")


@contextmanager
def replicas_called(noun: str) -> Iterator[None]:
    """Call replicas something else, such as ``rank``, in the texts that are made inside the block."""
    token = _noun.set(noun)
    try:
        yield
    finally:
        _noun.reset(token)


def noun() -> str:
    """Return what a replica is called."""
    return _noun.get()


def ids(replicas: Iterable[int]) -> str:
    """Return ids as text: ``replica 2``, ``replicas 0 and 1``, ``replicas 0-5, 7 and 9-12``."""
    parts: list[str] = []
    for first, length in runs(sorted(replicas)):
        last = first + length - 1
        parts += [f"{first}-{last}"] if length > 2 else map(str, range(first, last + 1))
    if len(parts) == 1 and "-" not in parts[0]:
        return f"{noun()} {parts[0]}"
    head = ", ".join(parts[:-1])
    return f"{noun()}s {head} and {parts[-1]}" if head else f"{noun()}s {parts[-1]}"


def ids_briefly(replicas: Iterable[int], most_runs: int = _MOST_RUNS) -> str:
    """Return ids as text that is always short: ``replicas 0, 2 and 4 …``."""
    members = sorted(replicas)
    return ids(members) if len(runs(members)) <= most_runs else f"{ids(members[:3])} …"


_PLURALS = {"is": "are", "was": "were", "has": "have", "does": "do", "goes": "go"}


def conjugated(phrase: str, number: int) -> str:
    """Return a phrase whose verb, its first word, agrees with a number: ``waits for 0``, ``wait for 0``."""
    verb, space, rest = phrase.partition(" ")
    return phrase if number == 1 else f"{_PLURALS.get(verb, verb.removesuffix('s'))}{space}{rest}"


def clause(replicas: Collection[int], phrase: str, most_runs: int = _MOST_RUNS) -> str:
    """Return ids with a phrase that agrees: ``replica 2 waits``, ``replicas 0 and 1 wait``."""
    return f"{ids_briefly(replicas, most_runs)} {conjugated(phrase, len(replicas))}"


def group_label(members: tuple[int, ...], name: str | None, number: int, made_at: Location | None) -> str | None:
    """Return what reports call a group; None for the run's own group, which they do not mention."""
    if number < 0:
        return None
    if name is not None:
        return f"group {shortened(repr(name), 40)} of {_members(members, noun())}"
    return f"the group of {_members(members, noun())}{'' if made_at is None else f' made at {place(made_at)}'}"


@lru_cache(maxsize=64)  # the members of a large group are shown once for each of them
def _members(members: tuple[int, ...], _noun: str) -> str:
    return ids_briefly(members)


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the second items of pairs, mostly the ids of replicas, by the first."""
    found: dict[K, list[T]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found


def error_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, if it has one."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")


def capitalised(text: str) -> str:
    """Return a text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def count(number: int, noun: str) -> str:
    """Return a number of things: ``1 call``, ``2 calls``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Return a time with three digits: ``1.23 s``, ``45.6 ms``, ``7.89 µs``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale * 0.9995:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def size(nbytes: float) -> str:
    """Return a number of bytes with three digits: ``48 B``, ``1.50 KiB``, ``3.00 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{_three_digits(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(max(value, 1))))}f}"


def full_place(location: Location) -> str:
    """Return a location as text: its place, and the function that it is in."""
    return f"{place(location)} in {shortened(location.function, 40)}" if location.file else place(location)


def place(location: Location) -> str:
    """Return a location's file and line as text; a location without a file is unknown."""
    return f"{shown_file(location.file)}:{location.line}" if location.file else "an unknown line"


def shown_file(file: str) -> str:
    """Return a file's name, relative to the working directory or to site-packages, or a notebook cell's number."""
    if _CELL.search(file) is not None:
        return _cell_number(file) or file
    here = f"{os.getcwd()}{os.sep}"  # noqa: PTH109  (quick enough for thousands of replicas)
    if file.startswith(here) and f"{os.sep}site-packages{os.sep}" not in file:
        return file.removeprefix(here)
    return file.rpartition(f"{os.sep}site-packages{os.sep}")[2]


_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input-(\d+)-")


def _cell_number(file: str) -> str | None:
    """Return IPython's name of a cell, from the file name of its code; None if that is not known."""
    numbered = _CELL.search(file)
    if numbered is not None and numbered[1] is not None:
        return f"Cell In[{numbered[1]}]"
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"Cell In[{numbers[file]}]" if file in numbers else None


# Lines that fit.


def cut(text: str, width: int) -> str:
    """Return a text, with its end left out if it is longer than ``width``."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def shortened(text: str, width: int) -> str:
    """Return a text, with its middle left out if it is longer than ``width``."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def fitted(lines: Iterable[str]) -> list[str]:
    """Return lines wrapped to the width of a report. Places are never shortened."""
    from textwrap import wrap

    found: list[str] = []
    for line in (part for whole in lines for part in whole.split("\n")):
        if len(line) <= WIDTH:
            found.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip("> ")))
        words = " ".join(word if _PLACE.search(word) else shortened(word, _LONGEST_WORD) for word in line.split(" "))
        found += wrap(
            words,
            WIDTH,
            subsequent_indent=f"{indent}    " if indent else "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return found


def on_a_screen(lines: Iterable[str], advice: Sequence[str] = ()) -> str:
    """Return lines, followed by advice, as a text of at most `MOST_LINES` lines."""
    found = fitted(lines)
    most = MOST_LINES - len(advice)
    if len(found) > most:
        found = [*found[: most - 1], f"… and {count(len(found) - most + 1, 'line')} more"]
    return "\n".join([*found, *advice])
