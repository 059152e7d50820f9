"""Enqueueing schedules on streams, ordered by events, without holding up the host.

    what replicas enqueued ──▶ event ──▶ each device's own stream: launches, copies ──▶ event ──▶ the replicas' streams

So a replica's next kernel sees the result, and may write to what it contributed, with no further care.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from threading import RLock
from typing import Any, Final

from aiodist._gpu.cuda_core import CudaCore, DeviceEvent, DeviceStream
from aiodist._gpu.schedule import Batch, Bound, Schedule
from aiodist._gpu.steps import Move

BOUND = 64
"""How many schedules with their addresses are kept."""


class Completion:
    """Work that was enqueued, and what must live until it is done: inputs, results, tables, scratch memory."""

    def __init__(self, driver: CudaCore, events: list[DeviceEvent], keeps: list[Any]) -> None:
        self._driver = driver
        self._events = events
        self.keeps = keeps

    def is_done(self) -> bool:
        """Return whether it is done, without waiting."""
        events = self._events
        while events and self._driver.is_done(events[-1]):
            self._driver.release(events.pop())
        return not events

    def wait(self) -> None:
        """Wait until it is done; for a worker thread."""
        while self._events:
            self._driver.wait_for(self._events[-1])
            self._driver.release(self._events.pop())


class Queue:
    """Enqueues reductions and moves on a driver, for one thread at a time.

    ``known`` is what callers have worked out for this driver, and theirs to use.
    """

    def __init__(self, driver: CudaCore) -> None:
        self.driver = driver
        self.known: dict[Any, Any] = {}
        self._bound: dict[tuple[Schedule, Sequence[int]], Bound] = {}

    def schedule(self, batches: Sequence[Batch], then: Sequence[Move] = (), arrays: int = 1) -> Schedule:
        """Return what can be known of reductions, and of what is moved behind them, before any address is."""
        with self.driver.using():
            return Schedule(self.driver, batches, then, arrays)

    def load(self, schedule: Schedule) -> None:
        """Compile and load a schedule's kernels; others may enqueue meanwhile."""
        for device, form in schedule.kernels:
            self.driver.load(device, form)

    def run(
        self, schedule: Schedule, streams: Iterable[DeviceStream], keeps: list[Any], begins: tuple[int, ...] = (0,)
    ) -> Completion:
        """Enqueue a schedule whose kernels are loaded, for arrays that begin there.

        Inputs were made, and results will be used, on the ``streams``; ``keeps`` own them.
        """
        with self.driver.using():
            bound = self._bind(schedule, begins)
            return self._enqueue(bound, streams, [keeps, bound.keeps])

    def _bind(self, schedule: Schedule, begins: tuple[int, ...]) -> Bound:
        """Return a schedule with addresses put in, the same as before where all lies where it lay.

        That is the rule, not the exception: frameworks give a step's arrays the memory of the last one's.
        """
        found = self._bound.get((schedule, begins))
        if found is None:
            found = schedule.bind(begins)
            if found.lasts:
                self._bound[schedule, begins] = found
                if len(self._bound) > BOUND:
                    del self._bound[next(iter(self._bound))]
        return found

    def _enqueue(self, bound: Bound, streams: Iterable[DeviceStream], keeps: list[Any]) -> Completion:
        driver = self.driver
        own = [driver.stream(device) for device in bound.devices]
        others = [stream for stream in streams if stream not in own]
        try:
            for stream in others:
                ready = driver.record(stream)
                for device in own:
                    driver.wait(device, ready)
                driver.release(ready)
            for call in bound.calls:
                call()
            done = [driver.record(device) for device in own]
            for stream in others:
                for event in done:
                    driver.wait(stream, event)
        except BaseException:
            for device in own:  # nobody will keep the memory of what was enqueued before the error
                driver.wait_for(driver.record(device))
            raise
        return Completion(driver, done, keeps)


enqueuing: Final = RLock()
"""Held by whoever enqueues: replicas' worker threads load kernels and then enqueue, too."""


@cache
def queue() -> Queue:
    """Return the one of the process, which all runs share: streams, kernels and tables last as long as the process.

    Raises:
        ImportError: what launches kernels is not installed.
    """
    return Queue(CudaCore())
