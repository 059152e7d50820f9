"""A rendezvous: a slot of the ledger, with the replicas' contributions, those that wait, and the result."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from aiodist._arrays import nests
from aiodist._arrays.host import in_native_order
from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives.work import Work
from aiodist._core.call import Call
from aiodist._core.ledger import NOBODY, Group, Path, Slot
from aiodist._runtime.requests import Request


class OutBuffers(NamedTuple):
    """A replica's own buffers for a result: their leaves, in the form that executors take, and the nest itself."""

    leaves: list[Any]
    nest: Any


class Extras(NamedTuple):
    """What few calls have: options of their own, which override the run's, and buffers for the result."""

    options: CommunicationOptions | None = None
    out: OutBuffers | None = None


NO_OPTIONS = CommunicationOptions()


class Rendezvous(Slot):
    """One collective: what each replica contributes, and the result."""

    __slots__ = (
        "deadline", "last", "options", "outs", "plain", "released", "request", "result", "shared", "started",
        "traceback", "under_way", "values",
    )  # fmt: skip

    request: Request  # of the first post
    values: list[Any]  # the contributions by position: a leaf, or a list of leaves; emptied on completion
    options: CommunicationOptions
    started: float  # when it was first posted, on the event loop's clock
    deadline: float | None
    waiters: list[Any]
    last: int  # the position of the replica whose post completed it; -1 if none did
    shared: bool  # one result serves all replicas; otherwise it is a list by position
    plain: bool  # one result serves all replicas, and goes into no buffers
    under_way: bool  # worker threads compute the result
    released: bool  # the waiters have been woken; later ones need not wait
    outs: dict[int, OutBuffers] | None  # by position, the buffers that replicas passed for the result
    result: Any
    traceback: TracebackType | None

    def __init__(self, group: Group, number: int, call: Call, code: Any, offset: int, path: Path) -> None:
        # One is made for every collective: the base class's constructor is inlined.
        self.group = group
        self.number = number
        self.call = call
        self.code = code
        self.offset = offset
        self.path = path
        self.missing = size = len(group.members)
        self.waiters = [None] * size
        self.error = self.others = self.traceback = self.outs = self.deadline = None
        self.absent = NOBODY
        self.matched = self.complete = self.plain = self.shared = self.under_way = self.released = False
        self.request = None  # type: ignore[assignment]  # set by the first post
        self.options = NO_OPTIONS
        self.values = [None] * size
        self.result = None
        self.last = -1

    def clear(self) -> None:
        """Drop values and waiters, once the run is over."""
        super().clear()
        self.values = []
        self.outs = None

    def fail(self, error: BaseException) -> None:
        """Set an error as the outcome."""
        self.error = error
        self.traceback = error.__traceback__  # the tracebacks of all replicas that raise it continue this one

    def add_waiter(self, position: int, waiter: Any) -> None:
        """Add a waiting task of that replica: its first task in replica order, further ones at the end."""
        if self.waiters[position] is None:
            self.waiters[position] = waiter
        else:
            self.waiters.append(waiter)

    def remove_waiter(self, position: int, waiter: Any) -> None:
        """Remove a task of that replica that has been cancelled."""
        if self.waiters[position] is waiter:
            self.waiters[position] = None
        elif waiter in self.waiters:
            self.waiters[self.waiters.index(waiter)] = None

    def compute(self, devices: Callable[[Group], tuple[str, ...]]) -> Work | None:
        """Compute the result and store it, or return the work if it belongs in worker threads."""
        request, options, values = self.request, self.options, self.values
        if request.compute is not None:
            self.shared = True
            values = [value for position, value in enumerate(values) if position not in self.absent]
            result = request.compute(values, options)
        else:
            if self.others is not None:
                values = list(map(in_native_order, values))
            size, executor = request.usual
            if len(values) != size or self.absent or options.accumulate != "native":
                names = devices(self.group) if request.on_devices else ()
                executor = request.executor(len(values), tuple(sorted(self.absent)), options.accumulate, names)
            self.shared = executor.shared
            if self.outs is None:
                result = executor.run(values)
            else:
                outs = {position: out.leaves for position, out in self.outs.items()}
                result = executor.run_into(values, outs)
        if type(result) is Work:
            return result
        self.result = result
        self.plain = self.shared and self.outs is None
        return None

    def take(self, result: Any, *, shared: bool) -> None:
        """Store the result."""
        self.result = result
        self.shared = shared
        self.plain = shared and self.outs is None

    def read(self, position: int, build: nests.Build | None) -> Any:
        """Return the result for a replica, in containers of its own; the leaves may be shared."""
        if self.outs is not None and position in self.outs:
            return self.outs[position].nest
        result = self.result if self.shared else self.result[position]
        return result if build is None else build(result)
