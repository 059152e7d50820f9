"""Causes: why a task is being cancelled, and which exception it is handling, as far as that can be seen."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from aiodist._core.call import is_of_the_program
from aiodist._core.errors import CollectiveError
from aiodist._core.terms import Location
from aiodist._core.text import place
from aiodist._runtime.stacks import frames_of, is_plumbing, links
from aiodist._runtime.suspension import current_task

_FAILURES = ("_errors", "_exceptions", "_pending_excs")
"""Where the task groups of asyncio and anyio, and trio's nurseries, keep what their tasks have raised."""

_BY_TASK = re.compile(r"(?: by|^cancelled due to explicit.* from task) <Task (?:[^']*name=)?'([^']*)'")
"""What anyio and trio note in a cancellation about the task that cancelled the scope."""


def why_cancelled() -> str:
    """Say why the running task is being cancelled; empty if unknown. Call it while the cancellation passes through."""
    for group in _task_groups():
        failed = next((error for error in _failures_of(group) if isinstance(error, Exception)), None)
        if failed is not None:
            return f"its sibling task failed with {_described(failed)}"
    found = _BY_TASK.search(str(sys.exception()))
    name = found[1].rpartition(".")[2] if found else ""
    task = current_task()
    own = getattr(task, "name", "") or (task.get_name() if hasattr(task, "get_name") else "")
    return f"the task {name!r} cancelled its scope" if name and name != own.rpartition(".")[2] else ""


def _described(error: BaseException) -> str:
    """Return an exception's type, and where in the program it was raised."""
    at, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if is_of_the_program(code.co_filename):
            at = Location(code.co_filename, step.tb_lineno, code.co_name)
        step = step.tb_next
    return type(error).__name__ if at is None else f"{type(error).__name__} at {place(at)}"


def _task_groups() -> Iterator[Any]:
    """Yield the task groups that the running task belongs to or is in, if its frames have variables for them."""
    task = current_task()
    if hasattr(task, "child_nurseries"):
        yield from (*task.child_nurseries, *filter(None, [task.parent_nursery]))
        return
    for callback, _ in getattr(task, "_callbacks", None) or ():
        known = getattr(callback, "__self__", None), *gc.get_referents(*(getattr(callback, "__closure__", None) or ()))
        yield from filter(_is_task_group, known)
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (documented, despite its name)
    while frame is not None:
        if not is_plumbing(frame):
            yield from filter(_is_task_group, list(frame.f_locals.values()))
        frame = frame.f_back


def _is_task_group(thing: Any) -> bool:
    return type(thing).__name__ == "TaskGroup" and type(thing).__module__.startswith(("asyncio", "anyio"))


def _failures_of(group: Any) -> Iterator[Any]:
    for name in _FAILURES:
        yield from getattr(group, name, None) or ()
    parent = getattr(group, "_parent_task", None)  # asyncio's adds what its body has raised when all tasks have ended
    for frame in frames_of(parent.get_coro()) if isinstance(parent, asyncio.Task) else ():
        if frame.f_code.co_qualname == "TaskGroup.__aexit__" and frame.f_locals.get("self") is group:
            yield frame.f_locals.get("exc")


def handled_in(awaitable: Any) -> str:
    """Return the exception that a suspended coroutine is handling, and where it was raised; empty if there is none.

    It is on the stack of a frame that is suspended in an ``except`` or ``finally`` clause, or in a manager's exit.
    """
    for link in reversed(list(links(awaitable))):
        if link.running:
            running = sys.exception()
            while running is not None and not _is_of_the_program(running):
                running = running.__context__
            return "" if running is None else _described(running)
        if link.frame is None or is_plumbing(link.frame):
            continue
        errors = [one for one in gc.get_referents(link.awaitable) if _is_of_the_program(one)]
        variables = Counter(map(id, link.frame.f_locals.values())) if errors else Counter[int]()
        for one in errors:  # one that a variable refers to need not be handled
            if not variables[id(one)]:
                return _described(one)
            variables[id(one)] -= 1
    return ""


def _is_of_the_program(thing: Any) -> bool:
    return isinstance(thing, Exception) and not isinstance(thing, CollectiveError)
