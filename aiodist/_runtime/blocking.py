"""The warning about a replica that holds up its event loop: another thread samples what the loop's thread does.

As long as every sample finds the same step of one task, nothing else runs in the loop. The machine may be busy, so only
some of the time counts: that in which the loop's thread has used the processor, or has stayed at one instruction
without using it, because it waits for something. There is no warning where a thread's processor time cannot be read
(macOS, Windows), nor without the interpreter lock, because the loop's thread would run while its frames are read.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Sized
from contextlib import suppress
from traceback import walk_stack
from types import FrameType
from typing import Any
from weakref import ref

from aiodist._core.terms import Location
from aiodist._core.text import place
from aiodist._runtime.stacks import can_read_other_threads, is_plumbing, place_of
from aiodist._runtime.threads import lock_for

_LIMIT_SECONDS = 1.0
_PAUSE_SECONDS = 0.25
_IDLE_SHARE = 0.02
_DEBUGGERS = ("bdb", "pdb", "pydevd")
_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"


class BlockedLoop:
    """What the watching thread knows about one event loop: which step of a task runs in it, and for how long.

    Args:
        loop: returns the asyncio loop that runs in this thread; None on trio.
        report: reports a replica that holds up the loop, with the text and the line; called in the watching thread.
        clock: returns the time in seconds.
        computed: returns the processor time that a thread has used, in seconds.
    """

    def __init__(
        self,
        loop: Callable[[], asyncio.AbstractEventLoop | None],
        report: Callable[[str, Location], object],
        clock: Callable[[], float] = time.monotonic,
        computed: Callable[[int], float] | None = None,
    ) -> None:
        self._loop = loop
        self._report = report
        self._clock = clock
        self._computed = computed or (lambda thread: time.clock_gettime(time.pthread_getcpuclockid(thread)))
        self._thread = threading.get_ident()
        self._before: tuple[object, tuple[int, int], float, float] = (None, (0, 0), 0.0, 0.0)
        self._held = 0.0
        self._warned = False
        self._sent = self._arrived = 0  # callbacks

    @property
    def over(self) -> bool:
        """Whether the loop is closed, perhaps in the middle of a run that then never ends."""
        loop = self._loop()
        return loop is not None and loop.is_closed()

    def check(self) -> None:
        """Check, in the watching thread, whether one step has held up the loop for a second.

        On asyncio a callback is scheduled that runs before the task's next step. This releases the interpreter lock, so
        it comes last: a frame that is held meanwhile would keep alive what the program has released.
        """
        self._look()
        loop, (step, *_) = self._loop(), self._before
        if loop is not None and step is not None and self._sent == self._arrived:
            self._sent += 1
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._arrive)

    def _look(self) -> None:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001  (documented, despite its name)
        if frame is None:
            return
        now, computed = self._clock(), self._computed(self._thread)
        task, step = self.step_in(frame)
        at = id(frame), frame.f_lasti
        step_before, at_before, then, computed_then = self._before
        self._before = step, at, now, computed
        if step is None or step != step_before:
            self._held, self._warned = 0.0, False
            return
        passed = min(now - then, 2 * _PAUSE_SECONDS)  # the whole process may have been stopped
        used = computed - computed_then
        self._held += passed if at == at_before and used < _IDLE_SHARE * passed else used
        if self._held >= _LIMIT_SECONDS:
            where = _where(frame)
            if where is None:
                self._warned = True  # a step in a debugger may take any time
            else:
                self.report_step(task, where, self._held)

    def step_in(self, frame: FrameType) -> tuple[Any, object]:
        """Return the task that runs, and a value that changes with its next step; None for both if no task runs.

        On trio a task counts its steps; on asyncio the callbacks that have run tell them apart, see `check`.
        """
        loop = self._loop()
        if loop is None:
            for outer, _ in walk_stack(frame):
                if outer.f_code.co_name == "unrolled_run" and outer.f_globals.get("__name__") == "trio._core._run":
                    task = outer.f_locals.get("task")
                    return task, None if task is None else (ref(task), getattr(task, "_schedule_points", object()))
            return None, None
        task = asyncio.current_task(loop)  # not from the frames, which go on while they are read
        return task, None if task is None else (ref(task), self._arrived)

    def _arrive(self) -> None:
        self._arrived = self._sent

    def report_step(self, task: Any, where: Location, seconds: float) -> None:  # noqa: ARG002
        """Report, once for each step, that it has held up the loop for that time; the step may continue."""
        from aiodist._runtime.inspection import replica_of  # loaded when something is overdue

        replica = replica_of(task)
        if replica is not None and not self._warned:
            self._warned = True
            self._report(
                f"replica {replica.id} has held up the event loop for more than a second at {place(where)}: meanwhile "
                "no other replica can continue (await ctx.run_sync(function) runs such work in a thread)",
                where,
            )


def _where(frame: FrameType) -> Location | None:
    """Return the innermost line outside Python's own library; None in a debugger, or in aiodist's code."""
    where: FrameType | None = None
    for outer, _ in walk_stack(frame):
        if str(outer.f_globals.get("__name__", "")).startswith(_DEBUGGERS):
            return None
        file = outer.f_code.co_filename
        of_the_library = file.startswith(_LIBRARY) and "site-packages" not in file
        if where is None and (is_plumbing(outer) or not of_the_library):
            where = outer
    return None if where is None or is_plumbing(where) else place_of(where)


_watched: dict[BlockedLoop, Sized] = {}  # with their runs
_lock = lock_for(_watched)


def watch(blocked: BlockedLoop, runs: Sized) -> None:
    """Watch a loop as long as it has runs; one thread watches all loops of the process."""
    if not can_read_other_threads():
        return
    with _lock, suppress(RuntimeError):  # no more threads can be started, so there is no watch
        if not _watched:
            start_new_thread(_check_until_no_runs, ())  # `Thread.start` would wait for it: a fifth of a first run
        _watched[blocked] = runs


def _check_until_no_runs() -> None:
    while True:
        time.sleep(_PAUSE_SECONDS)
        with _lock:
            for blocked, runs in list(_watched.items()):
                if not runs or blocked.over:
                    del _watched[blocked]
            if not _watched:
                return
            watched = list(_watched)
        for blocked in watched:
            blocked.check()
