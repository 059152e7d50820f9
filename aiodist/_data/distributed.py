"""Distributed datasets, which yield a nest of per-replica values for each step of a training loop.

A step's values are the parts of one global batch, or a batch for each replica.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, Self

from anyio.lowlevel import checkpoint

from aiodist._arrays.options import integer

_END: Final = object()


@dataclass(frozen=True, slots=True)
class InputContext:
    """The argument of a dataset function; see `Strategy.distribute_datasets_from_function`.

    Attributes:
        num_input_pipelines: the number of calls of the function, over all workers.
        input_pipeline_id: the number of this call, from 0.
        num_replicas_in_sync: the number of replicas.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of a replica's examples in a global batch.

        Raises:
            TypeError: the size of the global batch is not an int.
            ValueError: it is not divisible by the number of replicas.
        """
        size, rest = divmod(integer("global_batch_size", global_batch_size), self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"global_batch_size must be divisible by the number of replicas, {self.num_replicas_in_sync}, "
                f"got {global_batch_size}"
            )
        return size


@dataclass(frozen=True, slots=True)
class ValueContext:
    """The argument of a value function; see `Strategy.experimental_distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: the id of the replica that the value is for, from 0.
        num_replicas_in_sync: the number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True, slots=True)
class StepRule:
    """How a source's batches become steps."""

    size: int  # the number of batches in a step; the last step may have fewer
    assemble: Callable[[Sequence[Any]], Any]  # makes per-replica values of a step's batches
    check: Callable[[], None]  # raises inside a replica
    fill_up: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]] | None = None  # agrees with other workers on the end

    def check_plain(self) -> None:
        """Check that a step may be taken here without awaiting anything."""
        self.check()
        if self.fill_up is not None:
            raise TypeError(
                "the workers agree at every step whether any has data left, and that is awaited: iterate with "
                "`async for batch in dataset`"
            )


class DistributedDataset:
    """A dataset of nests of per-replica values, one for each step; pass them to `Strategy.run` as arguments.

    It is an async iterable, and also a plain one if its source is. A plain source blocks the event loop while it makes
    a batch. Each iteration starts the source again, so a source that is an iterator can be iterated only once.

    `Strategy.experimental_distribute_dataset` and `Strategy.distribute_datasets_from_function` make one.

    Raises:
        TypeError: the source is not iterable.
    """

    def __init__(self, source: Any, rule: StepRule) -> None:
        if not isinstance(source, (Iterable, AsyncIterable)):
            raise TypeError(
                f"expected an iterable or async iterable of batches, got an object of type {type(source).__name__}"
            )
        self._source: Iterable[Any] | AsyncIterable[Any] = source
        self._rule = rule

    def __iter__(self) -> DistributedIterator:
        self._rule.check_plain()
        if not isinstance(self._source, Iterable):
            raise TypeError(
                f"the source of this dataset ({type(self._source).__name__}) is asynchronous: iterate with "
                "`async for batch in dataset`"
            )
        return DistributedIterator(iter(self._source), self._rule)

    def __aiter__(self) -> DistributedIterator:
        self._rule.check()
        batches = aiter(self._source) if isinstance(self._source, AsyncIterable) else iter(self._source)
        return DistributedIterator(batches, self._rule)


class DistributedIterator:
    """An iterator over a `DistributedDataset`: ``await anext(iterator)``, or ``next(iterator)`` with a plain source.

    A cancellation in the middle of a step loses no batch: the next call continues the step. (But an async generator
    that is cancelled while it waits has ended, as always in Python.) `aclose` closes the source's iterator at once;
    otherwise it ends when this one is dropped.
    """

    def __init__(self, batches: Any, rule: StepRule) -> None:
        self._batches = batches
        self._rule = rule
        self._taken: list[Any] = []  # for the next step

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._rule.check_plain()
        if not hasattr(self._batches, "__next__"):
            raise TypeError("this iterator's source is asynchronous: take the next batch with `await anext(iterator)`")
        taken, self._taken = self._taken, []  # as in `__anext__`, they are lost if the source raises
        batches = list(islice(chain(taken, self._batches), self._rule.size))
        if not batches:
            raise StopIteration
        return self._rule.assemble(batches)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        self._rule.check()
        try:
            while len(self._taken) < self._rule.size and (batch := await self._next_batch()) is not _END:
                self._taken.append(batch)
        except Exception:
            self._taken = []
            raise
        if self._rule.fill_up is not None:
            self._taken = list(await self._rule.fill_up(self._taken))
        batches, self._taken = self._taken, []
        if not batches:
            raise StopAsyncIteration
        return self._rule.assemble(batches)

    async def _next_batch(self) -> Any:
        if hasattr(self._batches, "__anext__"):
            return await anext(self._batches, _END)
        await checkpoint()
        return next(self._batches, _END)

    async def aclose(self) -> None:
        """Close the source's iterator if it can be closed, as a generator can."""
        if hasattr(self._batches, "aclose"):
            await self._batches.aclose()
        elif hasattr(self._batches, "close"):
            self._batches.close()


InputContext.__module__ = ValueContext.__module__ = "aiodist"
DistributedDataset.__module__ = DistributedIterator.__module__ = "aiodist"
