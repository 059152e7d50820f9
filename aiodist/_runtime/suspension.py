"""What a task is suspended in: its chain of awaits, and the object at the end of it.

A task is inspected when something has failed, and never tracked before. Behind the last frame of the program in its
chain of awaits, the outermost frame of an event loop's library tells what was called (``Lock.acquire``, ``Queue.get``),
and the frame's ``self`` is the lock or the queue. A bare future is classified by its type and by what its callbacks
refer to.

This relies on undocumented details of the libraries: the names of functions and of a few variables, a future's
``_callbacks`` and a gathering future's ``_children``. If a release changes them, the answer is `Awaited.UNKNOWN` or
`Awaited.FUTURE`, with the same chain of places.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from aiodist._core.terms import Location
from aiodist._core.text import place
from aiodist._runtime.handle import CollectiveHandle, posted
from aiodist._runtime.stacks import Link, await_chain, drives_replica, frames_of, function_name, is_plumbing, links


class Awaited(enum.StrEnum):
    """What kind of thing a task waits for."""

    COLLECTIVE = "collective"
    LOCK = "lock"
    CONDITION = "condition"
    SEMAPHORE = "semaphore"
    EVENT = "event"
    QUEUE = "queue"
    TASK = "task"
    FUTURE = "future"
    SLEEP = "sleep"
    THREAD = "thread"
    IO = "io"
    UNKNOWN = "unknown"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, eq=False)
class Suspension:
    """What one task is suspended in."""

    kind: Awaited
    text: str  # ``waits for an asyncio.Lock``, ``waits in all_reduce #3``, ``is about to run``
    things: tuple[Any, ...]  # the collective, the lock, the event, the tasks themselves; empty if unknown
    stack: tuple[Location, ...]  # the program's places in the chain of awaits, innermost last

    @property
    def location(self) -> Location | None:
        """The innermost place of the program."""
        return self.stack[-1] if self.stack else None


_KNOWN = {
    function: (kind, text, variable)
    for kind, text, variable, functions in (
        (Awaited.COLLECTIVE, "in {collective}", "self", "AsyncioHandle.__await__ TrioHandle._wait"),
        (Awaited.LOCK, "for {a thing}", "self", "Lock.acquire LockAdapter.acquire _LockImpl.acquire"),
        (Awaited.SEMAPHORE, "for {a thing}", "self", "Semaphore.acquire SemaphoreAdapter.acquire"),
        (Awaited.SEMAPHORE, "for {a thing}", "self", "CapacityLimiter.acquire CapacityLimiterAdapter.acquire"),
        (Awaited.SEMAPHORE, "for {a thing}", "self", "CapacityLimiter.acquire_on_behalf_of"),
        (Awaited.EVENT, "for {a thing} to be set", "self", "Event.wait EventAdapter.wait"),
        (Awaited.EVENT, "at {a thing}", "self", "Barrier.wait"),
        (Awaited.CONDITION, "for {a thing} to be notified", "self", "Condition.wait"),
        (Awaited.QUEUE, "for an item of {a thing}", "self", "Queue.get MemoryObjectReceiveStream.receive"),
        (Awaited.QUEUE, "for an item of {a thing}", "self", "MemoryReceiveChannel.receive"),
        (Awaited.QUEUE, "for room in {a thing}", "self", "Queue.put MemoryObjectSendStream.send"),
        (Awaited.QUEUE, "for room in {a thing}", "self", "MemorySendChannel.send"),
        (Awaited.QUEUE, "for {a thing} to be worked off", "self", "Queue.join"),
        (Awaited.TASK, "for {tasks}", "fut", "wait_for"),
        (Awaited.TASK, "for {tasks}", "fs", "wait"),
        (Awaited.TASK, "for {tasks}", "self._tasks", "TaskGroup.__aexit__"),
        (Awaited.TASK, "for {tasks}", "self._children", "Nursery._nested_child_finished"),
        (Awaited.SLEEP, "for {library}.sleep({value})", "delay|seconds", "sleep"),
        (Awaited.SLEEP, "forever: sleep_forever()", None, "sleep_forever"),
        (Awaited.THREAD, "for {call} in the device's thread", "fn", "DeviceThreads.run"),
        (Awaited.THREAD, "for {call} in a thread", "func|sync_fn", "to_thread run_sync to_thread_run_sync"),
    )
    for function in functions.split()
}
"""Functions of the libraries in which tasks wait, by qualified name, and the variable that has what they wait for.

In libraries that have functions of the same name, these wait for the same.
"""

_IO = (
    *("asyncio.base_events", "asyncio.selector_events", "asyncio.streams", "asyncio.subprocess", "asyncio.unix_events"),
    *("trio._core._io", "trio._highlevel", "trio._socket", "trio._ssl", "trio._subprocess", "trio._unix_pipes"),
    "uvloop",
)


def suspension_of(awaitable: Any) -> Suspension:
    """Return what a coroutine is suspended in; `coroutine_of` returns a task's coroutine."""
    chain = list(links(awaitable))
    stack = await_chain(awaitable)
    if any(link.running for link in chain):
        return Suspension(Awaited.NOTHING, "runs", (), stack)
    end = chain[-1].awaitable if chain else None
    if isinstance(end, asyncio.Future) and end.done():
        return Suspension(Awaited.NOTHING, "is about to run", (), stack)
    kind, what, things = _in_a_library(chain) or _in_a_future(end)
    return Suspension(kind, f"waits {what}", things, stack)


def current_task() -> Any:
    """Return the running task of asyncio or trio; None if there is none."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return trio.lowlevel.current_task()
    with suppress(RuntimeError):
        return asyncio.current_task()
    return None


def coroutine_of(task: Any) -> Any:
    """Return the coroutine that a task of asyncio or trio runs."""
    return task.get_coro() if hasattr(task, "get_coro") else task.coro


_Found = tuple[Awaited, str, tuple[Any, ...]]


def _in_a_library(chain: list[Link]) -> _Found | None:
    """Recognise the library function that the program has called, and that waits."""
    frames = [link.frame for link in chain if link.frame is not None]
    own = max((index for index, frame in enumerate(frames) if not is_plumbing(frame)), default=-1)
    inner = frames[own + 1 :]
    found = next(_recognised(inner), None)
    if found is not None and found[0] is Awaited.CONDITION:  # once notified, it waits for the lock
        found = next((one for one in _recognised(inner) if one[0] is Awaited.LOCK), found)
    return found


def _recognised(frames: Iterable[FrameType]) -> Iterator[_Found]:
    for frame in frames:
        module = str(frame.f_globals.get("__name__", ""))
        known = _KNOWN.get(frame.f_code.co_qualname)
        if known is not None:
            kind, text, variable = known
            thing = _variable(frame, variable)
            if thing is not None or variable is None:
                text = text.replace("{library}", module.partition(".")[0])
                yield kind, _filled_in(text, thing), _things(kind, thing)
        elif module.startswith(_IO):
            yield Awaited.IO, f"for I/O: {frame.f_code.co_qualname}()", ()


def _variable(frame: FrameType, name: str | None) -> Any:
    if name is None:
        return None
    variable, _, attribute = name.partition(".")
    found = next((frame.f_locals[each] for each in variable.split("|") if each in frame.f_locals), None)
    return getattr(found, attribute, None) if attribute else found


def _things(kind: Awaited, thing: Any) -> tuple[Any, ...]:
    if kind is Awaited.COLLECTIVE:
        return (posted(thing)[0],)
    if kind is not Awaited.TASK:
        return () if kind in (Awaited.SLEEP, Awaited.THREAD) else (thing,)
    tasks = thing if isinstance(thing, (set, frozenset, list, tuple)) else [thing]
    return tuple(task for task in tasks if not (isinstance(task, asyncio.Future) and task.done()))


def _filled_in(text: str, thing: Any) -> str:
    """Return a text of `_KNOWN` with what it says of a thing."""
    fillings: dict[str, Callable[[Any], str]] = {
        "{a thing}": _a_thing,
        "{collective}": _collective,
        "{call}": lambda fn: f"{function_name(fn)}()",
        "{tasks}": lambda thing: _tasks(_things(Awaited.TASK, thing)),
        "{value}": lambda value: f"{value:g}" if isinstance(value, (int, float)) else "…",
    }
    key = next((key for key in fillings if key in text), None)
    return text if key is None else text.replace(key, fillings[key](thing))


def _a_thing(thing: Any) -> str:
    cls = type(thing)
    name = cls.__name__.removesuffix("Adapter")
    library = cls.__module__.partition(".")[0]
    full = f"{library}.{name}" if library in ("asyncio", "anyio", "trio") else name
    return f"{'an' if full[0] in 'aeiouAEIOU' else 'a'} {full}"


def _collective(handle: CollectiveHandle[Any]) -> str:
    slot, member = posted(handle)
    return slot.text_of(member.position)


def _tasks(tasks: tuple[Any, ...]) -> str:
    return task_text(tasks[0]) if len(tasks) == 1 else f"{len(tasks)} tasks"


def task_text(task: Any) -> str:
    """Return what reports call a task: its replica, or the name that it was given, or its function."""
    if not hasattr(task, "get_coro") and not hasattr(task, "coro"):
        return "a future"
    coroutine = coroutine_of(task)
    member = next(filter(None, map(drives_replica, frames_of(coroutine))), None)
    if member is not None:
        return f"replica {member.replica_id}"
    name = str(getattr(task, "name", "") or (task.get_name() if hasattr(task, "get_name") else ""))
    if name and not name.startswith("Task-") and "." not in name:  # given by the program
        return f"the task {name!r}"
    if isinstance(coroutine, CollectiveHandle):
        slot, member = posted(coroutine)
        post = slot.post_of(member.position)
        return f"the task of {post.call.kind} at {place(post.location)}"
    codes = (frame.f_code for frame in frames_of(coroutine) if not is_plumbing(frame))
    code: CodeType = next(codes, None) or getattr(coroutine, "cr_code", None) or coroutine.gi_code
    function = code.co_qualname.rpartition("<locals>.")[2]
    return f"the task of {function}() at {place(Location(code.co_filename, code.co_firstlineno, function))}"


def _in_a_future(end: Any) -> _Found:
    """Classify a future that the program awaits directly."""
    if isinstance(end, asyncio.Task):
        return Awaited.TASK, f"for {task_text(end)}", (end,)
    if not isinstance(end, asyncio.Future):
        return Awaited.UNKNOWN, "for something that cannot be seen from here", ()
    children = getattr(end, "_children", None)
    if children is not None:
        tasks = _things(Awaited.TASK, list(children))
        return Awaited.TASK, f"for {_tasks(tasks)} of gather()", tasks
    for source in _sources(end):
        if isinstance(source, concurrent.futures.Future):
            return Awaited.THREAD, "for an executor", ()
        if isinstance(source, asyncio.Task):
            return Awaited.TASK, f"for {task_text(source)}", (source,)
    return Awaited.FUTURE, "for a future", (end,)


def _sources(future: asyncio.Future[Any]) -> Iterator[Any]:
    """Yield the futures that a future copies or shields, which its callbacks refer to.

    In Python 3.14 a shield also refers to the task that waits in it.
    """
    for callback, *_ in getattr(future, "_callbacks", None) or ():
        for cell in getattr(callback, "__closure__", None) or ():
            source = cell.cell_contents
            waits_here = getattr(source, "_fut_waiter", None) is future
            if isinstance(source, (concurrent.futures.Future, asyncio.Future)) and not waits_here:
                yield source
