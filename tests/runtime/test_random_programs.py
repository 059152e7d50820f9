"""Random programs: correct ones give NumPy's numbers, and all of them end. tests/core has more."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiodist import CollectiveError, CollectiveHandle, ReplicaContext, ReplicaContextError
from tests.runtime.programs import mirrored, replica, run, still_works, turns

seeds = st.integers(0, 2**32)
Loop = tuple[str, dict[str, Any]]
LONGEST = 6
KINDS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "scan", "all_to_all", "barrier", "merge_call")
FOLDS: dict[str, Callable[..., Any]] = {
    "SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PRODUCT": np.prod,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def unhurried() -> Iterator[None]:
    """Let a report wait longer for other replicas: on a busy machine a tenth of a second can pass anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aiodist._runtime.scheduler._SETTLE_SECONDS", 30.0)
        yield


# Random programs of collectives, and their results, computed one after the other in plain NumPy.

# Every step of a program has a call site of its own, as if each stood on its own line.
_places: dict[str, Any] = {}
_lines = [f"def place_{i}(method, *args): return method(*args)" for i in range(LONGEST)]
exec(compile("\n".join(_lines), "random_program.py", "exec"), _places)


class Step(NamedTuple):
    """One collective: its kind, its arguments, and whether its await comes later."""

    place: int
    kind: str
    op: str
    nested: bool
    rows: int
    axis: int
    source: int
    overlapped: bool

    def leaves(self, replica_id: int, replicas: int) -> list[np.ndarray]:
        """Return a replica's contribution: small whole numbers, whose sums are exact."""
        rng = np.random.default_rng([self.place, replica_id])
        shape = (replicas * self.rows, replicas)
        return [rng.integers(-3, 4, shape).astype("f8") for _ in range(3 if self.nested else 1)]

    def issue(self, ctx: ReplicaContext) -> CollectiveHandle[Any]:
        n = ctx.num_replicas_in_sync
        leaves = self.leaves(ctx.replica_id_in_sync_group, n)
        value: Any = ({"x": leaves[:2]}, leaves[2]) if self.nested else leaves[0]
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (self.op, value),
            "all_gather": (value, self.axis),
            "broadcast": (value, self.source % n),
            "reduce_scatter": (self.op, value, self.axis),
            "scan": (self.op, value),
            "all_to_all": (value, self.axis, 1 - self.axis),
            "barrier": (),
            "merge_call": (add_up, leaves),
        }
        handle: CollectiveHandle[Any] = _places[f"place_{self.place}"](getattr(ctx, self.kind), *arguments[self.kind])
        return handle

    def wanted(self, contributed: list[np.ndarray], replica_id: int) -> Any:
        """Return the result for one leaf on a replica."""
        n = len(contributed)
        if self.kind in ("all_reduce", "scan"):
            return FOLDS[self.op](contributed if self.kind == "all_reduce" else contributed[: replica_id + 1], axis=0)
        if self.kind == "all_gather":
            return np.concatenate(contributed, self.axis)
        if self.kind == "broadcast":
            return contributed[self.source % n]
        if self.kind == "reduce_scatter":
            return np.split(FOLDS[self.op](contributed, axis=0), n, self.axis)[replica_id]
        if self.kind == "all_to_all":
            return np.concatenate([np.split(leaf, n, self.axis)[replica_id] for leaf in contributed], 1 - self.axis)
        return sum(contributed)

    def check(self, result: Any, replica_id: int, replicas: int) -> None:
        if self.kind == "barrier":
            assert result is None
            return
        got = [result] if not self.nested else result if self.kind == "merge_call" else [*result[0]["x"], result[1]]
        columns = zip(*(self.leaves(i, replicas) for i in range(replicas)), strict=True)
        for leaf, contributed in zip(got, columns, strict=True):
            np.testing.assert_array_equal(leaf, self.wanted(list(contributed), replica_id), strict=True)
            assert leaf.flags.writeable == (self.kind == "merge_call")


def add_up(strategy: Any, *leaves: Any) -> Any:
    sums = [sum(leaf.values) for leaf in leaves]
    return sums if len(sums) > 1 else sums[0]


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    return [
        Step(
            place,
            kind=draw(st.sampled_from(KINDS)),
            op=draw(st.sampled_from(sorted(FOLDS))),
            nested=draw(st.booleans()),
            rows=draw(st.integers(0, 2)),
            axis=draw(st.integers(0, 1)),
            source=draw(st.integers(0, 4)),
            overlapped=draw(st.booleans()),
        )
        for place in range(draw(st.integers(1, LONGEST)))
    ]


async def carry_out(ctx: ReplicaContext, steps: list[Step], pauses: random.Random) -> list[Any]:
    """Issue a program's collectives, with random pauses; await each at once, or at the end if it is overlapped."""
    results: list[Any] = [None] * len(steps)
    pending: list[tuple[int, CollectiveHandle[Any]]] = []
    for number, step in enumerate(steps):
        await turns(pauses.choice((0, 0, 1, 2, 5)))
        handle = step.issue(ctx)
        if step.overlapped:
            pending.append((number, handle))
        else:
            results[number] = await handle
    pauses.shuffle(pending)
    for number, handle in pending:
        await turns(pauses.choice((0, 0, 1, 2, 5)))
        results[number] = await handle
    return results


class Part(NamedTuple):
    """A part of a program: collectives of one group, whose members' ids are in the group's order."""

    members: tuple[int, ...]
    steps: list[Step]


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, list[Part]]:
    """Draw a number of replicas, and the programs of groups of them, the first of which has them all."""
    replicas = draw(st.integers(2, 5))
    everyone = draw(st.permutations(range(replicas)))
    sizes = [replicas, *draw(st.lists(st.integers(2, replicas), max_size=4))]
    return replicas, [Part(tuple(draw(st.permutations(everyone))[:size]), draw(programs())) for size in sizes]


async def carry_out_part(part: Part, group: ReplicaContext | None, seed: int) -> None:
    if group is None:
        return
    results = await carry_out(group, part.steps, random.Random(seed + group.replica_id_in_sync_group))
    for step, result in zip(part.steps, results, strict=True):
        step.check(result, group.replica_id_in_sync_group, len(part.members))


@given(drawn=parts(), seed=seeds, racing=st.booleans())
def test_correct_program_gives_numpys_numbers(drawn: tuple[int, list[Part]], seed: int, racing: bool) -> None:
    replicas, what = drawn

    async def program(ctx: ReplicaContext) -> None:
        groups = [ctx.new_group(part.members) if replica() in part.members else None for part in what]
        async with anyio.create_task_group() as tasks:
            for part, group in zip(what, groups, strict=True):
                if racing:
                    tasks.start_soon(carry_out_part, part, group, seed)
                else:
                    await carry_out_part(part, group, seed)

    asyncio.run(run(mirrored(replicas), program))


@given(counts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=2, max_size=4), seed=seeds)
def test_uneven_loops_reduce_the_values_of_replicas_that_have_not_joined(counts: list[list[int]], seed: int) -> None:
    """Each inner list is a replica's: the number of steps in each epoch, before it joins."""
    replicas = len(counts)

    async def program(ctx: ReplicaContext) -> None:
        me = replica()
        pauses = random.Random(seed + me)
        for epoch in range(min(map(len, counts))):
            for step in range(counts[me][epoch]):
                await turns(pauses.choice((0, 0, 1, 3)))
                active = [i for i in range(replicas) if counts[i][epoch] > step]
                value, values = np.array([2.0**me]), np.array([2.0**i for i in active])
                folds = {"SUM": values.sum(), "MEAN": values.mean(), "MIN": min(values), "MAX": max(values)}
                for op, wanted in (folds | {"PRODUCT": values.prod()}).items():
                    assert (await ctx.all_reduce(op, value))[0] == wanted
                assert (await ctx.all_gather(value, 0)).tolist() == values.tolist()
                assert (await ctx.broadcast(value, active[-1]))[0] == values[-1]
                await ctx.barrier()
            last = await ctx.join()
            assert counts[last][epoch] == max(counts[i][epoch] for i in range(replicas))

    asyncio.run(run(mirrored(replicas), program))


# Whatever replicas do, on every event loop, ends in a result or an error: none waits forever.

DEEPEST = 3
COMMON = ("barrier", "reduce", "hold", "pause", "await", "merge", "group")
SCOPES = ("cancelled", "timeout", "shield", "child", "catch", "finally")
RARE = ("raise", "join", "return", "outer", "work", "other's", "merge that fails")


class OwnError(Exception):
    pass


async def merge(strategy: Any) -> None:
    await checkpoint()


async def merge_that_fails(strategy: Any) -> None:
    await checkpoint()
    raise OwnError


class Actor:
    """Does random things, by a seed."""

    def __init__(self, seed: str, ctx: ReplicaContext, outer: anyio.CancelScope, everyones: list[Any]) -> None:
        self.random = random.Random(seed)
        self.ctx = ctx
        self.contexts = [ctx]
        self.outer = outer
        self.everyones = everyones

    async def act(self, depth: int = 0) -> None:
        held: list[CollectiveHandle[Any]] = []
        for _ in range(self.random.randint(1, 5)):
            what = self.random.choice(COMMON + SCOPES + RARE)
            if what in SCOPES:
                if depth < DEEPEST:
                    await self.inside(what, depth + 1, held)
            elif what not in RARE or self.random.random() < 0.3:
                if what == "return":
                    return
                await self.do(what, held)
        for handle in held:
            if self.random.random() < 0.6:
                await handle

    async def do(self, what: str, held: list[CollectiveHandle[Any]]) -> None:
        ctx = self.random.choice(self.contexts)
        if what == "hold":
            held.append(ctx.all_reduce("SUM", 1, name="x"))
            self.everyones.append(held[-1])
        elif what == "await" and held:
            await held.pop(self.random.randrange(len(held)))
        elif what == "group":
            self.contexts.append(self.ctx.new_group(range(self.ctx.num_replicas_in_sync), "g"))
        elif what == "raise":
            raise OwnError
        elif what == "outer":
            self.outer.cancel()
        elif what == "other's" and self.everyones:
            await self.random.choice(self.everyones)
        else:
            ways: dict[str, Callable[[], Awaitable[Any]]] = {
                "barrier": lambda: ctx.barrier(name="x"),
                "reduce": lambda: ctx.all_reduce("SUM", 1, name="x"),
                "merge": lambda: ctx.merge_call(merge, name="m"),
                "merge that fails": lambda: ctx.merge_call(merge_that_fails, name="m"),
                "join": ctx.join,
                "work": lambda: ctx.run_sync(int),
            }
            await ways.get(what, checkpoint)()

    async def inside(self, what: str, depth: int, held: list[CollectiveHandle[Any]]) -> None:
        if what in ("cancelled", "timeout", "shield"):
            with anyio.CancelScope(shield=what == "shield") as scope:
                if what == "cancelled":
                    scope.cancel()
                elif what == "timeout":
                    scope.deadline = anyio.current_time() + self.random.choice((0, 0.001))
                await self.act(depth)
        elif what == "child":
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.act, depth)
                await (held.pop() if held else self.act(depth))
        elif what == "catch":
            with suppress(CollectiveError, OwnError, ExceptionGroup):
                await self.act(depth)
        else:
            try:
                await self.act(depth)
            finally:
                with anyio.CancelScope(shield=self.random.random() < 0.7):
                    await self.act(depth)


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect dropped handles that are in cycles, so that they warn where warnings are ignored."""
    yield
    gc.collect()


@pytest.mark.usefixtures("collected")
@pytest.mark.every_loop
@pytest.mark.filterwarnings("ignore:replica . never awaited")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=seeds, replicas=st.integers(1, 5), alike=st.booleans())
def test_whatever_replicas_do_ends(
    anyio_backend: Loop, seed: int, replicas: int, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are ``alike`` they all do the same."""
    monkeypatch.setattr("aiodist._runtime.scheduler._SETTLE_SECONDS", 0.1)

    async def main() -> None:
        strategy = mirrored(replicas)
        everyones: list[Any] = []
        with anyio.CancelScope() as outer:

            async def program(ctx: ReplicaContext) -> None:
                await Actor(f"{seed}" if alike else f"{seed} {replica()}", ctx, outer, everyones).act()

            with suppress(CollectiveError, OwnError, ReplicaContextError, ValueError, ExceptionGroup):
                await run(strategy, program)
        everyones.clear()
        await still_works(strategy)

    anyio.run(main, backend=anyio_backend[0], backend_options=anyio_backend[1])
