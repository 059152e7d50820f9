"""torch, and its private names that this package uses.

The whole package reaches torch through this module. A version that lacks one of the names is refused with an error that
says so, before anything runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

TRIED: Final = ("2.13", "2.15")
"""The versions of torch that aiodist was tried with."""


def load(name: str) -> Any:
    """Import a module of torch; an ImportError says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        what = f"this needs PyTorch, which cannot be imported ({error})"
        raise ImportError(f"{what}: pip install 'aiodist[torch]'") from None


os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks run one at a time, and processes are forked
torch: Final[Any] = load("torch")
c10d: Final[Any] = load("torch.distributed.distributed_c10d")
bindings: Final[Any] = load("torch._C._distributed_c10d")

_world_of_c10d: Final = getattr(c10d, "_world", None)
OF_EACH_RANK: Final = (
    *((c10d, name) for name in (
        "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_group_count", "_tags_to_pg", "_pg_to_tag",
    )),
    *((_world_of_c10d, name) for name in ("_default_pg", "_pg_coalesce_state", "_comms")),
)  # fmt: skip
"""The attributes in which `torch.distributed` keeps a process's groups, as owners and names."""
_OF_DTENSOR: Final = ("_custom_op_handlers", "_allow_implicit_replication")
_CALLED: Final = (
    "_new_process_group_helper", "_register_pg_in_world", "_find_pg_by_ranks_and_tag", "rendezvous", "_WorldMeta",
)  # fmt: skip
_profile: Final[Any] = load("torch.autograd.profiler").profile
_OTHERS: Final = (
    (bindings, "_set_thread_isolation_mode"),
    (bindings.Reducer, "_set_forward_pass_work_handle"),
    (_profile, "_prepare_trace"),
)
for _owner, _name in (*((c10d, _name) for _name in _CALLED), *_OTHERS, *OF_EACH_RANK):
    if not hasattr(_owner, _name):
        raise ImportError(f"torch {torch.__version__} has no {_name}: this was tried with torch {' and '.join(TRIED)}")


def install(new_group: Any, rendezvous: Any) -> None:
    """Make `torch.distributed` create our process groups, whichever backend is named.

    Args:
        new_group: replaces `_new_process_group_helper`.
        rendezvous: replaces the generator of a store, a rank and the number of ranks for a URL.
    """
    bindings._set_thread_isolation_mode(True)
    c10d._new_process_group_helper = new_group
    c10d.rendezvous = rendezvous
    c10d._WorldMeta.WORLD = property(_world, c10d._WorldMeta.WORLD.fset)
    if not hasattr(torch._C, "_nccl_version"):  # torch logs it with every error of a group that names NCCL
        torch.cuda.nccl.version = lambda: (0, 0, 0)
    really_compile = torch.compile

    def compile_others(*args: Any, **kwargs: Any) -> Any:
        """Compile as torch does, except our code, which DDP calls from C++ while compiled code runs."""
        load("torch._dynamo.trace_rules").add("aiodist")
        return really_compile(*args, **kwargs)

    torch.compile = compile_others
    really_set_handle, kept = bindings.Reducer._set_forward_pass_work_handle, dict[int, Any]()

    def set_handle(reducer: Any, work: Any, *args: Any) -> None:
        """Keep a work of DDP's `join`, too: C++ keeps its part of a work, but not the part in Python."""
        kept[id(reducer)] = work
        really_set_handle(reducer, work, *args)

    bindings.Reducer._set_forward_pass_work_handle = set_handle


def _world(_: Any) -> Any:
    """Return the rank's own group of all ranks; None for default arguments in torch, which all ranks share."""
    caller = sys._getframe(1)
    is_default = caller.f_code.co_name == "<module>" and caller.f_globals.get("__name__", "").startswith("torch.")
    return None if is_default else c10d._world.default_pg


def of_dtensor() -> list[tuple[Any, str]]:
    """Return the attributes that `loss_parallel` and its like set, as owners and names; none before they are loaded."""
    dispatcher = getattr(getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None), "_op_dispatcher", None)
    return [(dispatcher, name) for name in _OF_DTENSOR if hasattr(dispatcher, name)]


def before_profiling(note: Callable[[], object]) -> None:
    """Call a function, which may raise, whenever a profiler is about to start."""
    prepare = _profile._prepare_trace

    def prepare_noted(profiler: Any) -> None:
        note()
        prepare(profiler)

    _profile._prepare_trace = prepare_noted


def existing_group(tag: str | None, ranks: list[int]) -> Any:
    """Return the group that was made for these ranks under this tag, with its store, if there is one."""
    group = c10d._find_pg_by_ranks_and_tag(tag, ranks) if tag else None
    return None if group is None else (group, c10d._world.pg_map[group][1])


def register(group: Any, **how: Any) -> None:
    """Register a group with `torch.distributed`."""
    c10d._register_pg_in_world(group, **how)
