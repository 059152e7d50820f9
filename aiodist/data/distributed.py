"""Distributed datasets: what a strategy's loop iterates over, one nest of per-replica values a step."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Self

from anyio.lowlevel import checkpoint

from aiodist._core.errors import ReplicaContextError
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.current import current

_END: Final = object()

Assemble = Callable[[Sequence[Any]], Any]
FillUp = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


class DistributedDataset:
    """A dataset that gives, for each step, a nest of per-replica values: pass it to `Strategy.run` as an argument.

    It is asynchronously iterable, and iterable where its source is. A plain source is advanced in the event loop, which
    waits meanwhile. Each iteration begins one of the source, so a source that is an iterator itself serves only once.

    `Strategy.experimental_distribute_dataset` and `Strategy.distribute_datasets_from_function` give one.

    Args:
        source: an iterable or an async iterable of batches.
        per_step: how many of its batches make a step.
        assemble: makes a step's per-replica values of at most so many batches.
        fill_up: returns a step's batches, as the strategy's other workers have some or not; None without others.

    Raises:
        TypeError: the source is not iterable.
    """

    def __init__(self, source: Any, per_step: int, assemble: Assemble, fill_up: FillUp | None = None) -> None:
        if not isinstance(source, (Iterable, AsyncIterable)):
            raise TypeError(
                f"expected an iterable or async iterable of batches, got an object of type {type(source).__name__}"
            )
        self._source: Iterable[Any] | AsyncIterable[Any] = source
        self._per_step = per_step
        self._assemble = assemble
        self._fill_up = fill_up

    def __iter__(self) -> DistributedIterator:
        _refuse_inside_replica()
        if self._fill_up is not None:
            raise TypeError(
                "the workers agree at every step whether any has data left, and that is awaited: iterate with "
                "`async for batch in dataset`"
            )
        if not isinstance(self._source, Iterable):
            raise TypeError(
                f"the source of this dataset ({type(self._source).__name__}) is asynchronous: iterate with "
                "`async for batch in dataset`"
            )
        return DistributedIterator(iter(self._source), self._per_step, self._assemble)

    def __aiter__(self) -> DistributedIterator:
        _refuse_inside_replica()
        batches = aiter(self._source) if isinstance(self._source, AsyncIterable) else iter(self._source)
        return DistributedIterator(batches, self._per_step, self._assemble, self._fill_up)


class DistributedIterator:
    """An iterator of a `DistributedDataset`: `await anext(iterator)`, and `next(iterator)` where the source is plain.

    A cancellation in the midst of a step loses no batch: the next call goes on from there, where the source does (an
    async generator that is cancelled while it waits has ended: that is Python's rule). `close` or `aclose` end the
    source's iterator at once; one that is dropped ends by itself.

    Args:
        batches: the source's iterator.
        per_step: how many of its batches make a step.
        assemble: makes a step's per-replica values of at most so many batches.
        fill_up: as in `DistributedDataset`.
    """

    def __init__(self, batches: Any, per_step: int, assemble: Assemble, fill_up: FillUp | None = None) -> None:
        self._batches = batches
        self._per_step = per_step
        self._assemble = assemble
        self._fill_up = fill_up
        self._taken: list[Any] = []
        self._steps = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        _refuse_inside_replica()
        if not hasattr(self._batches, "__next__"):
            raise TypeError("this iterator's source is asynchronous: take the next batch with `await anext(iterator)`")
        try:
            while len(self._taken) < self._per_step and (batch := next(self._batches, _END)) is not _END:
                self._taken.append(batch)
        except Exception:
            self._taken.clear()
            raise
        if not self._taken:
            raise StopIteration
        return self._step()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        _refuse_inside_replica()
        try:
            while len(self._taken) < self._per_step and (batch := await self._next_batch()) is not _END:
                self._taken.append(batch)
        except Exception:
            self._taken.clear()
            raise
        if self._fill_up is not None:
            self._taken = list(await self._fill_up(self._taken))
        if not self._taken:
            raise StopAsyncIteration
        return self._step()

    async def _next_batch(self) -> Any:
        if hasattr(self._batches, "__anext__"):
            return await anext(self._batches, _END)
        await checkpoint()
        return next(self._batches, _END)

    def _step(self) -> Any:
        batches, self._taken = self._taken, []
        number, self._steps = self._steps, self._steps + 1
        try:
            return self._assemble(batches)
        except (TypeError, ValueError) as error:
            error.add_note(f"at step {number} of a distributed dataset, counted from 0")
            raise

    def close(self) -> None:
        """End the source's iterator, where it is plain and has an end of its own (as a generator has)."""
        self._taken.clear()
        if hasattr(self._batches, "close"):
            self._batches.close()

    async def aclose(self) -> None:
        """End the source's iterator, plain or asynchronous, where it has an end of its own."""
        if hasattr(self._batches, "aclose"):
            self._taken.clear()
            await self._batches.aclose()
        else:
            self.close()


def _refuse_inside_replica() -> None:
    here = current.get()
    if isinstance(here, ReplicaContext) and not here.strategy._is_default:
        raise ReplicaContextError(
            f"a distributed dataset was iterated inside replica {here.replica_id_in_sync_group}; "
            "each of its batches is one step for all replicas, so a replica that takes one takes the others' parts "
            "away: iterate outside, and pass the batch, "
            "`async for batch in dataset: await strategy.run(step, args=(batch,))`"
        )


DistributedDataset.__module__ = DistributedIterator.__module__ = "aiodist"
