"""Where a replica is: the chain of awaits of its coroutine, from its function to the innermost one.

A task's own stack shows a single frame; the coroutine that each frame awaits has to be followed. Frames of event loops
and of aiodist's plumbing are left out, as a traceback for a person leaves them out.
"""

from __future__ import annotations

import sys
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

from aiodist.vocabulary.reports import Location

_PLUMBING = ("aiodist.collective", "aiodist.replica", "aiodist.strategy", "asyncio.", "trio.", "anyio.")


def await_chain(awaitable: Any) -> tuple[Location, ...]:
    """Return the places where a coroutine is suspended, or runs now, innermost last."""
    frames: list[FrameType] = []
    while awaitable is not None:
        frame, running, awaitable = _look_into(awaitable)
        if frame is None:
            break
        frames.append(frame)
        if running:
            frames += _running_above(frame)
            break
    return tuple(_location(frame) for frame in frames if not is_plumbing(frame))


def _look_into(awaitable: Any) -> tuple[FrameType | None, bool, Any]:
    """Return the frame of an awaitable, whether it runs at this moment, and what it awaits."""
    if isinstance(awaitable, CoroutineType):
        return awaitable.cr_frame, awaitable.cr_running, awaitable.cr_await
    if isinstance(awaitable, GeneratorType):
        return awaitable.gi_frame, awaitable.gi_running, awaitable.gi_yieldfrom
    if isinstance(awaitable, AsyncGeneratorType):
        return awaitable.ag_frame, awaitable.ag_running, awaitable.ag_await
    return None, False, None


def _running_above(frame: FrameType) -> list[FrameType]:
    """Return the frames that ``frame`` has called and that run now, outermost first."""
    above: list[FrameType] = []
    caller: FrameType | None = sys._getframe()
    while caller is not None and caller is not frame:
        above.append(caller)
        caller = caller.f_back
    return above[::-1] if caller is frame else []


def is_plumbing(frame: FrameType) -> bool:
    """Whether a frame is an event loop's or aiodist's own, which a traceback for a person leaves out."""
    return str(frame.f_globals.get("__name__", "")).startswith(_PLUMBING)


def _location(frame: FrameType) -> Location:
    code = frame.f_code
    return Location(code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name)
