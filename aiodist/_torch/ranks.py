"""Ranks: a thread for each, of which one runs at a time, the one that has the baton.

A rank keeps the baton until it waits, sleeps or ends; then the rank that has been ready longest gets it, or another one
that the order chooses (a point is such a moment with two or more ranks ready). So which rank does what before which is
a function of the program and the order alone, and two ranks never touch torch's process-wide state at once.

With no rank ready, the one that sleeps shortest goes on: sleeping costs no time, as on the controlled loop. With none
asleep either, nobody will ever go on: `on_stuck` is called, which must make somebody ready.

What a rank does not do through this module (a lock of its own, a socket, a process that it waits for) keeps the baton.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from aiodist._checking.schedule import DEFER, Change, Order

_LONGEST_PAUSE = 0.01
_pause = time.sleep  # which is another function for a rank
_STACK_BYTES = 64 << 20

OnSwitch: TypeAlias = Callable[[int | None, int], object]
"""Called with the rank that gives the baton away (None for none) and the one that gets it, between their turns."""


class Ranks:
    """The threads of a program's ranks.

    Attributes:
        changes: the differences from the default order, so far.
        points: how many points there have been.
        holder: the rank that has the baton; None before the first has it.
        threads: by rank, its thread's identity, once it runs.
        refused: what could not be done for a thread that a rank has started; empty if nothing.
    """

    def __init__(self, size: int, order: Order, on_switch: OnSwitch, on_stuck: Callable[[], object]) -> None:
        self.size = size
        self.changes: list[Change] = []
        self.points = 0
        self.holder: int | None = None
        self.threads: dict[int, int] = {}
        self.ended: set[int] = set()
        self.refused = ""
        self._order = order
        self._on_switch = on_switch
        self._on_stuck = on_stuck
        self._ready = deque(range(size))
        self._deferred: list[int] = []
        self._sleeping: dict[int, float] = {}
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._now = 0.0
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._all_ended = threading.Event()
        self._own = threading.local()
        os.register_at_fork(after_in_child=self._forget)

    def run(self, function: Callable[[int], object], seconds: float | None = None) -> bool:
        """Call a function, which must not raise, for every rank in a thread of its own; return whether all ended."""
        before = threading.stack_size(_STACK_BYTES)
        try:
            threads = [
                threading.Thread(target=self._main, args=(function, rank), name=f"rank {rank}", daemon=True)
                for rank in range(self.size)
            ]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
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
        """Let other ranks run until something holds; whoever may make it hold calls `wake`."""
        while not until():
            rank = self._here()
            self._waiting[rank] = until
            self._give_up(rank)

    def wake(self) -> None:
        """Let those go on for whom what they wait for holds, in the order of ranks."""
        for rank in sorted(rank for rank, until in self._waiting.items() if until()):
            del self._waiting[rank]
            self._ready.append(rank)

    def sleep(self, seconds: float) -> None:
        """Let other ranks run for so long, on a clock that stands still while any of them can."""
        rank = self._here()
        self._sleeping[rank] = self._now + max(seconds, 0.0)
        self._give_up(rank)

    def _forget(self) -> None:
        """In a process that a rank has forked, be no rank: there, nobody passes the baton."""
        self._own = threading.local()
        self.holder = None

    def _here(self) -> int:
        if not self.owns_thread():
            self.refused = (
                f"a thread that rank {self.holder} has started would wait for another rank: in one process, only a "
                "rank's own thread can"
            )
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
            self.ended.add(rank)
            if len(self.ended) == self.size:
                self._all_ended.set()
            else:
                self._hand_over(rank)

    def _give_up(self, rank: int) -> None:
        if self._hand_over(rank) != rank:
            self._gates[rank].acquire()

    def _hand_over(self, rank: int | None) -> int:
        """Give the baton to the next rank, and return which that is; it may be the same."""
        if not (self._ready or self._deferred or self._sleeping):
            self._on_stuck()
        following = self._next()
        self.holder = following
        if following != rank:
            self._on_switch(rank, following)
            self._gates[following].release()
        return following

    def _next(self) -> int:
        while True:
            if not self._ready:
                self._ready.extend(self._deferred or [self._wake_up()])
                self._deferred.clear()
            if len(self._ready) > 1:
                self.points += 1
                chosen = self._choose(self.points - 1)
                if chosen is None:
                    continue
                return chosen
            return self._ready.popleft()

    def _choose(self, point: int) -> int | None:
        """Take the rank that goes on at this point out of those that are ready; None where one was deferred."""
        choice = self._order.choose(point, len(self._ready)) if point >= self._order.next_point else 0
        if choice:
            self.changes.append(Change(point, choice))
        if choice == DEFER:
            self._deferred.append(self._ready.popleft())
            return None
        chosen = self._ready[choice]
        del self._ready[choice]
        return chosen

    def _wake_up(self) -> int:
        """Return the rank that sleeps shortest; a short pause lets threads and processes of the program's work on."""
        rank = min(self._sleeping, key=lambda each: (self._sleeping[each], each))
        seconds = max(self._sleeping.pop(rank) - self._now, 0.0)
        _pause(min(seconds, _LONGEST_PAUSE))
        self._now += seconds
        return rank
