"""Work in cross-replica context that would hold up the event loop, in a worker thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio.to_thread
from anyio.lowlevel import checkpoint

from aiodist._arrays import nests
from aiodist._arrays.slices import IndexedSlices
from aiodist._arrays.values import DistributedValues
from aiodist._strategy.variable import as_distributed
from aiodist_kernels import policy

T = TypeVar("T")


async def call_off_loop(values: Any, fn: Callable[[], T]) -> T:
    """Return what a function makes of these nests; where they are large, in a worker thread.

    When the caller is cancelled, the cancellation is raised once the function has returned.
    """
    if policy.blocks(nbytes(values)):
        return await anyio.to_thread.run_sync(fn)
    await checkpoint()
    return fn()


def nbytes(value: Any) -> int:
    """Return how many bytes the components of a nest have together."""
    return sum(map(_nbytes, nests.flatten_with_none(value)[0]))


def _nbytes(leaf: Any) -> int:
    leaf = as_distributed(leaf)
    parts = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
    total: int = sum(getattr(p.values if isinstance(p, IndexedSlices) else p, "nbytes", 0) for p in parts)
    return total
