"""torch, and which of its private names are used here, with which versions that was tried.

Everything in this package reaches torch through this module. A version without one of the names is refused with an
error that says so, before anything runs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

TRIED: Final = ("2.13",)
"""The versions of torch that this was tried with."""


class TorchError(Exception):
    """torch is absent, or a version that this cannot work with; the text is for a person."""


def load(name: str) -> Any:
    """Import a module of torch's.

    Raises:
        TorchError: there is none.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise TorchError(
            f"this needs PyTorch, which cannot be imported ({error}): pip install 'aiodist[torch]'"
        ) from None


def _require(module: Any, names: str) -> None:
    missing = [name for name in names.split() if not hasattr(module, name)]
    if missing:
        raise TorchError(
            f"torch {torch.__version__} has no {module.__name__}.{missing[0]}: this was tried with torch "
            f"{', '.join(TRIED)}"
        )


torch: Final[Any] = load("torch")
c10d: Final[Any] = load("torch.distributed.distributed_c10d")
bindings: Final[Any] = load("torch._C._distributed_c10d")

# What a process group is made by, and where it is registered: `init_process_group` and `new_group` call these by name.
_require(c10d, "_new_process_group_helper _register_pg_in_world _find_pg_by_ranks_and_tag rendezvous _world")
# Registers of process groups in C++ that are one a thread.
_require(bindings, "_set_thread_isolation_mode")


def isolate_threads() -> None:
    """Let every thread have its own register of process groups in C++."""
    bindings._set_thread_isolation_mode(True)


class _Worlds:
    """Stands for `c10d._world`: gives each rank its own."""

    def __init__(self, worlds: Any) -> None:
        object.__setattr__(self, "_worlds", worlds)

    def __getattr__(self, name: str) -> Any:
        if name == "default_pg":
            caller = sys._getframe(2)
            # The default of an argument in a module of torch's that is imported only now: it must be no rank's own.
            if caller.f_code.co_name == "<module>" and caller.f_globals["__name__"].startswith("torch."):
                return None
        return getattr(self._worlds(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._worlds(), name, value)


class World:
    """What `c10d` knows of a rank's process groups, under the names that it uses."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = 0
        self.comms: list[Any] = []
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """What torch's debugging prints of the groups."""
        return [{"pg_name": self.pg_names[group], "ranks": list(self.pg_group_ranks[group])} for group in self.pg_map]


def install(worlds: Any, new_group: Any, rendezvous: Any) -> None:
    """Let `torch.distributed` make process groups of ours, whatever backend is named.

    Args:
        worlds: returns the `World` of the rank that calls.
        new_group: makes a process group and registers it, with the arguments of `_new_process_group_helper`.
        rendezvous: yields a store, the rank and their number for a URL.
    """
    c10d._world = _Worlds(worlds)
    c10d._new_process_group_helper = new_group
    c10d.rendezvous = rendezvous


def existing_group(tag: str | None, ranks: list[int]) -> Any:
    """Return the group that was made for these ranks under this tag, with its store; None where there is none."""
    group = c10d._find_pg_by_ranks_and_tag(tag, ranks) if tag else None
    return None if group is None else (group, c10d._world.pg_map[group][1])


def register(group: Any, **how: Any) -> None:
    """Let `torch.distributed` know a group."""
    c10d._register_pg_in_world(group, **how)
