"""What a process has once and each rank needs for itself: swapped whenever the baton changes hands.

A rank finds its own environment (in every form, and so do its child processes), arguments, standard streams, `print`,
loggers, filters of warnings, process groups, random state of Python, NumPy and torch, `__main__`, and modules. Modules
that are loaded while ranks run are loaded for each rank anew, so what they keep (a singleton, a cache, a registry) is
each rank's own; but for the standard library's, torch's, and those of packages with extension modules, which can be
loaded only once.
"""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from aiodist._torch.private import OF_EACH_RANK, torch
from aiodist._torch.ranks import Ranks

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


class Ended(BaseException):
    """A rank has ended its process, by `os._exit`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Finder(PathFinder):
    """Finds modules as usual, and notes those that each rank loads anew."""

    found: set[str] = set()  # noqa: RUF012  (there is one process)
    _packages: dict[str, bool] = {}  # noqa: RUF012

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is."""
        spec = super().find_spec(fullname, path, target)
        if spec is not None and not cls._is_shared(fullname.partition(".")[0], spec):
            cls.found.add(fullname)
        return spec

    @classmethod
    def _is_shared(cls, package: str, spec: ModuleSpec) -> bool:
        if package not in cls._packages:
            cls._packages[package] = package in _SHARED or package in sys.modules or _has_extensions(spec)
        return cls._packages[package]


def _has_extensions(spec: ModuleSpec) -> bool:
    if spec.origin is not None and not spec.origin.endswith(".py"):
        return True
    suffixes = tuple(EXTENSION_SUFFIXES)
    folders = spec.submodule_search_locations or ()
    return any(name.endswith(suffixes) for folder in folders for _, _, names in os.walk(folder) for name in names)


class Process:
    """What each rank has for itself, and what it does to its process."""

    def __init__(
        self, ranks: Ranks, argv: Sequence[str], environment: Callable[[int], dict[str, str]], seed: int
    ) -> None:
        self._ranks = ranks
        sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
        self._own: list[dict[str, Any]] = [
            {
                "attributes": [list(argv), *(_copied(getattr(owner, name)) for owner, name in _ATTRIBUTES[1:])],
                "environment": {**_ENVIRONMENT, **_encoded(environment(rank))},
                "modules": {"__main__": ModuleType("__main__")},
                "locks": {},
                "random": _random_states(seed * ranks.size + rank),
            }
            for rank in range(ranks.size)
        ]
        self._replace_functions()

    def main_of(self, rank: int) -> ModuleType:
        """Return a rank's `__main__`."""
        main: ModuleType = self._own[rank]["modules"]["__main__"]
        return main

    def switch(self, leaves: int | None, enters: int) -> None:
        """Save one rank's own state, and restore another's."""
        if leaves is not None:
            own = self._own[leaves]
            own["attributes"] = [getattr(owner, name) for owner, name in _ATTRIBUTES]
            own["environment"] = _ENVIRONMENT.copy()
            own["modules"] = {name: sys.modules[name] for name in _private_modules() if name in sys.modules}
            own["locks"] = {name: _LOCKS.pop(name) for name in _Finder.found if name in _LOCKS}
            own["random"] = _random_states()
        own = self._own[enters]
        for (owner, name), value in zip(_ATTRIBUTES, own["attributes"], strict=True):
            setattr(owner, name, value)
        for key in _ENVIRONMENT.keys() - own["environment"].keys():
            del os.environb[key]
        for key, value in own["environment"].items() - _ENVIRONMENT.items():
            os.environb[key] = value
        for name in _private_modules():
            if name not in own["modules"]:
                sys.modules.pop(name, None)
        sys.modules.update(own["modules"])
        _LOCKS.update(own["locks"])
        _set_random_states(own["random"])

    def _replace_functions(self) -> None:
        """Take what a script does to its process as done by a rank."""
        really_sleep, really_set_handler, really_leave = time.sleep, signal.signal, os._exit

        def sleep(seconds: float, /) -> None:
            (self._ranks.sleep if self._ranks.owns_thread() else really_sleep)(seconds)

        def set_handler(number: Any, handler: Any) -> Any:
            if self._ranks.current() is None:
                return really_set_handler(number, handler)
            return signal.getsignal(number)  # only the main thread can have one, and signals come to all ranks at once

        def leave(code: int) -> None:
            if self._ranks.owns_thread():
                raise Ended(code)
            really_leave(code)

        def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
            """Let each rank be the process that its own script would start for it."""
            size = self._ranks.size
            if nprocs != size:
                raise RuntimeError(f"the script starts {nprocs} processes: run aiodist check with --ranks {nprocs}")
            fn(self._ranks.current(), *args)

        time.sleep = sleep  # type: ignore[assignment]
        signal.signal = set_handler  # type: ignore[assignment]
        os._exit = leave  # type: ignore[assignment]
        torch.multiprocessing.spawn = torch.multiprocessing.start_processes = spawn


def _encoded(variables: dict[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value


def _private_modules() -> tuple[str, ...]:
    return ("__main__", *_Finder.found)


def _random_states(seed: int | None = None) -> tuple[Any, ...]:
    """Return the states of the random numbers of Python, NumPy and torch, the first two as a seed gives them."""
    numpy = sys.modules.get("numpy")
    if seed is not None:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
    legacy = None if numpy is None else numpy.random.get_state()
    return random.getstate(), legacy, torch.random.get_rng_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    python, legacy, own = states
    random.setstate(python)
    if legacy is not None:
        sys.modules["numpy"].random.set_state(legacy)
    torch.random.set_rng_state(own)
