"""Ranks: a thread for each, of which one runs at a time, the one that has the baton; and what each has for itself.

A rank keeps the baton until it waits, sleeps or ends; then the rank that has been ready longest gets it, or another one
that the order chooses (a point is such a moment with two or more ranks ready). So which rank does what before which is
a function of the program and the order alone, and two ranks never touch torch's process-wide state at once.

With no rank ready, those that sleep go on, however long they want to sleep. With none asleep either, nobody will ever
go on: `on_stuck` is called, which must make somebody ready. What a rank does not do through this module (a lock of its
own, a socket, a process that it waits for) keeps the baton.

What a process has once and each rank needs for itself is swapped whenever the baton changes hands: the environment (in
every form, and so for child processes), arguments, standard streams, `print`, loggers, filters of warnings, process
groups, random state of Python, NumPy and torch, `__main__`, and modules. Modules that are loaded while ranks run are
loaded for each rank anew, so what they keep (a singleton, a cache, a registry) is each rank's own; but for the standard
library's, torch's, and those of packages with extension modules, which can be loaded only once.
"""

from __future__ import annotations

import builtins
import importlib
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from multiprocessing.process import BaseProcess
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from aiodist._checking.schedule import DEFER, Change, Order
from aiodist._torch.private import OF_EACH_RANK, before_profiling, torch

_PAUSE_SECONDS = 0.001
_pause = time.sleep  # which is another function for a rank
_STACK_BYTES = 64 << 20

_OF_TORCH = "torch functorch torchgen triton sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions"
_SHARED = frozenset([*sys.stdlib_module_names, "aiodist", "aiodist_kernels", *_OF_TORCH.split()])
"""Packages that ranks share; torch's own imports some only when a rank needs them, and keeps what it finds there."""
_LOCKS: dict[str, Any] = importlib._bootstrap._module_locks  # type: ignore[attr-defined]  # noqa: SLF001
"""A module's lock while it is imported. A rank that waits for others in the middle of that keeps it to itself."""
_ENVIRONMENT: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001
"""The environment, which can be copied and compared in microseconds so."""
_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (sys, "argv"), (sys, "stdout"), (sys, "stderr"), (sys, "excepthook"), (builtins, "print"),
    (logging.root, "handlers"), (logging.root, "level"), (logging.Logger.manager, "loggerDict"),
    (warnings, "filters"), (warnings, "showwarning"), (warnings, "_showwarnmsg_impl"),
    *OF_EACH_RANK,
)  # fmt: skip

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
        self.refused = ""
        self._order, self._on_switch, self._on_stuck = order, on_switch, on_stuck
        self._running = size
        self._ready = deque(range(size))
        self._later: list[int] = []  # asleep, or deferred by the order: until none is ready
        self._asleep = False
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._all_ended = threading.Event()
        self._own = threading.local()
        os.register_at_fork(after_in_child=self._forget)

    def run(self, function: Callable[[int], object], seconds: float | None = None) -> bool:
        """Call a function, which must not raise, for every rank in a thread of its own; return whether all ended."""
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

    def sleep(self) -> None:
        """Let other ranks run until none of them is ready, however long it wants to sleep."""
        rank = self._here()
        self._later.append(rank)
        self._asleep = True
        self._give_up(rank)

    def _forget(self) -> None:
        """In a process that a rank has forked, be no rank: there, nobody passes the baton."""
        self._own = threading.local()
        self.holder = None

    def _here(self) -> int:
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
        """Give the baton to the next rank, and return which that is; it may be the same."""
        if not (self._ready or self._later):
            self._on_stuck()
        following = self._next()
        self.holder = following
        if following != rank:
            self._on_switch(rank, following)
            self._gates[following].release()
        return following

    def _next(self) -> int:
        """Take the rank that goes on out of those that are ready, as the order chooses; it may defer some."""
        while True:
            if not self._ready:
                if self._asleep:
                    _pause(_PAUSE_SECONDS)  # threads and processes of the program's go on
                    self._asleep = False
                self._ready.extend(self._later)
                self._later.clear()
            choice = 0
            if len(self._ready) > 1:
                choice = self._order(self.points, len(self._ready))
                if choice:
                    self.changes.append(Change(self.points, choice))
                self.points += 1
            if choice == DEFER:
                self._later.append(self._ready.popleft())
                continue
            chosen = self._ready[choice]
            del self._ready[choice]
            return chosen


# What each rank has for itself.


class _Finder(PathFinder):
    """Finds modules as usual, and notes those that each rank loads anew."""

    found: set[str] = set()  # noqa: RUF012  (there is one process)
    _is_shared: dict[str, bool] = {}  # noqa: RUF012

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is."""
        spec, package = super().find_spec(fullname, path, target), fullname.partition(".")[0]
        if spec is not None and package not in cls._is_shared:
            cls._is_shared[package] = package in _SHARED or package in sys.modules or _has_extensions(spec)
        if spec is not None and not cls._is_shared[package]:
            cls.found.add(fullname)
        return spec


def _has_extensions(spec: ModuleSpec) -> bool:
    if spec.origin is not None and not spec.origin.endswith(".py"):
        return True
    suffixes = tuple(EXTENSION_SUFFIXES)
    folders = spec.submodule_search_locations or ()
    return any(name.endswith(suffixes) for folder in folders for _, _, names in os.walk(folder) for name in names)


class _Own(NamedTuple):
    """What a rank has for itself, while another one runs."""

    attributes: list[Any]
    environment: dict[bytes, bytes]
    modules: dict[str, ModuleType]
    locks: dict[str, Any]
    random: tuple[Any, ...]


class Process:
    """What each rank has for itself."""

    def __init__(self, size: int, argv: Sequence[str], environment: Callable[[int], dict[str, str]], seed: int) -> None:
        sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
        self._own = []
        for rank in range(size):
            variables = {os.fsencode(name): os.fsencode(value) for name, value in environment(rank).items()}
            found = [getattr(owner, name) for owner, name in _ATTRIBUTES[1:]]
            copies = [each.copy() if isinstance(each, (list, dict)) else each for each in found]
            modules = {"__main__": ModuleType("__main__")}
            drawn = _random_states(seed * size + rank)
            self._own.append(_Own([[*argv], *copies], {**_ENVIRONMENT, **variables}, modules, {}, drawn))

    def main_of(self, rank: int) -> ModuleType:
        """Return a rank's `__main__`."""
        return self._own[rank].modules["__main__"]

    def switch(self, leaves: int | None, enters: int) -> None:
        """Save one rank's own state, and restore another's."""
        names = ("__main__", *_Finder.found)
        if leaves is not None:
            self._own[leaves] = _Own(
                [getattr(owner, name) for owner, name in _ATTRIBUTES],
                _ENVIRONMENT.copy(),
                {name: sys.modules[name] for name in names if name in sys.modules},
                {name: _LOCKS.pop(name) for name in names if name in _LOCKS},
                _random_states(),
            )
        own = self._own[enters]
        for (owner, name), value in zip(_ATTRIBUTES, own.attributes, strict=True):
            setattr(owner, name, value)
        for key in _ENVIRONMENT.keys() - own.environment.keys():
            del os.environb[key]
        for key, value in own.environment.items() - _ENVIRONMENT.items():
            os.environb[key] = value
        for name in names:
            if name not in own.modules:
                sys.modules.pop(name, None)
        sys.modules.update(own.modules)
        _LOCKS.update(own.locks)
        python, legacy, torchs = own.random
        random.setstate(python)
        if legacy is not None:
            sys.modules["numpy"].random.set_state(legacy)
        torch.random.set_rng_state(torchs)


def _random_states(seed: int | None = None) -> tuple[Any, ...]:
    """Return the states of the random numbers of Python, NumPy and torch, the first two as a seed gives them."""
    numpy = sys.modules.get("numpy")
    if seed is not None:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
    legacy = None if numpy is None else numpy.random.get_state()
    return random.getstate(), legacy, torch.random.get_rng_state()


@contextmanager
def exits() -> Iterator[None]:
    """Let what ends a process without an error end what is done in here."""
    try:
        yield
    except SystemExit as end:
        if end.code not in {None, 0}:
            raise


def replace_functions(ranks: Ranks) -> None:
    """Let sleeping, leaving, handling signals, profiling and starting processes concern the rank that asks for it."""
    really_set_handler, really_leave = signal.signal, os._exit
    profiled: set[int | None] = set()

    def sleep(seconds: float, /) -> None:
        (ranks.sleep if ranks.owns_thread() else partial(_pause, seconds))()

    def set_handler(number: Any, handler: Any) -> Any:
        if ranks.current() is None:
            return really_set_handler(number, handler)
        return signal.getsignal(number)  # only the main thread can have one, and signals come to all ranks at once

    def leave(code: int) -> None:
        if ranks.owns_thread():
            raise SystemExit(code)
        really_leave(code)

    def profiles() -> None:
        if profiled - {ranks.current()}:
            raise NotImplementedError("aiodist check cannot profile several ranks, which share a process: profile one")
        profiled.add(ranks.current())

    time.sleep = sleep  # type: ignore[assignment]
    signal.signal = set_handler  # type: ignore[assignment]
    os._exit = leave  # type: ignore[assignment]
    before_profiling(profiles)
    _replace_processes(ranks)


def _replace_processes(ranks: Ranks) -> None:
    """Let each rank be the process that its own script would start for it; its other processes are real."""
    really_start, really_set_method = BaseProcess.start, multiprocessing.set_start_method
    started = [0] * ranks.size

    def be_process(function: Callable[[], object]) -> None:
        with exits():
            function()
        if torch.distributed.is_initialized():  # which ends with a process
            torch.distributed.destroy_process_group()

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> Any:
        if nprocs != ranks.size:
            raise RuntimeError(f"the script starts {nprocs} processes: run aiodist check with --ranks {nprocs}")
        be_process(partial(fn, ranks.current(), *args))
        return SimpleNamespace(join=lambda *_: True)

    def start(process: Any) -> None:
        """Start a process; the one of a rank has its number among its arguments, and no process group yet."""
        rank, given = ranks.current(), (*process._args, *process._kwargs.values())  # noqa: SLF001
        number = 0 if rank is None else started[rank] % ranks.size
        is_rank = any(type(each) is int and each == number for each in given)
        is_daemon = process.daemon and not multiprocessing.current_process().daemon
        if not is_rank or rank is None or is_daemon or (number == 0 and torch.distributed.is_initialized()):
            return really_start(process)
        started[rank] += 1
        process._popen = SimpleNamespace(pid=None, poll=lambda: 0, wait=lambda _=None: 0)  # noqa: SLF001  (has ended)
        if number == rank:
            be_process(process.run)
        return None

    torch.multiprocessing.spawn = torch.multiprocessing.start_processes = spawn
    set_method: Any = lambda method, **_: really_set_method(method, force=True)  # noqa: E731  (each rank does it)
    multiprocessing.set_start_method = torch.multiprocessing.set_start_method = set_method
    BaseProcess.start = start  # type: ignore[assignment]
