"""Where a replica is: the chain of awaits of its coroutine, and the callers of a call.

A task's own stack shows a single frame; the coroutine that each frame awaits leads to the next. If Python has no
attribute for that (the iterator of a future, a step of an async generator, the result of a coroutine's
``__await__``), the garbage collector tells what an object refers to.
"""

from __future__ import annotations

import gc
import sys
from asyncio import Handle
from collections.abc import Callable, Iterator
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple, TypeVar

from aiodist._core.call import is_of_the_program, place
from aiodist._core.ledger import Member, Path
from aiodist._core.terms import Location

_ENDS = frozenset(
    {
        "aiodist._runtime.tasks",
        "asyncio.events",
        "asyncio.base_events",
        "asyncio.runners",
        "trio._core._run",
        "uvloop.loop",
    }
)
_MOST_FRAMES = 32
_WITH_FRAMES = (CoroutineType, GeneratorType, AsyncGeneratorType)
_OPAQUE = ("FutureIter", "coroutine_wrapper", "anext_awaitable", "async_generator_asend", "async_generator_athrow")


class Link(NamedTuple):
    """One link of a chain of awaits."""

    awaitable: Any  # a coroutine, a generator, an async generator; at the end of the chain anything
    frame: FrameType | None
    running: bool  # at this moment, so it awaits nothing


def links(awaitable: Any) -> Iterator[Link]:
    """Follow a chain of awaits from its outermost link to its end."""
    while awaitable is not None:
        if hasattr(awaitable, "cr_frame"):  # a coroutine, or a handle, which runs as one
            frame, running, inner = awaitable.cr_frame, awaitable.cr_running, awaited_by(awaitable)
        elif isinstance(awaitable, GeneratorType):
            frame, running = awaitable.gi_frame, awaitable.gi_running
            inner = None if running else awaitable.gi_yieldfrom
        elif isinstance(awaitable, AsyncGeneratorType):
            if sys.version_info >= (3, 12):
                suspended = awaitable.ag_suspended
            else:
                suspended = awaitable.ag_await is not None
            running = awaitable.ag_running and not suspended  # `ag_running` is also true while it awaits
            frame, inner = awaitable.ag_frame, None if running else awaitable.ag_await
        else:
            frame, running, inner = None, False, _behind(awaitable)
        yield Link(awaitable, frame, running)
        awaitable = inner


def await_chain(awaitable: Any) -> tuple[Location, ...]:
    """Return the places where a coroutine is suspended, or runs now, innermost last."""
    return tuple(place_of(frame) for frame in frames_of(awaitable) if not is_plumbing(frame))


def frames_of(awaitable: Any) -> list[FrameType]:
    """Return the frames of a chain of awaits, innermost last, and the running frames that these have called."""
    frames: list[FrameType] = []
    for link in links(awaitable):
        if link.frame is not None:
            frames.append(link.frame)
            if link.running:
                frames += _running_above(link.frame)
    return frames


def awaited_by(coroutine: Any) -> Any:
    """Return what a coroutine awaits; None while it runs.

    Python 3.12 must not be asked what a running one awaits: it may mistake a counter between the instructions for an
    instruction, and return an address that is not an object's.
    """
    return None if coroutine.cr_running else coroutine.cr_await


def _behind(awaitable: Any) -> Any:
    """Return the object with frames, or the future, behind an opaque iterator or wrapper."""
    if type(awaitable).__name__ not in _OPAQUE:
        return None
    found = [one for one in gc.get_referents(awaitable) if isinstance(one, _WITH_FRAMES) or hasattr(one, "get_loop")]
    return found[0] if len(found) == 1 else None


def _running_above(frame: FrameType) -> list[FrameType]:
    """Return the running frames that ``frame`` has called, outermost first."""
    above: list[FrameType] = []
    caller: FrameType | None = sys._getframe()  # noqa: SLF001  (documented, despite its name)
    while caller is not None and caller is not frame:
        above.append(caller)
        caller = caller.f_back
    return above[::-1] if caller is frame else []


def can_read_other_threads() -> bool:
    """Return whether another thread's frames may be read; without the interpreter lock, Python may crash."""
    has_lock: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13 on
    return has_lock is None or has_lock()


def is_plumbing(frame: FrameType) -> bool:
    """Return whether a frame belongs to an event loop or to aiodist; reports leave these out."""
    return not is_of_the_program(frame.f_code.co_filename)


def place_of(frame: FrameType) -> Location:
    """Return where a frame is."""
    return place(frame.f_code, frame.f_lasti).location


def function_name(fn: Any) -> str:
    """Return the name of a function, or of a callable object's type, without the functions around it."""
    while isinstance(fn, partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2])


def program_frame(frame: FrameType) -> FrameType | None:
    """Return the program's first frame from ``frame`` outward; None if an event loop made the call."""
    caller: FrameType | None = frame
    while caller is not None and is_plumbing(caller):
        module, function = caller.f_globals.get("__name__", ""), caller.f_code.co_name
        if module in _ENDS and (function == "unrolled_run" or not module.startswith("trio.")):
            return None
        caller = caller.f_back
    return caller


Fn = TypeVar("Fn", bound=Callable[..., Any])

_drivers = {id(Handle._run.__code__)}  # noqa: SLF001  (it is there as long as asyncio is)


def drives_tasks(fn: Fn) -> Fn:
    """Mark a function that runs tasks, so that it does not count as a caller of what they call."""
    _drivers.add(id(fn.__code__))
    return fn


def drives_replica(frame: FrameType | None) -> Member | None:
    """Return the replica whose function is driven in this frame."""
    if frame is None or frame.f_code.co_qualname != "_Replicas._drive":
        return None
    member: Member | None = frame.f_locals.get("member")
    return member


def nearest_callers(frame: FrameType) -> Path:
    """Return the two nearest callers of a frame, at most up to the replica's function or to where its task begins."""
    caller = frame.f_back
    if caller is None or id(caller.f_code) in _drivers:
        return ()
    further = caller.f_back
    if further is None or id(further.f_code) in _drivers:
        return caller.f_code, caller.f_lasti
    return caller.f_code, caller.f_lasti, further.f_code, further.f_lasti


def all_callers(frame: FrameType) -> Path:
    """Return all callers of a frame up to the replica's function, or to where its task begins, as far as they count."""
    path: list[Any] = []
    caller = frame.f_back
    while caller is not None:
        if caller.f_globals.get("__name__", "") in _ENDS:
            break
        if not is_plumbing(caller):
            path += caller.f_code, caller.f_lasti
        caller = caller.f_back
    return tuple(path)


def lines_here() -> tuple[tuple[str, int], ...]:
    """Return the files and lines of the running frames, innermost first, without those of event loops and aiodist."""
    lines: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (documented, despite its name)
    while frame is not None and len(lines) < _MOST_FRAMES:
        if not is_plumbing(frame):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)
