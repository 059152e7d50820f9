"""Arguments: what users pass to calls, and what their functions return, checked before it is used."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from types import CoroutineType
from typing import Any

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.options import CommunicationOptions, integer
from aiodist_kernels import ReduceOp

_OPS = {name: op for op in ReduceOp for name in (op.name, op.name.lower())}


def reduce_op(given: Any, value: Any = None) -> ReduceOp:
    """Return the reduce op for an op or its name in any case; ``value`` is the argument after it."""
    if isinstance(given, ReduceOp):
        return given
    found = _OPS.get(given) if type(given) is str else None
    if found is None and not isinstance(given, str) and isinstance(value, (str, ReduceOp)):
        raise ValueError(f"the reduce op comes first, then the value; the arguments are swapped: got {value!r} second")
    return ReduceOp(given) if found is None else found


def checked_name(name: Any) -> str | None:
    """Return a collective's name as a plain string: an enum's or NumPy's would differ on other workers."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, the same on every replica, got {name!r}")
    if not name:
        raise ValueError("name must not be empty; leave it out, or name the collective")
    return str.__str__(name)


def options(value: Any, hints: Any) -> CommunicationOptions | None:
    """Return the options that were given, under one of their names."""
    if value is not None and hints is not None:
        raise ValueError("options and experimental_hints are two names for the same argument; give options alone")
    given = value if value is not None else hints
    if given is not None and not isinstance(given, CommunicationOptions):
        raise TypeError(f"options must be CommunicationOptions or None, got {given!r}")
    return given


def replica_ids(value: Any, size: int) -> tuple[int, ...]:
    """Return the members of a new group."""
    if not hasattr(value, "__iter__") or isinstance(value, (str, bytes)):
        raise TypeError(f"replica_ids must be a sequence of replica ids, e.g. [0, 1], got {value!r}")
    ids = tuple(integer("each of replica_ids", each) for each in value)
    if not ids:
        raise ValueError("replica_ids must name at least one replica, got none")
    unknown = [each for each in ids if not 0 <= each < size]
    if unknown:
        raise ValueError(f"replica_ids must be from 0 to {size - 1}, got {unknown[0]} in {list(ids)}")
    if len(set(ids)) < len(ids):
        twice = next(each for index, each in enumerate(ids) if each in ids[:index])
        raise ValueError(f"replica_ids must name each replica once, got {twice} twice in {list(ids)}")
    return ids


# Functions, and their arguments.


def uncalled(fn: object) -> str:
    """Return advice if a coroutine was passed instead of its function; otherwise an empty text."""
    if not isinstance(fn, CoroutineType):
        return ""
    return f"; pass the function itself, uncalled, and its arguments in args: run({fn.__name__}, args=(...))"


def call_arguments(args: Any, kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the positional and keyword arguments for a function."""
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple or list, got {args!r}; for one argument write args=(value,)")
    if kwargs is None:
        return args, {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"kwargs must be a mapping from names to values, or None, got {kwargs!r}")
    return args, kwargs


def check_plain(fn: Any) -> None:
    """Check that something is a plain function, because a worker thread cannot await."""
    if not callable(fn):
        raise TypeError(f"run_sync expects a function, got {fn!r}")
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"run_sync expects a plain function, got the coroutine function {fn!r}; await it instead")


def check_iterated(fn: Any, caller: str) -> None:
    """Check that a function is no async generator function, whose generator would never be iterated."""
    code = getattr(fn, "__code__", None)
    if code is not None:  # much faster than inspect's function
        is_generator = bool(code.co_flags & inspect.CO_ASYNC_GENERATOR)
    else:
        is_generator = inspect.isasyncgenfunction(fn) or inspect.isasyncgenfunction(type(fn).__call__)
    if is_generator:
        raise TypeError(
            f"{caller} got the async generator function {fn!r}, which nothing would iterate; "
            "is `return` missing where it says `yield`?"
        )


# Values.


def check_awaited(value: Any, called: str) -> None:
    """Check that no leaf of a nest is a coroutine or the handle of a collective, which would never be awaited.

    It is closed, so that Python does not warn about it, too.
    """
    if value is None or type(value) is np.ndarray:  # the commonest
        return
    leaves, structure = nests.flatten_with_none(value)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Coroutine):
            text = repr(leaf)
            leaf.close()
            raise TypeError(
                f"{nests.leaf_paths(structure, called)[index]} is {text}, which nobody awaits; is `await` missing?"
            )


def check_not_all_none(value: Any, stacklevel: int) -> None:
    """Warn of a value whose leaves are all None: nothing is communicated, which is mostly a mistake."""
    leaves, _ = nests.flatten_with_none(value)
    if leaves and all(leaf is None for leaf in leaves):
        warnings.warn(
            "every leaf of this value is None, so nothing is communicated; has the function that made it a `return`, "
            "and have the gradients been computed?",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
