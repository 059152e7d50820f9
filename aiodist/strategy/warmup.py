"""Warming up: the kernels that a strategy's reductions will need, compiled before they are needed.

Until a kernel is compiled NumPy serves, with the same bits; nothing compiles on the way of a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import anyio.to_thread
import numpy as np

from aiodist.vocabulary import nests
from aiodist_kernels import Accumulate, KernelSpec, ReduceOp, warm

_COMMON = (np.dtype(np.float32), np.dtype(np.float64))
_OPS = (ReduceOp.SUM, ReduceOp.MEAN)


async def compile_kernels(values: Sequence[Any], num_replicas: int, accumulate: Accumulate) -> None:
    """Compile what SUM and MEAN of these nests over the replicas need, in a worker thread.

    Raises:
        TypeError: a leaf has no dtype, or one that cannot be summed.
    """
    for value in values:
        nests.meet_dicts(value)
    dtypes = {_dtype(leaf) for value in values for leaf in nests.flatten(value)[0]} if values else _COMMON
    specs = [KernelSpec(op, dtype, num_replicas, accumulate) for dtype in _ordered(dtypes) for op in _OPS]
    if num_replicas > 1:
        await anyio.to_thread.run_sync(warm, specs)


def _dtype(leaf: Any) -> np.dtype[Any]:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        raise TypeError(f"warmup expects nests of arrays, or of anything with a dtype, got {leaf!r}")
    native: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    return native


def _ordered(dtypes: Iterable[np.dtype[Any]]) -> list[np.dtype[Any]]:
    return sorted(dtypes, key=lambda dtype: dtype.name)
