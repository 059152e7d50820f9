"""The types of the public names. This is never run: mypy checks it with everything else.

A line with ``type: ignore`` has a mistake that mypy must find; if it does not, it reports the comment as unused.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import aiodist
from aiodist import CollectiveHandle, MirroredStrategy, MultiWorkerMirroredStrategy, PerReplica, ReduceOp, Variable


def convert(text: str, *, base: int = 10) -> int:
    """Stand for work in a worker thread."""
    return int(text, base)


async def right(x: NDArray[np.float32], n: NDArray[np.int64], v: Variable) -> None:
    """Use collectives."""
    ctx = aiodist.get_replica_context()
    handle = ctx.all_reduce(ReduceOp.SUM, x)
    _ = assert_type(handle, CollectiveHandle[NDArray[np.float32]])
    assert_type(await handle, NDArray[np.float32])
    assert_type(await ctx.all_reduce("sum", {"loss": 0.5}), dict[str, float])
    assert_type(await ctx.all_reduce("sum", 3), int)
    assert_type(await ctx.all_reduce("mean", 3), float)
    assert_type(await ctx.all_reduce(ReduceOp.MEAN, n), NDArray[np.float64])
    assert_type(await ctx.all_reduce(ReduceOp.MAX, n), NDArray[np.int64])
    (await ctx.all_reduce("sum", v)).sum()
    assert_type(await ctx.run_sync(convert, "a", base=16), int)
    assert_type(await ctx.barrier(), None)


async def wrong(
    strategy: MirroredStrategy,
    several: MultiWorkerMirroredStrategy,
    x: NDArray[np.float32],
    values: PerReplica[NDArray[np.float32]],
) -> None:
    """Make the mistakes that people make."""
    ctx = aiodist.get_replica_context()
    ctx.all_reduce("sum", x)  # type: ignore[unused-awaitable]
    ctx.barrier()  # type: ignore[unused-awaitable]
    strategy.run(right)  # type: ignore[unused-awaitable]
    several.run(right)  # type: ignore[unused-awaitable]
    several.reduce(ReduceOp.SUM, values, None)  # type: ignore[unused-awaitable]
    several.gather(values, 0)  # type: ignore[unused-awaitable]
    await several.run(right(x, x, x))  # type: ignore[arg-type]
    ctx.all_reduce("sum", x) + 1  # type: ignore[operator]
    ctx.all_reduce(x, "sum")  # type: ignore[call-overload]
    ctx.all_reduce(ReduceOp.SUM, x, 3)  # type: ignore[call-overload]
    await ctx.run_sync(convert, 3)  # type: ignore[arg-type]
    await ctx.run_sync(convert, "3", bases=2)  # type: ignore[call-arg]
    await ctx.run_sync(right)  # type: ignore[call-arg, unused-coroutine]
    await strategy.run(right(x, x, x))  # type: ignore[arg-type]
    await strategy.reduce(ReduceOp.SUM, values)  # type: ignore[call-arg]
    values + 1  # type: ignore[operator]
    values[0]  # type: ignore[index]
    for _ in values:  # type: ignore[attr-defined]
        pass
    MirroredStrategy(order="call_site")  # type: ignore[call-arg]
    aiodist.PerReplicas([1])  # type: ignore[attr-defined]
    values.value  # type: ignore[attr-defined]  # noqa: B018
    ctx.rank  # type: ignore[attr-defined]  # noqa: B018


def kept(values: PerReplica[Any]) -> Any:
    """Return a component."""
    return values.values[0]
