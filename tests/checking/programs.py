"""Running a program once on a controlled loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from aiodist._checking.explore import Result, run
from aiodist._checking.schedule import Change, replayed

Main = Callable[[], Coroutine[Any, Any, Any]]


def result(main: Main, *changes: tuple[int, int], seconds: float = 20) -> Result:
    """Run a main coroutine function once, in the default order except for the changes."""
    return run(main, replayed(Change(*change) for change in changes), seed=0, seconds=seconds)


def value(main: Main, *changes: tuple[int, int]) -> Any:
    """Return what a main coroutine function returns."""
    found = result(main, *changes)
    if found.error is not None:
        raise found.error
    return found.value
