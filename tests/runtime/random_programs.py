"""Random programs of collectives, and what they must give, worked out one after the other in plain NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from anyio.lowlevel import checkpoint
from hypothesis import strategies as st

from aiodist import CollectiveHandle, ReplicaContext

LONGEST = 6
KINDS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "scan", "all_to_all", "barrier", "merge_call")
OPS = {
    "f4": ("SUM", "MEAN", "MIN", "MAX", "PRODUCT"),
    "f8": ("SUM", "MEAN", "MIN", "MAX", "PRODUCT"),
    "i1": ("SUM", "MEAN", "MIN", "MAX", "PRODUCT"),
    "i4": ("SUM", "MEAN", "MIN", "MAX", "PRODUCT"),
    "u2": ("SUM", "MEAN", "MIN", "MAX", "PRODUCT"),
    "c8": ("SUM", "MEAN", "PRODUCT"),
    "?": ("MIN", "MAX"),
}
NESTS: dict[str, tuple[int, Callable[[Sequence[Any]], Any], Callable[[Any], list[Any]]]] = {
    "leaf": (1, lambda leaves: leaves[0], lambda nest: [nest]),
    "list": (2, list, list),
    "dict": (2, lambda leaves: {"w": leaves[0], "b": leaves[1]}, lambda nest: [nest["w"], nest["b"]]),
    "deep": (3, lambda a: ({"x": [a[0], a[1]], "n": None}, a[2]), lambda nest: [*nest[0]["x"], nest[1]]),
}

# Every step of a program has a place of its own, as if it were written on a line of its own.
_places: dict[str, Any] = {}
_lines = [f"def place_{i}(method, *args): return method(*args)" for i in range(LONGEST)]
exec(compile("\n".join(_lines), "random_program.py", "exec"), _places)


@dataclass(frozen=True)
class Step:
    """One collective: what is asked, of which values (drawn from ``seed``), and whether its await is left for later."""

    place: int
    kind: str
    dtype: str
    op: str
    nest: str
    rows: int
    columns: int
    axis: int
    source: int
    seed: int
    overlapped: bool

    def value(self, replica_id: int, replicas: int) -> list[np.ndarray]:
        shape = (replicas * self.rows, replicas * self.columns)
        rng = np.random.default_rng([self.seed, self.place, replica_id])
        low = 0 if self.dtype in ("u2", "?") else -3
        return [rng.integers(low, 4, shape).astype(self.dtype) for _ in range(NESTS[self.nest][0])]

    def issue(self, ctx: ReplicaContext) -> CollectiveHandle[Any]:
        n = ctx.num_replicas_in_sync
        value = NESTS[self.nest][1](self.value(ctx.replica_id_in_sync_group, n))
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (self.op, value),
            "all_gather": (value, self.axis),
            "broadcast": (value, self.source % n),
            "reduce_scatter": (self.op, value, self.axis),
            "scan": (self.op, value),
            "all_to_all": (value, self.axis, 1 - self.axis),
            "barrier": (),
            "merge_call": (add_up, (value,)),
        }
        handle: CollectiveHandle[Any] = _places[f"place_{self.place}"](getattr(ctx, self.kind), *arguments[self.kind])
        return handle

    def expected(self, replica_id: int, replicas: int) -> list[np.ndarray] | None:
        """Return the leaves that a replica must get."""
        if self.kind == "barrier":
            return None
        columns = zip(*(self.value(i, replicas) for i in range(replicas)), strict=True)
        return [self._expected_leaf(list(column), replica_id) for column in columns]

    def _expected_leaf(self, leaves: list[np.ndarray], replica_id: int) -> Any:
        n = len(leaves)
        if self.kind in ("all_reduce", "scan"):
            return folded(self.op, leaves if self.kind == "all_reduce" else leaves[: replica_id + 1])
        if self.kind == "all_gather":
            return np.concatenate(leaves, self.axis)
        if self.kind == "broadcast":
            return leaves[self.source % n]
        if self.kind == "reduce_scatter":
            return np.split(folded(self.op, leaves), n, self.axis)[replica_id]
        if self.kind == "all_to_all":
            return np.concatenate([np.split(leaf, n, self.axis)[replica_id] for leaf in leaves], 1 - self.axis)
        return sum(leaf.astype("c16") for leaf in leaves)

    def check(self, result: Any, replica_id: int, replicas: int) -> None:
        expected = self.expected(replica_id, replicas)
        if expected is None:
            assert result is None
            return
        for got, wanted in zip(NESTS[self.nest][2](result), expected, strict=True):
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
            if self.kind != "merge_call":
                assert not got.flags.writeable


def add_up(strategy: Any, value: Any) -> Any:
    """Sum per-replica arrays of a nest of `NESTS`; where a worker has one replica, they are bare."""
    if isinstance(value, dict):
        return {key: add_up(strategy, one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(add_up(strategy, one) for one in value)
    return None if value is None else sum(leaf.astype("c16") for leaf in getattr(value, "values", (value,)))


def folded(op: str, leaves: list[np.ndarray]) -> np.ndarray:
    if op == "MEAN":
        kind = leaves[0].dtype
        exact: np.ndarray = np.sum(np.stack(leaves).astype("c16" if kind.kind == "c" else "f8"), axis=0) / len(leaves)
        return exact.astype("f8" if kind.kind in "iu" else kind)
    step = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}[op]
    total = leaves[0]
    for leaf in leaves[1:]:
        total = step(total, leaf)
    return total


Steps = tuple[Step, ...]


@st.composite
def programs(draw: st.DrawFn) -> Steps:
    return tuple(draw(_steps(place)) for place in range(draw(st.integers(1, LONGEST))))


@st.composite
def _steps(draw: st.DrawFn, place: int) -> Step:
    dtype = draw(st.sampled_from(sorted(OPS)))
    return Step(
        place=place,
        kind=draw(st.sampled_from(KINDS)),
        dtype=dtype,
        op=draw(st.sampled_from(OPS[dtype])),
        nest=draw(st.sampled_from(sorted(NESTS))),
        rows=draw(st.integers(0, 2)),
        columns=draw(st.integers(1, 2)),
        axis=draw(st.integers(0, 1)),
        source=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 99)),
        overlapped=draw(st.booleans()),
    )


async def carry_out(ctx: ReplicaContext, steps: Steps, pauses: random.Random) -> list[Any]:
    """Issue a program's collectives, with random pauses; await each at once, or at the end if it is overlapped."""
    results: list[Any] = [None] * len(steps)
    pending: list[tuple[int, CollectiveHandle[Any]]] = []
    for number, step in enumerate(steps):
        await _pause(pauses)
        handle = step.issue(ctx)
        if step.overlapped:
            pending.append((number, handle))
        else:
            results[number] = await handle
    pauses.shuffle(pending)
    for number, handle in pending:
        await _pause(pauses)
        results[number] = await handle
    return results


async def _pause(pauses: random.Random) -> None:
    for _ in range(pauses.choice((0, 0, 1, 2, 5))):
        await checkpoint()
