"""Threads: the process-wide cache of idle ones, and those of a run, for `run_sync` and for large results.

Starting a thread costs some 50 microseconds of the event loop's time, and joining it costs as much again; a run of one
training step would pay that for every replica. So runs take threads from here and give them back. An idle thread waits
ten seconds for the next run and then ends, as trio's do. As a daemon it never keeps the interpreter alive.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

import anyio
from anyio import CancelScope, get_cancelled_exc_class, move_on_after

from aiodist._collectives.work import Call, Work, thread_count
from aiodist._core.text import ids

T = TypeVar("T")
Job: TypeAlias = Callable[[], object]

_IDLE_SECONDS = 10.0
_IDLE_NAME = "aiodist idle"
_PATIENCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.1


class Worker(threading.Thread):
    """A thread that does jobs, one after the other, for its current owner."""

    def __init__(self) -> None:
        super().__init__(name=_IDLE_NAME, daemon=True)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._unfinished: deque[None] = deque()

    @property
    def busy(self) -> bool:
        """Whether it has a job that it has not finished."""
        return bool(self._unfinished)

    def submit(self, job: Job) -> None:
        """Do a job, which must not raise, after the ones before it."""
        self._unfinished.append(None)
        self._jobs.put(job)

    def release(self) -> None:
        """Give the thread back; the next run may take it once its jobs are done."""
        self._jobs.put(None)

    def run(self) -> None:
        """Do jobs until the thread has been idle for a while."""
        taken = True
        while True:
            try:
                job = self._jobs.get(timeout=None if taken else _IDLE_SECONDS)
            except Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                taken = True  # in this very moment
                continue
            taken = job is not None
            if job is None:
                with _lock:
                    self.name = _IDLE_NAME
                    _idle.append(self)
                continue
            try:
                job()
            finally:
                del job  # an idle thread keeps nobody's memory
                self._unfinished.pop()


def take(name: str) -> Worker:
    """Return a thread with that name, which the caller owns until releasing it."""
    with _lock:
        worker = _idle.pop() if _idle else None
    if worker is None:
        worker = Worker()
        contextvars.Context().run(worker.start)  # free-threaded Pythons let a thread inherit context variables
    worker.name = name
    return worker


_lock = threading.Lock()
_idle: list[Worker] = []


def _begin_anew() -> None:
    _idle.clear()
    _lock.release()


if hasattr(os, "register_at_fork"):  # a child process has its parent's list and lock, and none of the threads
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_anew)


class DeviceThreads:
    """The threads of one run's devices, each taken with its first work.

    Jobs that replicas submit in one turn of the event loop begin together: the loop wakes one thread, which wakes the
    others before it begins. If the loop woke several threads and kept running itself, the system would put two of them
    on one core, and might leave them there for many steps while another core is idle: with that, two replicas that
    trained on two cores did an eighth fewer steps.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._workers: dict[str, Worker] = {}
        self._handed_over: list[tuple[Worker, Job]] = []  # in this turn of the loop
        self._unfinished: Counter[Worker] = Counter()  # jobs that have begun, as far as the loop has heard
        self._left: dict[Any, tuple[str, int]] = {}  # work, and whose, that nobody waits for unless it ends at once

    async def run(self, device: str, replica_id: int, fn: Callable[..., T], *args: Any) -> T:
        """Return ``fn(*args)``, called in the thread of a replica's device, in the caller's context variables.

        A thread cannot be stopped: if the caller is cancelled, the cancellation is raised once ``fn`` has returned, or
        a second after a Ctrl-C.
        """
        worker = self._workers.get(device)
        if worker is None:
            worker = self._workers[device] = take(f"aiodist {device}")
        call = _on_gpu(device, fn) if device.startswith("GPU:") else fn
        finished = self._loop.new_event()
        result: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                result.append(context.run(call, *args))
            except BaseException as error:  # noqa: BLE001  (whatever it is, it is for the caller)
                errors.append(error)
            with suppress(RuntimeError):  # the loop is closed: nobody is left to notify
                self._loop.call_soon_threadsafe(self._finish, worker, finished)

        context = contextvars.copy_context()
        if not self._handed_over:
            self._loop.call_plainly(self._begin)
        self._handed_over.append((worker, work))
        try:
            await finished.wait()
        except get_cancelled_exc_class():
            self._left[finished] = _name(fn), replica_id
            with CancelScope(shield=True):
                await self._outwait(finished)
            raise
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # an exception keeps this frame, which keeps the exception
        return result[0]

    def _begin(self) -> None:
        """Let the submitted jobs begin, without waiting for a thread that still has other work."""
        jobs, self._handed_over = self._handed_over, []
        at_once = []
        for worker, job in jobs:
            if self._unfinished[worker]:  # `busy` it may be for a moment after it has told that it is done
                worker.submit(job)
            else:
                at_once.append((worker, job))
        self._unfinished.update(worker for worker, _ in jobs)
        if at_once:
            worker, job = at_once[0]
            worker.submit(partial(_begin_all, at_once[1:], job))

    def _finish(self, worker: Worker, finished: Any) -> None:
        self._unfinished[worker] -= 1
        finished.set()

    async def _outwait(self, finished: Any) -> None:
        """Wait until the work is done, whatever is cancelled meanwhile, or until a second after a Ctrl-C."""
        until: float | None = None
        while not finished.is_set():
            with suppress(get_cancelled_exc_class()), move_on_after(_PAUSE_SECONDS):  # asyncio's own: no shield helps
                await finished.wait()
            if until is None:
                until = time.monotonic() + _PATIENCE_SECONDS if self._loop.interrupted else None
            elif time.monotonic() >= until and not finished.is_set():
                self._tell_of_those_left()
                return
        self._left.pop(finished, None)

    def _tell_of_those_left(self) -> None:
        """Print one line for the whole run on what still runs in threads after a Ctrl-C, and forget it."""
        working: dict[str, list[int]] = {}
        for finished, (name, replica_id) in self._left.items():
            if not finished.is_set():
                working.setdefault(name, []).append(replica_id)
        self._left.clear()
        if working:
            functions = ", ".join(f"{name} of {ids(replicas)}" for name, replicas in working.items())
            with suppress(Exception):  # nobody may be left to notify
                sys.stderr.write(f"aiodist: interrupted while run_sync still runs {functions}\n")

    def close(self) -> None:
        """Give the threads back, each once its work is done."""
        for worker in self._workers.values():
            worker.release()


def _begin_all(others: Sequence[tuple[Worker, Job]], job: Job) -> None:
    for worker, other in others:
        worker.submit(other)
    job()


def _on_gpu(device: str, fn: Callable[..., T]) -> Callable[..., T]:
    from aiodist._gpu import enqueue

    return partial(enqueue.call_on, device, enqueue.current_streams(device), fn)


def _name(fn: Any) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return f"{getattr(fn, '__qualname__', type(fn).__qualname__).rpartition('<locals>.')[2]}()"


LOOKS_SECONDS = 50e-6
"""How long each turn of the loop looks whether a device is done, before a thread is woken, which takes half of that."""

Done: TypeAlias = Callable[[Any, BaseException | None], object]


class ReductionThreads:
    """The threads in which a run computes results that would hold up its event loop.

    The run takes them with its first large value, so two runs never wait for each other's work. They work on the
    replicas' arrays, so a replica that is cancelled meanwhile is held back until the work is done (`settle`): nobody
    reads or writes a replica's arrays once it has continued.
    """

    def __init__(self, call_soon: Callable[..., object], call_soon_threadsafe: Callable[..., object]) -> None:
        self._call_soon = call_soon  # from the loop's own thread, at a tenth of what others pay
        self._call_soon_threadsafe = call_soon_threadsafe
        self._workers: list[Worker] = []
        self._settled: anyio.Event | None = None
        self.under_way = 0

    def carry_out(self, work: Work, done: Done) -> None:
        """Compute a result in the worker threads; then call ``done``, in the loop, with it or the exception.

        Called in the loop's thread.
        """
        self.under_way += 1
        if work.ready is None:
            self._begin(work, done)
        else:
            self._call_soon(self._look, work, done, time.perf_counter() + LOOKS_SECONDS)

    def _look(self, work: Work, done: Done, until: float) -> None:
        """Check whether a device has done the work, once in each turn of the loop, before a thread waits for it."""
        assert work.ready is not None
        try:
            ready = work.ready()
        except Exception as error:  # noqa: BLE001  (what a device has run into is for those who wait)
            self._finish(work, done, error)
            return
        if ready:
            self._finish(work, done, None)
        elif time.perf_counter() < until:
            self._call_soon(self._look, work, done, until)
        else:
            self._begin(work, done)

    def _begin(self, work: Work, done: Done) -> None:
        with suppress(RuntimeError):  # no more threads can be started: those that there are do it, or the loop's own
            while len(self._workers) < thread_count():
                self._workers.append(take("aiodist reduction"))
        _Job(work, self._workers, lambda error: self._tell(work, done, error)).begin()

    def _tell(self, work: Work, done: Done, error: BaseException | None) -> None:
        """Notify the loop, from a worker thread, that a job has ended."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to notify
            self._call_soon_threadsafe(self._finish, work, done, error)

    def _finish(self, work: Work, done: Done, error: BaseException | None) -> None:
        self.under_way -= 1
        result = None
        if error is None:
            try:
                result = work.result()
            except Exception as failure:  # noqa: BLE001  (whatever it is, it is for those who wait)
                error = failure
        done(result, error)
        if self._settled is not None and not self.under_way:
            self._settled.set()
            self._settled = None

    async def settle(self) -> None:
        """Wait until no work is in progress, whatever is cancelled meanwhile."""
        with CancelScope(shield=True):
            while self.under_way:
                if self._settled is None:
                    self._settled = anyio.Event()
                with suppress(get_cancelled_exc_class()):  # asyncio's own, which no shield keeps out
                    await self._settled.wait()

    def close(self) -> None:
        """Give the threads back; their work is done."""
        for worker in self._workers:
            worker.release()


class _Job:
    """One piece of work, phase by phase. Each thread takes calls from it until none is left."""

    def __init__(self, work: Work, workers: Sequence[Worker], ended: Callable[[BaseException | None], None]) -> None:
        self._phases = list(work.phases)
        self._workers = workers
        self._ended = ended
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._missing = 0
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Begin the next phase; after the last, or an error, the job has ended."""
        while self._phases and not self._phases[0]:
            self._phases.pop(0)
        if not self._phases or self._error is not None:
            self._ended(self._error)
            return
        calls = self._phases.pop(0)
        self._missing = len(calls)
        self._calls = list(reversed(calls))
        for worker in self._workers[: len(calls)]:
            worker.submit(self._take)
        if not self._workers:
            self._take()

    def _take(self) -> None:
        calls = self._calls
        while True:
            try:
                call = calls.pop()
            except IndexError:
                return
            try:
                call()
            except BaseException as error:  # noqa: BLE001  (a worker thread has nobody else to tell)
                self._error = error
            with self._lock:
                self._missing -= 1
                last = not self._missing
            if last:
                self.begin()
