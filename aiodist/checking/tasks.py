"""Tasks: which replica's function a task runs."""

from __future__ import annotations

from inspect import CORO_CREATED, getcoroutinestate
from typing import TYPE_CHECKING, Any

from aiodist._runtime.scheduler import DRIVE, Run
from aiodist._runtime.stacks import awaited_by

if TYPE_CHECKING:
    from asyncio import Task

    from aiodist._core.ledger import Member


def member_of(task: Task[Any]) -> Member | None:
    """Return the replica whose function a task runs; None for another task."""
    awaitable: Any = task.get_coro()
    while (frame := getattr(awaitable, "cr_frame", None)) is not None:
        if frame.f_code is DRIVE:
            member: Member = frame.f_locals["member"]
            return member
        awaitable = awaited_by(awaitable) or _not_begun(awaitable)
    return None


def run_of(task: Task[Any]) -> Run | None:
    """Return the run whose replica a task drives; None for another task."""
    awaitable: Any = task.get_coro()
    while (frame := getattr(awaitable, "cr_frame", None)) is not None:
        if frame.f_code is DRIVE:
            run: Run | None = frame.f_locals.get("run")
            return run
        awaitable = awaited_by(awaitable) or _not_begun(awaitable)
    return None


def _not_begun(wrapper: Any) -> Any:
    """Return the coroutine that anyio's wrapper of a task is going to await, before the task has begun."""
    if getcoroutinestate(wrapper) != CORO_CREATED:
        return None
    return getattr(wrapper.cr_frame.f_locals.get("self"), "_coro", None)
