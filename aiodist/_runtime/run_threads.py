"""The threads of a run: one per device for `run_sync`, and some for results that would hold up the event loop."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import anyio
from anyio import CancelScope, get_cancelled_exc_class, move_on_after

from aiodist._collectives.work import Call, Work, thread_count
from aiodist._core.text import grouped, ids
from aiodist._runtime import threads
from aiodist._runtime.stacks import function_name
from aiodist._runtime.threads import Job, Worker

T = TypeVar("T")
Done: TypeAlias = Callable[[Any, BaseException | None], object]

_PATIENCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.1
_POLL_SECONDS = 50e-6
"""For how long a device is polled before a thread is woken to wait for it, which takes half of that time."""


class DeviceThreads:
    """The threads of one run's devices, each taken with its first job.

    Jobs that replicas submit in one turn of the event loop begin together: the loop wakes one thread, which wakes the
    others before it begins. If the loop woke several threads and kept running itself, the system would put two of them
    on one core, and might leave them there for many steps while another core is idle: two replicas that trained on two
    cores did an eighth fewer steps.
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._workers: dict[str, Worker] = {}
        self._submitted: list[tuple[Worker, Job]] = []  # in this turn of the loop
        self._unfinished: Counter[Worker] = Counter()  # jobs that have begun and, as far as the loop knows, not ended
        self._cancelled: dict[Any, tuple[str, int]] = {}  # by event: the function and the replica that was cancelled

    async def run(self, device: str, replica_id: int, fn: Callable[..., T], *args: Any) -> T:
        """Return ``fn(*args)``, called in the thread of a replica's device, with the caller's context variables.

        A thread cannot be stopped: if the caller is cancelled, the cancellation is raised once ``fn`` has returned, or
        a second after a Ctrl-C.
        """
        worker = self._workers.get(device)
        if worker is None:
            worker = self._workers[device] = threads.take(f"aiodist {device}")
        call: Callable[..., T] = fn
        if device.startswith("GPU:"):
            from aiodist._gpu import current

            call = partial(current.call_on, device, current.current_streams(device), fn)
        finished = self._loop.new_event()
        result: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                result.append(context.run(call, *args))
            except BaseException as error:  # noqa: BLE001  (raised in the caller)
                errors.append(error)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._finish, worker, finished)

        context = contextvars.copy_context()
        if not self._submitted:
            self._loop.call_soon(self._begin)
        self._submitted.append((worker, work))
        try:
            await finished.wait()
        except get_cancelled_exc_class():
            self._cancelled[finished] = function_name(fn), replica_id
            with CancelScope(shield=True):
                await self._wait_uncancelled(finished)
            raise
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # breaks the cycle of the exception and this frame
        return result[0]

    def _begin(self) -> None:
        """Begin the submitted jobs; those of a thread that still has other work begin by themselves."""
        jobs, self._submitted = self._submitted, []
        at_once: list[tuple[Worker, Job]] = []
        for worker, job in jobs:
            if self._unfinished[worker]:  # not `busy`, which it may be for a moment after its notification
                worker.submit(job)
            else:
                at_once.append((worker, job))
        self._unfinished.update(worker for worker, _ in jobs)
        if at_once:
            (first, job_of_first), *others = at_once

            def begin_all() -> None:
                for worker, job in others:
                    worker.submit(job)
                job_of_first()

            first.submit(begin_all)

    def _finish(self, worker: Worker, finished: Any) -> None:
        self._unfinished[worker] -= 1
        finished.set()

    async def _wait_uncancelled(self, finished: Any) -> None:
        """Wait until the job is done, however often this is cancelled, or until a second after a Ctrl-C."""
        until: float | None = None
        while not finished.is_set():
            if until is None:  # looked at before each wait: another Ctrl-C ends asyncio's runner, which counts them
                until = time.monotonic() + _PATIENCE_SECONDS if self._loop.interrupted else None
            elif time.monotonic() >= until:
                self._report_cancelled()
                return
            with suppress(get_cancelled_exc_class()), move_on_after(_PAUSE_SECONDS):  # no shield stops asyncio's own
                await finished.wait()
        self._cancelled.pop(finished, None)

    def _report_cancelled(self) -> None:
        """Print one line, for the whole run, on the functions that still run in threads after a Ctrl-C."""
        working = grouped(found for finished, found in self._cancelled.items() if not finished.is_set())
        self._cancelled.clear()
        if working:
            functions = ", ".join(f"{name}() of {ids(replicas)}" for name, replicas in working.items())
            with suppress(Exception):  # standard error may be closed
                sys.stderr.write(f"aiodist: interrupted while run_sync still runs {functions}\n")

    def close(self) -> None:
        """Release the threads, each once its jobs are done."""
        for worker in self._workers.values():
            worker.release()


class ReductionThreads:
    """The threads in which a run computes results that would hold up its event loop.

    The run takes them with its first large value, so two runs never wait for each other's work. They work on the
    replicas' arrays: a replica that is cancelled meanwhile is held back until the work is done (`settle`), so that
    nothing reads or writes its arrays once it has continued.
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._workers: list[Worker] = []
        self._settled: anyio.Event | None = None
        self.under_way = 0

    def carry_out(self, work: Work, done: Done) -> None:
        """Compute a result in the worker threads; then call ``done``, in the loop, with the result or an exception."""
        self.under_way += 1
        if work.ready is None:
            self._begin(work, done)
        else:
            self._loop.call_soon(self._poll, work, done, time.perf_counter() + _POLL_SECONDS)

    def _poll(self, work: Work, done: Done, until: float) -> None:
        """Check, once in each turn of the loop, whether a device has done the work."""
        assert work.ready is not None
        try:
            ready = work.ready()
        except Exception as error:  # noqa: BLE001  (the device's; the waiting replicas raise it)
            self._finish(work, done, error)
            return
        if ready:
            self._finish(work, done, None)
        elif time.perf_counter() < until:
            self._loop.call_soon(self._poll, work, done, until)
        else:
            self._begin(work, done)

    def _begin(self, work: Work, done: Done) -> None:
        with suppress(RuntimeError):  # no more threads can be started: those taken do the work, or else the loop's
            while len(self._workers) < thread_count():
                self._workers.append(threads.take("aiodist reduction"))

        def ended(error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._finish, work, done, error)

        _Job(work, self._workers, ended).begin()

    def _finish(self, work: Work, done: Done, error: BaseException | None) -> None:
        self.under_way -= 1
        result = None
        if error is None:
            try:
                result = work.result()
            except Exception as failure:  # noqa: BLE001  (the waiting replicas raise it)
                error = failure
        done(result, error)
        if self._settled is not None and not self.under_way:
            self._settled.set()
            self._settled = None

    async def settle(self) -> None:
        """Wait until no work is in progress, however often this is cancelled."""
        with CancelScope(shield=True):
            while self.under_way:
                if self._settled is None:
                    self._settled = anyio.Event()
                with suppress(get_cancelled_exc_class()):  # no shield stops asyncio's own
                    await self._settled.wait()

    def close(self) -> None:
        """Release the threads, whose work is done."""
        for worker in self._workers:
            worker.release()


class _Job:
    """One piece of work, phase by phase; each thread takes calls of a phase until none is left."""

    def __init__(self, work: Work, workers: Sequence[Worker], ended: Callable[[BaseException | None], None]) -> None:
        self._phases = list(work.phases)
        self._workers = workers
        self._ended = ended
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._missing = 0
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Begin the next phase; after the last one, or an error, the job has ended."""
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
            except BaseException as error:  # noqa: BLE001  (the waiting replicas raise it)
                self._error = error
            with self._lock:
                self._missing -= 1
                last = not self._missing
            if last:
                self.begin()
