"""What a process has once and each rank needs for itself: swapped whenever the baton changes hands.

A rank finds its own environment (in every form, and so do its child processes), arguments, standard streams, `print`,
loggers, filters of warnings, random state of Python, NumPy and torch, `__main__`, and modules. Modules that are loaded
while ranks run are loaded for each rank anew, so what they keep (a singleton, a cache, a registry) is each rank's own;
but for the standard library's, torch's, and those of packages with extension modules, which can be loaded only once.
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
from pathlib import Path
from types import ModuleType
from typing import Any

from aiodist._torch.private import torch

_SHARED = frozenset(sys.stdlib_module_names) | {"torch", "aiodist", "aiodist_kernels", "functorch", "torchgen"}
_LOCKS: dict[str, Any] = importlib._bootstrap._module_locks  # type: ignore[attr-defined]  # noqa: SLF001
"""A module's lock while it is imported. A rank that waits for others in the middle of that keeps it to itself."""
_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (sys, "argv"), (sys, "stdout"), (sys, "stderr"), (sys, "excepthook"), (builtins, "print"),
    (logging.root, "handlers"), (logging.root, "level"), (logging.Logger.manager, "loggerDict"),
    (warnings, "filters"), (warnings, "showwarning"), (warnings, "_showwarnmsg_impl"),
)  # fmt: skip


class _Environ(type(os.environ)):  # type: ignore[misc]
    """An environment that notes which names somebody has changed."""

    changed: set[str] = set()  # noqa: RUF012  (there is one environment)

    def __setitem__(self, key: str, value: str) -> None:
        self.changed.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.changed.add(key)
        super().__delitem__(key)


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
    """What each rank has for itself.

    Args:
        size: how many ranks there are.
        argv: what `sys.argv` is for each.
        environment: returns what a rank finds in `os.environ` beside what is there.
        current: returns the rank that calls; None outside of ranks.
        sleep: is what `time.sleep` does in a rank.
    """

    def __init__(
        self,
        size: int,
        argv: Sequence[str],
        environment: Callable[[int], dict[str, str]],
        current: Callable[[], int | None],
        sleep: Callable[[float], None],
    ) -> None:
        self._current = current
        os.environ.__class__ = _Environ
        sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
        self._own: list[dict[str, Any]] = [
            {
                "attributes": [list(argv), *(_copied(getattr(owner, name)) for owner, name in _ATTRIBUTES[1:])],
                "environment": dict(environment(rank)),
                "modules": {"__main__": ModuleType("__main__")},
                "locks": {},
                "random": _random_states(),
            }
            for rank in range(size)
        ]
        _Environ.changed.update(*(own["environment"] for own in self._own))
        self._sleep = time.sleep
        self._signal = signal.signal
        time.sleep = self._sleep_of(sleep)
        signal.signal = self._set_handler  # type: ignore[assignment]

    def main_of(self, rank: int) -> ModuleType:
        """Return a rank's `__main__`."""
        main: ModuleType = self._own[rank]["modules"]["__main__"]
        return main

    def switch(self, leaves: int | None, enters: int) -> None:
        """Put away what is one rank's own, and bring out another's."""
        if leaves is not None:
            own = self._own[leaves]
            own["attributes"] = [getattr(owner, name) for owner, name in _ATTRIBUTES]
            own["environment"] = {key: os.environ[key] for key in _Environ.changed if key in os.environ}
            own["modules"] = {name: sys.modules[name] for name in _private_modules() if name in sys.modules}
            own["locks"] = {name: _LOCKS.pop(name) for name in _Finder.found if name in _LOCKS}
            own["random"] = _random_states()
        own = self._own[enters]
        for (owner, name), value in zip(_ATTRIBUTES, own["attributes"], strict=True):
            setattr(owner, name, value)
        for key in tuple(_Environ.changed):
            value = own["environment"].get(key)
            if value is None:
                os.environ.pop(key, None)
            elif os.environ.get(key) != value:
                os.environ[key] = value
        for name in _private_modules():
            if name not in own["modules"]:
                sys.modules.pop(name, None)
        sys.modules.update(own["modules"])
        _LOCKS.update(own["locks"])
        _set_random_states(own["random"])

    def _sleep_of(self, sleep: Callable[[float], None]) -> Callable[[Any], None]:
        really = self._sleep

        def sleep_here(seconds: Any, /) -> None:
            if self._current() is None:
                really(seconds)
            else:
                sleep(seconds)

        return sleep_here

    def _set_handler(self, number: Any, handler: Any) -> Any:
        """Set no handler in a rank: only the main thread can have one, and signals come to all ranks at once."""
        if self._current() is None:
            return self._signal(number, handler)
        return signal.getsignal(number)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value


def _private_modules() -> tuple[str, ...]:
    return ("__main__", *_Finder.found)


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    legacy = None if numpy is None else numpy.random.get_state()
    return random.getstate(), legacy, torch.random.get_rng_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    python, legacy, own = states
    random.setstate(python)
    if legacy is not None:
        sys.modules["numpy"].random.set_state(legacy)
    torch.random.set_rng_state(own)


def folder_of(script: Path) -> str:
    """Return what is first on `sys.path` when a script is run."""
    return str(script.resolve().parent)
