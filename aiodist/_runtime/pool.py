"""The worker threads of one run, which make the results that would hold up its event loop.

The run takes them from the process's cache with its first large value and gives them back when it ends, so two runs
never wait for each other's work.

A thread cannot be stopped, and what it works on belongs to the replicas. So whoever is cancelled meanwhile is held back
until the work is done (`ReductionThreads.settle`): when a replica gets its arrays back, nobody reads or writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from time import perf_counter
from typing import Any, TypeAlias

import anyio
from anyio import CancelScope, get_cancelled_exc_class

from aiodist._collectives.work import Call, Work, thread_count
from aiodist._runtime import threads

LOOKS_SECONDS = 50e-6
"""How long each turn of the loop looks whether a device is done, before a thread is woken, which takes half of that."""

Done: TypeAlias = Callable[[Any, BaseException | None], object]


class ReductionThreads:
    """The worker threads of one run."""

    def __init__(self, call_soon: Callable[..., object], call_soon_threadsafe: Callable[..., object]) -> None:
        self._call_soon = call_soon  # from the loop's own thread, at a tenth of what others pay
        self._call_soon_threadsafe = call_soon_threadsafe
        self._workers: list[threads.Worker] = []
        self._settled: anyio.Event | None = None
        self.under_way = 0

    def carry_out(self, work: Work, done: Done) -> None:
        """Make a result in the worker threads; then call ``done``, in the loop, with it or with what went wrong.

        It is the loop's thread that asks.
        """
        self.under_way += 1
        if work.ready is None:
            self._begin(work, done)
        else:
            self._call_soon(self._look, work, done, perf_counter() + LOOKS_SECONDS)

    def _look(self, work: Work, done: Done, until: float) -> None:
        """Look whether a device has done the work, once in each turn of the loop, before a thread waits for it."""
        assert work.ready is not None
        try:
            ready = work.ready()
        except Exception as error:  # noqa: BLE001  (what a device has run into is for those who wait)
            self._finish(work, done, error)
            return
        if ready:
            self._finish(work, done, None)
        elif perf_counter() < until:
            self._call_soon(self._look, work, done, until)
        else:
            self._begin(work, done)

    def _begin(self, work: Work, done: Done) -> None:
        with suppress(RuntimeError):  # no more threads can be started: those that there are do it, or the loop's own
            while len(self._workers) < thread_count():
                self._workers.append(threads.take("aiodist reduction"))
        _Job(work, self._workers, lambda error: self._tell(work, done, error)).begin()

    def _tell(self, work: Work, done: Done, error: BaseException | None) -> None:
        """Pass on, from a worker thread, that a job has ended."""
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
        """Wait until nothing is under way, whatever is cancelled meanwhile."""
        with CancelScope(shield=True):
            while self.under_way:
                if self._settled is None:
                    self._settled = anyio.Event()
                with suppress(get_cancelled_exc_class()):  # asyncio's own, which no shield keeps out
                    await self._settled.wait()

    def close(self) -> None:
        """Give the threads back. Their work is done by then."""
        for worker in self._workers:
            worker.release()


class _Job:
    """One piece of work, phase by phase. Each thread takes calls until none is left."""

    def __init__(
        self, work: Work, workers: Sequence[threads.Worker], ended: Callable[[BaseException | None], None]
    ) -> None:
        self._phases = list(work.phases)
        self._workers = workers
        self._ended = ended
        self._lock = Lock()
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
