"""A trainer, wrappers and helpers in a file of their own, through which programs make collectives."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from aiodist import ReplicaContext
from tests.faults.case import LOSS


class Trainer:
    """A loop over epochs and batches, with hooks."""

    def __init__(self, ctx: ReplicaContext, batches: int = 2) -> None:
        self.ctx = ctx
        self.batches = batches

    async def fit(self, epochs: int, **hooks: Callable[[int], Awaitable[Any]]) -> None:
        for epoch in range(epochs):
            for step in range(self.batches):
                if "before_step" in hooks and await hooks["before_step"](step):
                    continue
                await self.step(LOSS * step)
            if "after_epoch" in hooks:
                await hooks["after_epoch"](epoch)
        await self.ctx.barrier(name="end of fit")

    async def step(self, gradient: Any) -> None:
        await self.ctx.all_reduce("MEAN", gradient)


async def average(ctx: ReplicaContext, value: Any, **more: Any) -> Any:
    return await ctx.all_reduce("MEAN", value, **more)


async def average_all(ctx: ReplicaContext, values: Iterable[Any]) -> list[Any]:
    return [await average(ctx, value) for value in values]


async def spread(ctx: ReplicaContext, depth: int) -> None:
    if depth:
        await ctx.all_reduce("SUM", LOSS)
        await spread(ctx, depth - 1)


def logged(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(function)
    async def wrapper(*args: Any) -> Any:
        return await function(*args)

    return wrapper


@asynccontextmanager
async def fenced(ctx: ReplicaContext) -> AsyncIterator[None]:
    await ctx.barrier()
    yield
    await ctx.barrier()


async def batches(count: int) -> AsyncIterator[np.ndarray]:
    for batch in range(count):
        yield LOSS * batch
