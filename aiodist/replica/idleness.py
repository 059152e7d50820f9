"""Idleness: whether the program of an event loop may go on by anything but steps between workers.

It goes on by what is ready to run, by timers, files, signals and other threads. Where there are none but those by which
aiodist asks engines about steps in the air, nothing of the program runs before one of these steps is complete. That is
looked up in attributes of the event loops that are no part of their documents; where a loop has others, as uvloop's
has, keeps elsewhere what is to run, or waits in what runs something else meanwhile, anything might.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from aiodist.replica.awaiting import napping
from aiodist.replica.certainty import trio_tasks
from aiodist.replica.engine import running_on_trio
from aiodist.replica.home_loop import HomeLoop
from aiodist.replica.stall import TASK_NAME, StallWatch
from aiodist.replica.waiter import Waiter, look_at
from aiodist.vocabulary.threads import busy_threads
from aiodist.vocabulary.waits import Awaited

if TYPE_CHECKING:
    from aiodist.replica.waits import WaitGraph

_GLANCE: Final = 0.0002
_CONTROL_PLANE: Final = "aiodist control"
_ENDINGS: Final = (signal.SIGINT, signal.SIGTERM)
_SCHEDULING: Final = ("call_soon", "call_soon_threadsafe", "call_later", "call_at", "_run_once")
_LIBRARIES: Final = ("asyncio", "anyio", "trio", "uvloop")
_OPERATIONS: Final = ("aiodist.strategy", "aiodist.replica")
_STEPS: Final = ("aiodist.replica.awaiting", "aiodist.replica.lasting_event")


def runs_here() -> bool:
    """Whether an event loop runs in this thread."""
    if running_on_trio():
        return True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def something_can_run(look: Callable[[], WaitGraph]) -> bool:
    """Whether the program of this loop may go on by anything but steps between workers; looks at its tasks last."""
    if _on_trio() if running_on_trio() else _on_asyncio(asyncio.get_running_loop()):
        return True
    if _from_outside():
        return True
    graph = look()
    return not all(_waits_for_a_step(graph, waiter) for waiter in graph.waiters)


def _waits_for_a_step(graph: WaitGraph, waiter: Waiter) -> bool:
    """Whether a task waits in a collective, for another, or in what all workers do: a future may be any library's."""
    kind = waiter.suspension.kind
    if kind is Awaited.COLLECTIVE:
        return True
    if kind is Awaited.TASK:  # of several, one may be a future, or a task of a library's
        known = {id(ender.task) for ender in graph.enders(waiter)}
        things = waiter.suspension.things
        return bool(things) and all(id(thing) in known or _is_an_operation(graph, thing) for thing in things)
    return is_in_a_step(waiter)


def _is_an_operation(graph: WaitGraph, thing: Any) -> bool:
    """Whether this is a task that runs something of a strategy's and nothing of the program's, and waits for a step."""
    if not (hasattr(thing, "get_coro") or hasattr(thing, "coro")):
        return False
    waiter = look_at(thing)
    modules = [link.frame.f_globals.get("__name__", "") for link in waiter.chain if link.frame is not None]
    return any(name.startswith(_OPERATIONS) for name in modules) and _waits_for_a_step(graph, waiter)


def is_in_a_step(waiter: Waiter) -> bool:
    """Whether a task waits in a step between workers, or for its turn at one."""
    frames = [link.frame for link in waiter.chain if link.frame is not None]
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    return next((name for name in reversed(modules) if name.partition(".")[0] not in _LIBRARIES), "") in _STEPS


def _from_outside() -> bool:
    """Whether a signal of the program's, or a thread, may let it go on."""
    if any(callable(signal.getsignal(number)) for number in signal.valid_signals() if number not in _ENDINGS):
        return True
    return any(thread.name != _CONTROL_PLANE for thread in busy_threads(pause=_GLANCE))


def _on_asyncio(loop: Any) -> bool:
    if any(getattr(type(loop), name, None) is not getattr(asyncio.BaseEventLoop, name) for name in _SCHEDULING):
        return True  # it may be driven by a library of windows, say, which has queues of its own
    try:
        if type(loop._selector).__module__ != "selectors":
            return True  # as the one by which an interactive shell lets windows run
        ready = [handle for handle in loop._ready if not _is_ours(handle)]
        timers = [timer for timer in loop._scheduled if not timer.cancelled() and not _is_ours(timer)]
        files = set(loop._selector.get_map()) - napping - {loop._ssock.fileno()}
        return bool(ready or timers or files)
    except AttributeError:
        return True


def _is_ours(handle: Any) -> bool:
    """Whether a callback brings nothing of the program about: a look for stalls, or a call from another thread."""
    owner, name = getattr(handle._callback, "__self__", None), getattr(handle._callback, "__name__", "")
    return isinstance(owner, (StallWatch, HomeLoop)) or name == "_read_from_self"


def _on_trio() -> bool:
    from trio import lowlevel
    from trio._core._run import GLOBAL_RUN_CONTEXT

    try:
        known = lowlevel.current_statistics()
        runner = GLOBAL_RUN_CONTEXT.runner
        if runner.is_guest:
            return True  # of another loop's
        deadlines = runner.deadlines._active
        files = known.io_statistics.tasks_waiting_read + known.io_statistics.tasks_waiting_write
        tasks = trio_tasks()
        here = lowlevel.current_task()
        runnable = [task for task in tasks if task is not here and task._abort_func is None]
    except AttributeError:
        return True
    looking = sum(task.name == TASK_NAME for task in tasks)
    return bool(known.run_sync_soon_queue_size or runnable or deadlines > looking or files > len(napping))
