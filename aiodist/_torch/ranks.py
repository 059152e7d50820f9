"""Ranks: a thread for each, of which one runs at a time, the one that has the baton.

A rank keeps the baton until it waits, sleeps or ends; then the rank that has been ready longest gets it, or another one
that the order chooses (a point is such a moment with two or more ranks ready). So which rank does what before which is
a function of the program and the order alone, and two ranks never touch torch's process-wide state at once.

With no rank ready, those that sleep continue, however long they want to sleep. When that has happened a thousand times
and no other rank has woken, they call `on_idle`, which may raise an error. With none asleep either, no rank will ever
continue: `on_stuck` is called, which must make one ready. A rank keeps the baton while it waits in any other way
than through this module (for a lock of its own, a socket, a process).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from aiodist._checking.schedule import DEFER, Change, Order

really_sleep = time.sleep
"""The original, which `aiodist._torch.process` replaces for ranks."""

_PAUSE_SECONDS = 0.001
_MOST_PAUSES = 1000
_STACK_BYTES = 64 << 20

OnSwitch: TypeAlias = Callable[[int | None, int], object]
"""Called between two turns with the rank that gives the baton away (None for none) and the one that gets it."""


class Ranks:
    """The threads of a program's ranks.

    Attributes:
        changes: the differences from the default order, so far.
        points: how many points there have been.
        holder: the rank that has the baton; None before the first has it.
        threads: by rank, its thread's identity, once it runs.
        refused: what a thread that a rank has started tried to do and could not; empty if nothing.
    """

    def __init__(
        self,
        size: int,
        order: Order,
        on_switch: OnSwitch,
        on_stuck: Callable[[], object],
        on_idle: Callable[[], object],
    ) -> None:
        self.size = size
        self.changes: list[Change] = []
        self.points = 0
        self.holder: int | None = None
        self.threads: dict[int, int] = {}
        self.refused = ""
        self._order, self._on_switch, self._on_stuck, self._on_idle = order, on_switch, on_stuck, on_idle
        self._running = size
        self._ready = deque(range(size))
        self._later: list[int] = []  # asleep, or deferred by the order, until none is ready
        self._asleep = False
        self._pauses = 0
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._all_ended = threading.Event()
        self._own = threading.local()
        os.register_at_fork(after_in_child=self._forget)

    def run(self, function: Callable[[int], object], seconds: float) -> bool:
        """Call a function, which must not raise, in a thread for each rank; return whether all ended in time."""
        threading.stack_size(_STACK_BYTES)
        for rank in range(self.size):
            threading.Thread(target=self._main, args=(function, rank), name=f"rank {rank}", daemon=True).start()
        self._hand_over(None)
        return self._all_ended.wait(seconds)

    def current(self) -> int | None:
        """Return the rank whose thread this is; in a thread that a rank has started, the rank that has the baton."""
        own: int | None = getattr(self._own, "rank", self.holder)
        return own

    def owns_thread(self) -> bool:
        """Return whether this is a rank's own thread."""
        return hasattr(self._own, "rank")

    def wait(self, until: Callable[[], bool]) -> None:
        """Let other ranks run until a condition holds; whatever may change it calls `wake`."""
        while not until():
            rank = self._own_rank()
            self._waiting[rank] = until
            self._give_up(rank)

    def wake(self) -> None:
        """Make the ranks ready whose conditions hold, in the order of ranks."""
        for rank in sorted(rank for rank, until in self._waiting.items() if until()):
            del self._waiting[rank]
            self._ready.append(rank)
            self._pauses = 0

    def sleep(self) -> None:
        """Let other ranks run until none of them is ready."""
        rank = self._own_rank()
        self._later.append(rank)
        self._asleep = True
        self._give_up(rank)
        if self._pauses > _MOST_PAUSES:
            self._on_idle()

    def _forget(self) -> None:
        """Be no rank in a process that a rank has forked: nobody passes the baton there."""
        self._own = threading.local()
        self.holder = None

    def _own_rank(self) -> int:
        if not self.owns_thread():
            what = f"a thread that rank {self.holder} has started would wait for another rank"
            self.refused = f"{what}: in one process, only a rank's own thread can"
            raise NotImplementedError(self.refused)
        rank: int = self._own.rank
        return rank

    def _main(self, function: Callable[[int], object], rank: int) -> None:
        self._own.rank = rank
        self.threads[rank] = threading.get_ident()
        self._gates[rank].acquire()
        try:
            function(rank)
        finally:
            self._running -= 1
            if self._running:
                self._hand_over(rank)
            else:
                self._all_ended.set()

    def _give_up(self, rank: int) -> None:
        if self._hand_over(rank) != rank:
            self._gates[rank].acquire()

    def _hand_over(self, rank: int | None) -> int:
        """Give the baton to the next rank and return it; it may be the same."""
        if not (self._ready or self._later):
            self._on_stuck()
        following = self.holder = self._next()
        if following != rank:
            self._on_switch(rank, following)
            self._gates[following].release()
        return following

    def _next(self) -> int:
        """Take the next rank out of those that are ready, as the order chooses; it may defer some."""
        while True:
            if not self._ready:
                if self._asleep:
                    really_sleep(_PAUSE_SECONDS)  # the program's own threads and processes continue
                    self._asleep = False
                    self._pauses += 1
                self._ready.extend(self._later)
                self._later.clear()
            choice = 0
            if len(self._ready) > 1:
                choice = self._order(self.points, len(self._ready))
                if choice:
                    self.changes.append(Change(self.points, choice))
                self.points += 1
            if choice != DEFER:
                chosen = self._ready[choice]
                del self._ready[choice]
                return chosen
            self._later.append(self._ready.popleft())
