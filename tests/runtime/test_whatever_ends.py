"""Whatever replicas do at collectives ends in a result or in an error, on every event loop: nobody waits for ever."""

from __future__ import annotations

import gc
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiodist import CollectiveError, CollectiveHandle, ReplicaContext, ReplicaContextError
from tests.runtime.programs import mirrored, run, still_works

Loop = tuple[str, dict[str, Any]]
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
    """Does what comes to its mind, by a seed."""

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
            elif what in RARE and self.random.random() < 0.3 and what == "return":
                return
            elif what not in RARE or self.random.random() < 0.3:
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
    """Let dropped handles that stand in cycles warn where it is expected."""
    yield
    gc.collect()


@pytest.mark.usefixtures("collected")
@pytest.mark.every_loop
@pytest.mark.filterwarnings("ignore:replica . never awaited")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), replicas=st.integers(1, 5), alike=st.booleans())
def test_whatever_replicas_do_ends(anyio_backend: Loop, seed: int, replicas: int, alike: bool) -> None:
    """They do the same where they are ``alike``; none of them waits for ever."""

    async def main() -> None:
        strategy = mirrored(replicas)
        everyones: list[Any] = []
        with anyio.CancelScope() as outer:

            async def program(ctx: ReplicaContext) -> None:
                own = f"{seed}" if alike else f"{seed} {ctx.replica_id_in_sync_group}"
                await Actor(own, ctx, outer, everyones).act()

            with suppress(CollectiveError, OwnError, ReplicaContextError, ValueError, ExceptionGroup):
                await run(strategy, program)
        everyones.clear()
        await still_works(strategy)

    anyio.run(main, backend=anyio_backend[0], backend_options=anyio_backend[1])
