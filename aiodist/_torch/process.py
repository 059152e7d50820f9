"""What a process has once and each rank needs for itself.

It is swapped whenever the baton changes hands: the environment (in every form, and so for child processes), arguments,
standard streams, `print`, loggers, warning filters, process groups, the random state of Python, NumPy and torch,
`__main__`, and modules. Modules that are loaded while ranks run are loaded for each rank anew, so what they keep (a
singleton, a cache, a registry) is each rank's own. The standard library, torch, and packages with extension modules can
be loaded only once; the ranks share them.
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
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from multiprocessing.process import BaseProcess
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from aiodist._torch.places import is_plumbing
from aiodist._torch.private import OF_EACH_RANK, before_profiling, of_dtensor, torch
from aiodist._torch.ranks import Ranks, really_sleep

_OF_TORCH = "torch functorch torchgen triton sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions"
_SHARED = frozenset([*sys.stdlib_module_names, "aiodist", "aiodist_kernels", *_OF_TORCH.split()])
"""Packages that ranks share; torch imports some of its own only when a rank needs them, and keeps what it finds."""
_LOCKS: dict[str, Any] = importlib._bootstrap._module_locks  # type: ignore[attr-defined]  # noqa: SLF001
"""Import locks by module. A rank that waits for others in the middle of an import keeps its locks to itself."""
_ENVIRONMENT: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001
"""The environment, in a form that is copied and compared in microseconds."""
_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (sys, "argv"), (sys, "stdout"), (sys, "stderr"), (sys, "excepthook"), (builtins, "print"),
    (logging.root, "handlers"), (logging.root, "level"), (logging.Logger.manager, "loggerDict"),
    (warnings, "filters"), (warnings, "showwarning"), (warnings, "_showwarnmsg_impl"),
    *OF_EACH_RANK,
)  # fmt: skip


class _Finder(PathFinder):
    """Finds modules as usual, and notes those that are loaded for each rank."""

    found: set[str] = set()  # noqa: RUF012  (there is one process)
    _is_shared: dict[str, bool] = {}  # noqa: RUF012

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is."""
        spec, package = super().find_spec(fullname, path, target), fullname.partition(".")[0]
        if spec is not None:
            if package not in cls._is_shared:
                cls._is_shared[package] = package in _SHARED or package in sys.modules or _has_extensions(spec)
            if not cls._is_shared[package]:
                cls.found.add(fullname)
        return spec


def _has_extensions(spec: ModuleSpec) -> bool:
    if spec.origin is not None and not spec.origin.endswith(".py"):
        return True
    suffixes = tuple(EXTENSION_SUFFIXES)
    folders = spec.submodule_search_locations or ()
    return any(name.endswith(suffixes) for folder in folders for _, _, names in os.walk(folder) for name in names)


class _State(NamedTuple):
    """A rank's own part of the process, while another rank runs."""

    attributes: list[Any]
    environment: dict[bytes, bytes]
    modules: dict[str, ModuleType]
    locks: dict[str, Any]
    random: tuple[Any, ...]


class Process:
    """Each rank's own part of the process; at the beginning, as `torchrun` would start it."""

    def __init__(self, size: int, argv: Sequence[str], seed: int) -> None:
        sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
        sys.argv = [*argv]
        self._attributes: list[tuple[Any, str]] = []
        self._states = []
        common = {
            **dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"], str(size)), "ROLE_NAME": "default",
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        }  # fmt: skip
        for rank in range(size):
            variables = {**common, **dict.fromkeys(["RANK", "LOCAL_RANK", "ROLE_RANK"], str(rank))}
            encoded = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
            main, states = ModuleType("__main__"), _random_states(seed * size + rank)
            self._states.append(_State([], {**_ENVIRONMENT, **encoded}, {"__main__": main}, {}, states))
        self._give_each_rank(_ATTRIBUTES)

    def _give_each_rank(self, attributes: Iterable[tuple[Any, str]]) -> None:
        """Give each rank its own values of some attributes: those of now, lists and dicts copied."""
        for owner, name in attributes:
            value = getattr(owner, name)
            self._attributes.append((owner, name))
            for state in self._states:
                state.attributes.append(value.copy() if isinstance(value, (list, dict)) else value)

    def main_of(self, rank: int) -> ModuleType:
        """Return a rank's `__main__`."""
        return self._states[rank].modules["__main__"]

    def switch(self, leaves: int | None, enters: int) -> None:
        """Save one rank's state, and restore another's."""
        self._give_each_rank([each for each in of_dtensor() if each not in self._attributes])
        names = ("__main__", *_Finder.found)
        if leaves is not None:
            self._states[leaves] = _State(
                [getattr(owner, name) for owner, name in self._attributes],
                _ENVIRONMENT.copy(),
                {name: sys.modules[name] for name in names if name in sys.modules},
                {name: _LOCKS.pop(name) for name in names if name in _LOCKS},
                _random_states(),
            )
        state = self._states[enters]
        for (owner, name), value in zip(self._attributes, state.attributes, strict=True):
            setattr(owner, name, value)
        for key in _ENVIRONMENT.keys() - state.environment.keys():
            del os.environb[key]
        for key, value in state.environment.items() - _ENVIRONMENT.items():
            os.environb[key] = value
        for name in names:
            if name not in state.modules:
                sys.modules.pop(name, None)
        sys.modules.update(state.modules)
        _LOCKS.update(state.locks)
        python, legacy, torchs = state.random
        random.setstate(python)
        if legacy is not None:
            sys.modules["numpy"].random.set_state(legacy)
        torch.random.set_rng_state(torchs)


def _random_states(seed: int | None = None) -> tuple[Any, ...]:
    """Return the random states of Python, NumPy and torch, the first two after seeding them, if a seed is given."""
    numpy = sys.modules.get("numpy")
    if seed is not None:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
    legacy = None if numpy is None else numpy.random.get_state()
    return random.getstate(), legacy, torch.random.get_rng_state()


@contextmanager
def exits() -> Iterator[None]:
    """Let an exit without an error end the block instead of the process."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):  # which may be unhashable
            raise


def replace_functions(ranks: Ranks) -> None:
    """Make functions that concern a process concern a rank: sleep, exit, set signal handlers, profile, start ranks."""
    really_set_handler, really_leave = signal.signal, os._exit
    profiled: set[int | None] = set()

    def sleep(seconds: float, /) -> None:
        if ranks.owns_thread() and not is_plumbing(sys._getframe(1).f_code.co_filename):  # noqa: SLF001  (documented)
            ranks.sleep()
        else:  # torch and the standard library wait for processes and threads, and may hold locks that ranks share
            really_sleep(seconds)

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
    """Make each rank act as the process that its own script would start for it; its other processes are real."""
    really_start, really_set_method = BaseProcess.start, multiprocessing.set_start_method
    started = [0] * ranks.size

    def act_as_process(function: Callable[[], object]) -> None:
        with exits():
            function()
        if torch.distributed.is_initialized():  # a process group ends with its process
            torch.distributed.destroy_process_group()

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> Any:
        if nprocs != ranks.size:
            raise RuntimeError(f"the script starts {nprocs} processes: run aiodist check with --ranks {nprocs}")
        act_as_process(partial(fn, ranks.current(), *args))
        return SimpleNamespace(join=lambda *_: True)

    def start(process: Any) -> None:
        """Start a process; a rank's has its number among its arguments, and no process group exists yet."""
        rank, given = ranks.current(), (*process._args, *process._kwargs.values())  # noqa: SLF001
        number = 0 if rank is None else started[rank] % ranks.size
        is_rank = any(type(each) is int and each == number for each in given)
        is_daemon = process.daemon and not multiprocessing.current_process().daemon
        if not is_rank or rank is None or is_daemon or (number == 0 and torch.distributed.is_initialized()):
            return really_start(process)
        started[rank] += 1
        process._popen = SimpleNamespace(pid=None, poll=lambda: 0, wait=lambda _=None: 0)  # noqa: SLF001  (has ended)
        if number == rank:
            act_as_process(process.run)
        return None

    def set_method(method: str | None, force: bool = False) -> None:  # noqa: ARG001
        really_set_method(method, force=True)  # each rank sets it

    torch.multiprocessing.spawn = torch.multiprocessing.start_processes = spawn
    multiprocessing.set_start_method = torch.multiprocessing.set_start_method = set_method
    BaseProcess.start = start  # type: ignore[assignment]
