"""Distributed datasets, which yield a nest of per-replica values for each step of a training loop.

A step's values are the parts of one global batch, or a batch for each replica.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, Self

from anyio.lowlevel import checkpoint

from aiodist._arrays import nests
from aiodist._arrays.values import DistributedValues, IndexedSlices, PerReplica, regroup_data

_END: Final = object()


# Batches.


def cut(batch: Any, num_replicas: int, own: range) -> Any:
    """Cut a global batch of m examples into n parts of ceil(m/n), the last short or empty; return those of ``own``."""
    leaves, structure = nests.flatten_with_none(batch)
    length = -(-common_size(leaves, structure, "batch") // num_replicas)
    if num_replicas == 1:
        return batch

    def parts(leaf: Any) -> Any:
        each = [None if leaf is None else leaf[k * length : (k + 1) * length] for k in own]
        return each[0] if leaf is None or len(each) == 1 else PerReplica(each)

    return structure.unflatten(map(parts, leaves))


def group(batches: Sequence[Any], num_replicas: int) -> Any:
    """Group the batches of a step, of which the k-th is replica k's; the other replicas get one without rows."""
    missing = num_replicas - len(batches)
    return regroup_data([*batches, *[without_rows(batches[0]) for _ in range(missing)]], "batches")


def without_rows(batch: Any) -> Any:
    """Return a batch like this one without rows."""
    leaves, structure = nests.flatten_with_none(batch)
    common_size(leaves, structure, "batch")
    return structure.unflatten(None if leaf is None else leaf[:0] for leaf in leaves)


def common_size(leaves: Sequence[Any], structure: nests.Structure, root: str) -> int:
    """Return the common size of a nest's arrays along the first axis."""
    sizes: dict[int, int] = {}  # the first leaf of each size
    for index, leaf in enumerate(leaves):
        if leaf is None:
            continue
        shape = getattr(leaf, "shape", None)
        if not isinstance(shape, tuple) or isinstance(leaf, (DistributedValues, IndexedSlices)):
            raise TypeError(
                f"{nests.leaf_paths(structure, root)[index]} must be an array, whose rows are examples, got an object "
                f"of type {type(leaf).__qualname__}; a list of numbers becomes one with np.asarray"
            )
        if not shape:
            raise ValueError(
                f"{nests.leaf_paths(structure, root)[index]} must have a first axis, along which the examples lie, got "
                "a 0-dimensional array; is the dataset batched, e.g. with .batch(32)?"
            )
        sizes.setdefault(int(shape[0]), index)
    if len(sizes) != 1:
        paths = nests.leaf_paths(structure, root)
        found = ", ".join(f"{paths[index]} has {size}" for size, index in sizes.items())
        raise ValueError(
            f"{root} must hold arrays, all of the same size along their first axis; {found or 'there are none'}"
        )
    return next(iter(sizes))


# Datasets.


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
            ValueError: the size of the global batch is not divisible by the number of replicas.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
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
