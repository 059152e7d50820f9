"""Helpers for tests of runs: strategies of n replicas, programs that run on each, held threads, warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

import aiodist
from aiodist import CollectiveError, CommunicationOptions, MirroredStrategy, ReplicaContext, get_replica_context
from aiodist._runtime import threads
from aiodist_kernels import policy

Program = Callable[[ReplicaContext], Awaitable[Any]]


def mirrored(
    count: int, order_check: str = "call_site", timeout: float | None = None, **settings: Any
) -> MirroredStrategy:
    """Return a strategy of that many replicas."""
    settings.setdefault("communication_options", CommunicationOptions(timeout_seconds=timeout))
    return MirroredStrategy([f"CPU:{k}" for k in range(count)], order_check=order_check, **settings)


def here() -> ReplicaContext:
    """Return the current replica context, which is not None."""
    context = get_replica_context()
    assert isinstance(context, ReplicaContext)
    return context


def replica() -> int:
    return here().replica_id_in_sync_group


async def turns(count: int = 10) -> None:
    """Let all other tasks run, that many times."""
    for _ in range(count):
        await checkpoint()


async def on_each(count: int, fn: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Any, ...]:
    """Run a function on that many replicas; return their local results."""
    strategy = mirrored(count, **settings)
    return strategy.experimental_local_results(await strategy.run(fn, args=args))


async def run(
    strategy: aiodist.Strategy, program: Program, options: CommunicationOptions | None = None
) -> tuple[Any, ...]:
    """Run a program that takes its context; return the local results."""

    def replica() -> Any:
        return program(here())

    return strategy.experimental_local_results(await strategy.run(replica, options=options))


async def results(replicas: int, program: Program, **settings: Any) -> tuple[Any, ...]:
    """Return the objects that a program that takes its context returns on each replica, of whatever structure."""
    found: list[Any] = [None] * replicas

    async def kept(ctx: ReplicaContext) -> None:
        found[ctx.replica_id_in_sync_group] = await program(ctx)

    await run(mirrored(replicas, **settings), kept)
    return tuple(found)


async def error_of(program: Program, replicas: int = 3, **settings: Any) -> CollectiveError:
    """Return the collective error that a run raises; the strategy must work afterwards."""
    strategy = mirrored(replicas, **settings)
    with pytest.raises(CollectiveError) as caught:
        await run(strategy, program)
    await still_works(strategy)
    return caught.value


def check_golden(golden: Path, error: CollectiveError, update: bool) -> None:
    """Compare an error's text with its golden file, or update that; the text fits on a screen."""
    golden, text = golden.with_suffix(".txt"), f"{type(error).__name__}: {error}\n"
    if update:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 24


async def still_works(strategy: aiodist.Strategy) -> None:
    """Check that a strategy can run again."""

    async def program(ctx: ReplicaContext) -> int:
        total = await ctx.all_reduce("SUM", np.array([ctx.replica_id_in_sync_group]))
        await ctx.barrier()
        return int(total[0])

    n = strategy.num_replicas_in_sync
    assert await run(strategy, program, CommunicationOptions(timeout_seconds=30)) == (n * (n - 1) // 2,) * n


class Relay:
    """Lets replicas act one after the other, in the order given.

    Use it as ``await relay.turn()``, then the act, then ``relay.pass_on()``, with nothing awaited between.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._turns = [anyio.Event() for _ in order]
        self._turns[0].set()

    async def turn(self) -> None:
        """Wait for this replica's turn."""
        await self._turns[self._order.index(replica())].wait()

    def pass_on(self) -> None:
        """Let the next replica have its turn."""
        after = self._order.index(replica()) + 1
        if after < len(self._order):
            self._turns[after].set()


class HeldThreads:
    """Replaces a run's worker threads: holds their jobs until the test releases them.

    Every all_reduce of 256 KiB and more goes to them.

    Attributes:
        given: the jobs.
        taken: the number of threads that are taken and not released.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[Callable[[], Any]] = []
        self.taken = 0
        monkeypatch.setattr(threads, "take", self._take)
        monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1)

    def _take(self, name: str) -> HeldThreads:
        self.taken += 1
        return self

    def submit(self, fn: Callable[[], Any]) -> None:
        self.given.append(fn)

    def release(self) -> None:
        assert not self.given, "the run ended before its work"
        self.taken -= 1

    async def wait(self) -> None:
        """Wait until there are jobs, and for some turns of the loop."""
        while not self.given:
            await checkpoint()
        await turns()

    def go_on(self) -> None:
        """Do all jobs, and those that they submit."""
        while self.given:
            self.given.pop(0)()


class Warned(NamedTuple):
    """One warning."""

    text: str
    category: type[Warning]
    file: str
    line: int


@contextmanager
def warned() -> Iterator[list[Warned]]:
    """Gather warnings, whatever the filters, which all threads share and libraries replace."""
    found: list[Warned] = []

    def warn_explicit(text: Any, category: type[Warning], file: str, line: int, *_: Any, **__: Any) -> None:
        found.append(Warned(str(text), category, file, line))

    def warn(text: Any, category: type[Warning] = UserWarning, stacklevel: int = 1, **_: Any) -> None:
        frame = sys._getframe(stacklevel)
        warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "warn_explicit", warn_explicit)
        patch.setattr(warnings, "warn", warn)
        yield found
