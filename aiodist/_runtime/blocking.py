"""The watch over replicas that block their event loop: a thread looks at what the loop's own thread does.

A loop that turns runs the timer of its stall watch. Where that is overdue, and the same replica runs whenever the
thread looks, the loop is in one step of that replica. The machine may be busy, so that time counts for a second in
which the loop's thread has computed, or has stood at one instruction without computing: then it waits for something.
Where the time that a thread has computed cannot be asked for (macOS, Windows), there is no warning.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sized
from contextlib import suppress
from types import FrameType

from aiodist._core.report import Location
from aiodist._core.text import place
from aiodist._runtime.stacks import drives_replica, is_plumbing, place_of

_LIMIT_SECONDS = 1.0
_PAUSE_SECONDS = 0.25
_IDLE_SHARE = 0.02
_DEBUGGERS = ("bdb", "pdb", "pydevd")
_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"


class BlockedLoop:
    """What the thread knows of one event loop.

    Args:
        loop: returns the asyncio loop that runs in this thread; None on trio.
        tick_seconds: how often it calls `tick` while it turns.
        tell: tells, from the watching thread, that a replica blocks the loop: the text, and the line.
    """

    def __init__(
        self,
        loop: Callable[[], asyncio.AbstractEventLoop | None],
        tick_seconds: float,
        tell: Callable[[str, Location], object],
    ) -> None:
        self._loop = loop
        self._tick_seconds = tick_seconds
        self._tell = tell
        self._thread = threading.get_ident()
        self._ticked = time.monotonic()
        self._step: tuple[object, ...] = ()
        self._seen: tuple[object, ...] = ()
        self._at = self._computed = self._held = 0.0
        self.watched = False

    def tick(self) -> None:
        """Note that the loop turns."""
        self._ticked = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the loop has been closed, perhaps in the middle of a run, which then never ends."""
        loop = self._loop()
        return loop is not None and loop.is_closed()

    def look(self) -> None:
        """Look, from another thread, whether one replica's step has held the loop for a second."""
        now, ticked = time.monotonic(), self._ticked
        frame = sys._current_frames().get(self._thread) if now > ticked + self._tick_seconds else None  # noqa: SLF001
        replica = None if frame is None else self._replica_in(frame)
        if frame is None or replica is None:
            self._step = ()
            return
        computed = time.clock_gettime(time.pthread_getcpuclockid(self._thread))
        step, seen = (ticked, replica), (id(frame), frame.f_lasti)
        if step != self._step:
            self._held = 0.0
        elif self._held < _LIMIT_SECONDS:
            passed = min(now - self._at, 2 * _PAUSE_SECONDS)  # the whole process may have stood still
            used = computed - self._computed
            self._held += passed if seen == self._seen and used < _IDLE_SHARE * passed else used
            where = _where(frame)
            if self._held >= _LIMIT_SECONDS and where is not None:
                self._tell(
                    f"replica {replica} has held up the event loop for more than a second at {place(where)}: meanwhile "
                    "no other replica goes on (await ctx.run_sync(function) runs it in a thread)",
                    where,
                )
        self._step, self._seen, self._at, self._computed = step, seen, now, computed

    def _replica_in(self, frame: FrameType) -> int | None:
        """Return the replica that runs: by the scheduler's frame around it, or by its child task's context."""
        outer: FrameType | None = frame
        while outer is not None:
            member = drives_replica(outer)
            if member is not None:
                return member.replica_id
            outer = outer.f_back
        from aiodist._runtime.inspection import replica_of  # loaded when something is overdue

        loop = self._loop()
        task = None if loop is None else asyncio.current_task(loop)
        replica = None if task is None else replica_of(task)
        return None if replica is None else replica.id


def _where(frame: FrameType) -> Location | None:
    """Return the innermost line outside Python's own library; None in a debugger, or in a call of aiodist's."""
    where: FrameType | None = None
    outer: FrameType | None = frame
    while outer is not None:
        if str(outer.f_globals.get("__name__", "")).startswith(_DEBUGGERS):
            return None
        if where is None and (is_plumbing(outer) or not _is_of_the_library(outer)):
            where = outer
        outer = outer.f_back
    return None if where is None or is_plumbing(where) else place_of(where)


def _is_of_the_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARY) and "site-packages" not in file


_lock = threading.Lock()
_watched: list[tuple[BlockedLoop, Sized]] = []


def watch(blocked: BlockedLoop, runs: Sized) -> None:
    """Look after a loop while it has runs; one thread looks after all loops of the process."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return
    with _lock, suppress(RuntimeError):  # no more threads can be started: then nobody looks
        blocked.tick()
        if blocked.watched:
            return
        if not _watched:
            _Watcher(name="aiodist watch", daemon=True).start()
        blocked.watched = True
        _watched.append((blocked, runs))


class _Watcher(threading.Thread):
    """The thread that looks, until no loop has runs. It calls into none, which `aiodist check` knows by its class."""

    def run(self) -> None:
        while True:
            time.sleep(_PAUSE_SECONDS)
            with _lock:
                for each in _watched.copy():
                    if not each[1] or each[0].over:
                        each[0].watched = False
                        _watched.remove(each)
                if not _watched:
                    return
                looked_at = _watched.copy()
            for blocked, _ in looked_at:
                blocked.look()


def _begin_anew() -> None:
    _watched.clear()
    _lock.release()


if hasattr(os, "register_at_fork"):  # a child process has its parent's list and lock, and none of the threads
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_anew)
