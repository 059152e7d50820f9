"""The arguments of collectives: checked, normalised and described at the call, before any replica is disturbed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CoroutineType
from typing import Any, TypeVar

import anyio.to_thread
import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives import out as outs
from aiodist._collectives.kinds import normalized_axis
from aiodist.collective.kinds import collective_of
from aiodist.collective.out_buffers import OutBuffers
from aiodist.collective.signature import DETAIL, SHAPES, STRUCTURE, Signature, leaf_fields
from aiodist_kernels import ReduceOp

T = TypeVar("T")


def reduce_op(value: Any) -> ReduceOp:
    """Return the reduce op that is meant, by itself or by its name in any case.

    Raises:
        ValueError: it is none.
    """
    return value if isinstance(value, ReduceOp) else ReduceOp(value)


def checked_name(name: Any) -> str | None:
    """Return a collective's name as a plain string, for an enum's or NumPy's is written otherwise between workers.

    Raises:
        TypeError: it is no string.
        ValueError: it is empty.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, the same on every replica, got {name!r}")
    if not name:
        raise ValueError("name must not be empty; leave it out, or name the collective")
    return str.__str__(name)


def options(value: Any, hints: Any) -> CommunicationOptions | None:
    """Return the options that were given, under one of their names.

    Raises:
        TypeError: they are no `CommunicationOptions`.
        ValueError: they were given under both names.
    """
    if value is not None and hints is not None:
        raise ValueError("options and experimental_hints are two names of one argument; give options alone")
    given = value if value is not None else hints
    if given is not None and not isinstance(given, CommunicationOptions):
        raise TypeError(f"options must be CommunicationOptions or None, got {given!r}")
    return given


def replica_id(value: Any, what: str) -> int:
    """Return a replica id; its range is checked where the number of replicas is known.

    Raises:
        TypeError: it is no integer.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be a replica id, an int, got {value!r}")
    index: int = value.__index__()
    return index


def uncalled(fn: object) -> str:
    """Return what to do where a coroutine was passed for the function that makes it; empty for everything else."""
    if not isinstance(fn, CoroutineType):
        return ""
    name = fn.__name__
    return f"; pass the function itself, uncalled, and its arguments in args: run({name}, args=(...))"


def call_arguments(args: Any, kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the positional and keyword arguments for a function.

    Raises:
        TypeError: ``args`` is no tuple or list, or ``kwargs`` no mapping from names.
    """
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple or list, got {args!r}; for one argument write args=(value,)")
    if kwargs is None:
        return args, {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"kwargs must be a mapping from names to values, or None, got {kwargs!r}")
    return args, kwargs


def with_axes(signature: Signature, axis: Any, *, ragged: bool = False) -> Signature:
    """Return a signature with the axis of each leaf, counted from the front, as its detail.

    Args:
        signature: a signature without an axis.
        axis: the axis as it was given.
        ragged: sizes along the axis may differ: leave them out of the shapes.

    Raises:
        TypeError: the axis is no integer.
        ValueError: it is out of range for a leaf.
    """
    axes = [normalized_axis(axis, len(shape)) for shape, *_ in leaf_fields(signature)]
    changed = list(signature)
    changed[DETAIL] = _per_leaf(signature, axes)
    if ragged:
        shapes = [(*s[:a], None, *s[a + 1 :]) for (s, *_), a in zip(leaf_fields(signature), axes, strict=True)]
        changed[SHAPES] = _per_leaf(signature, shapes)
    return tuple(changed)


def with_split_axes(signature: Signature, split_axis: Any, concat_axis: Any) -> Signature:
    """Return a signature with each leaf's axes of an all_to_all as its detail; see `with_axes`."""
    ranks = [len(shape) for shape, *_ in leaf_fields(signature)]
    pairs = [
        (normalized_axis(split_axis, rank, "split_axis"), normalized_axis(concat_axis, rank, "concat_axis"))
        for rank in ranks
    ]
    changed = list(signature)
    changed[DETAIL] = _per_leaf(signature, pairs)
    return tuple(changed)


def _per_leaf(signature: Signature, values: list[Any]) -> Any:
    return values[0] if signature[STRUCTURE] is None else tuple(values)


def out_buffers(out: Any, signature: Signature, leaves: Any) -> OutBuffers | None:
    """Return the buffers that a result is to be written into; None for None.

    Args:
        out: the buffers, as they were given.
        signature: what is asked for.
        leaves: what of the value takes part.

    Raises:
        TypeError: one is no array, of another kind than the value, or has another dtype than the result.
        ValueError: the structure or a shape is not the result's, a buffer is read-only, on another GPU, or overlaps
            what it may not.
    """
    if out is None:
        return None
    brought, structure = _flat(out)
    if structure != signature[STRUCTURE] and nests.register_dicts(out):
        brought, structure = _flat(out)
    if structure != signature[STRUCTURE]:
        raise ValueError(f"out must be a nest like the value, {_text(signature[STRUCTURE])}, got {_text(structure)}")
    own = [leaves] if signature[STRUCTURE] is None else leaves
    return OutBuffers(outs.checked(collective_of(signature), own, brought), out)


def _flat(out: Any) -> tuple[list[Any], nests.Structure | None]:
    """Return leaves and structure, as a signature has them."""
    if type(out) is np.ndarray:
        return [out], None
    leaves, structure = nests.flatten(out)
    return leaves, None if len(leaves) == 1 and leaves[0] is out else structure


def _text(structure: nests.Structure | None) -> str:
    return "a single array" if structure is None else nests.text(structure)


async def run_in_any_thread(fn: Callable[..., T], *args: Any) -> T:
    """Run a function in one of anyio's worker threads: outside a run no device has one of its own."""
    return await anyio.to_thread.run_sync(fn, *args)
