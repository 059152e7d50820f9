"""Tasks: which replica's function a task runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodist.replica.scheduler import _Run

if TYPE_CHECKING:
    from asyncio import Task

    from aiodist.collective.member import Member

_DRIVE = _Run._drive.__code__


def member_of(task: Task[Any]) -> Member | None:
    """Return the replica whose function a task runs; None for another task."""
    awaitable: Any = task.get_coro()
    while (frame := getattr(awaitable, "cr_frame", None)) is not None:
        if frame.f_code is _DRIVE:
            member: Member = frame.f_locals["member"]
            return member
        awaitable = awaitable.cr_await or _not_begun(frame)
    return None


def _not_begun(frame: Any) -> Any:
    """Return the coroutine that anyio's wrapper of a task is going to await, before the task has begun."""
    return getattr(frame.f_locals.get("self"), "_coro", None) if frame.f_lasti <= 0 else None
