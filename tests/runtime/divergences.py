"""Pairs of calls that are not the same collective, and the reason that a report must give for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from aiodist import CollectiveHandle, Reason, ReplicaContext
from tests.runtime.programs import Relay, replica

Call = Callable[[ReplicaContext], CollectiveHandle[Any]]
zeros = partial(np.zeros, dtype="f4")
X = zeros(3)
WIDE = zeros((960, 960))


class Divergence(NamedTuple):
    """What differs first, what most replicas call, and what the odd one calls."""

    reason: Reason
    usual: Call
    odd: Call


def call(kind: str, *args: Any, **options: Any) -> Call:
    """Return a call of that kind, on one line whatever its arguments."""
    return lambda ctx: getattr(ctx, kind)(*args, **options)


async def diverging(ctx: ReplicaContext, name: str, odd: int, relay: Relay) -> None:
    """Agree on three collectives, and let one replica call something else for the fourth."""
    for _ in range(3):
        await ctx.barrier()
    await relay.turn()
    handle = (DIVERGENCES[name].odd if replica() == odd else DIVERGENCES[name].usual)(ctx)
    relay.pass_on()
    await handle


def add(value: Any, op: str = "SUM", **options: Any) -> Call:
    return call("all_reduce", op, value, **options)


def gather(shape: tuple[int, ...], axis: int) -> Call:
    return call("all_gather", zeros(shape), axis)


scatter = partial(call, "reduce_scatter", "SUM", WIDE)
exchange = partial(call, "all_to_all", WIDE)
merge = partial(call, "merge_call")


def merge_one(strategy: Any) -> None:
    pass


def merge_two(strategy: Any) -> None:
    pass


def large(size: int = 3) -> dict[str, Any]:
    """Return a nest of which a report shows a part; one of its leaves has that size."""
    return {f"layer{i}": zeros(size if i == 7 else 3) for i in range(20)}


R = Reason
DIVERGENCES = {
    name.replace(" ", "_"): Divergence(*each)
    for name, each in {
        "kind": (R.KIND, call("all_gather", WIDE, 0), exchange()),
        "kind before all else": (R.KIND, add(X, name="a"), call("broadcast", {"x": zeros(2)}, name="b")),
        "reduce op": (R.REDUCE_OP, scatter(), call("reduce_scatter", "max", WIDE)),
        "axis of a gather": (R.AXIS, gather((2, 2), 0), gather((2, 2), 1)),
        "axis of a scatter": (R.AXIS, scatter(), scatter(axis=-1)),
        "split axis": (R.AXIS, exchange(), exchange(split_axis=1)),
        "concat axis": (R.AXIS, exchange(), exchange(concat_axis=1)),
        "list and tuple": (R.STRUCTURE, add([X]), add((X,))),
        "value and nest": (R.STRUCTURE, add(X), add([X])),
        "another key": (R.STRUCTURE, add({"layer": [{"w": X}]}), add({"layer": [{"v": X}]})),
        "a key more": (R.STRUCTURE, add({"w": X}), add({"w": X, "b": {"x": X}})),
        "none for a leaf": (R.STRUCTURE, add({"w": X, "b": X}), add({"w": X, "b": None})),
        "merge arguments": (R.STRUCTURE, merge(merge_one, (1,)), merge(merge_one, (1, 2))),
        "size": (R.SHAPE, add({"x": zeros((32, 8)), "y": X}), add({"x": zeros((17, 8)), "y": X})),
        "size in a large nest": (R.SHAPE, add(large()), add(large(17))),
        "keys of a large nest": (R.STRUCTURE, add({name * 20: X for name in large()}), add(large())),
        "rank": (R.SHAPE, add(X), add(X[None])),
        "size across the axis of a gather": (R.SHAPE, gather((2, 3), 0), gather((2, 4), 0)),
        "rank of a gather along the last axis": (R.SHAPE, gather((2, 3), -1), gather((3,), -1)),
        "dtype": (R.DTYPE, add((X, [zeros(8)])), add((X, [np.zeros(8)]))),
        "signedness": (R.DTYPE, call("broadcast", [X.view("i4")]), call("broadcast", [X.view("u4")])),
        "type of a number": (R.DTYPE, add(1), add(1.0)),
        "numbers of NumPy and Python": (R.DEVICE, add(np.float64(0)), add(0.0)),
        "array and scalar": (R.DEVICE, add({"loss": np.float32(0)}), add({"loss": zeros(())})),
        "name": (R.NAME, call("barrier", name="epoch 0"), call("barrier", name="epoch 1")),
        "name and none": (R.NAME, add(X), add(X, name="sum")),
        "merge function": (R.MERGE_FN, merge(merge_one), merge(merge_two)),
    }.items()
}
