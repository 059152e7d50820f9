"""Datasets over arrays in memory: shuffled, batched, repeated, prefetched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from anyio.lowlevel import checkpoint

from aiodist._arrays import nests
from aiodist.data.cutting import common_size
from aiodist.data.prefetch import Prefetched
from aiodist.data.stages import Batch, Repeat, Shuffle, Stage, index_runs


class NumpyDataset:
    """Examples that lie in NumPy arrays; `Strategy.experimental_make_numpy_dataset` gives one.

    It is iterable, and asynchronously iterable. Its elements are single examples until `batch` stacks them. Each method
    returns a new dataset and leaves this one as it is; they apply in the order in which they are written::

        strategy.experimental_make_numpy_dataset((images, labels)).shuffle(seed=0).batch(32).prefetch(2)

    Elements are copies, the arrays are not: they are read while the dataset is iterated.

    Args:
        arrays: a nest of arrays with the same size along their first axis, which counts the examples.

    Raises:
        TypeError: a leaf is no NumPy array.
        ValueError: the sizes along the first axis differ; an array has no first axis; there is none at all.
    """

    def __init__(self, arrays: Any) -> None:
        nests.register_dicts(arrays)
        self._leaves, self._structure = nests.flatten(arrays)
        self._size = common_size(self._leaves, self._structure, "numpy_input")
        for leaf, path in zip(self._leaves, nests.leaf_paths(self._structure, "numpy_input"), strict=True):
            if not isinstance(leaf, np.ndarray):
                raise TypeError(f"{path} must be a NumPy array, got an object of type {type(leaf).__name__}")
        self._stages: tuple[Stage, ...] = ()
        self._ahead = 0
        self._iterations = itertools.count()

    def shuffle(self, seed: int) -> NumpyDataset:
        """Return a dataset with the elements in random order.

        The order is another one at each iteration, and in each repetition. It depends on the seed, on how often this
        dataset has been iterated before, and on the repetition, and on nothing else.

        Args:
            seed: from 0.

        Raises:
            TypeError: the seed is no integer.
            ValueError: it is negative; the dataset is endless.
        """
        if any(isinstance(stage, Repeat) and stage.count is None for stage in self._stages):
            raise ValueError("an endless dataset cannot be shuffled; write .shuffle(seed) before .repeat()")
        return self._with(Shuffle(_checked("seed", seed, 0)))

    def batch(self, n: int, drop_remainder: bool = False) -> NumpyDataset:
        """Return a dataset whose elements are n consecutive ones of this, stacked.

        Args:
            n: how many, from 1.
            drop_remainder: whether a last batch of less than n is left out.

        Raises:
            TypeError: n is no integer.
            ValueError: it is below 1. (While iterating: batches of unequal size cannot be batched again.)
        """
        batched = self._with(Batch(_checked("n", n, 1), bool(drop_remainder)))
        batched._ahead = -(-self._ahead // n)  # what was prefetched before, in batches
        return batched

    def repeat(self, k: int | None = None) -> NumpyDataset:
        """Return a dataset that goes through this one k times, or without end.

        Args:
            k: how often, from 0; None: without end, unless there are no elements.

        Raises:
            TypeError: k is no integer.
            ValueError: it is negative.
        """
        return self._with(Repeat(None if k is None else _checked("k", k, 0)))

    def prefetch(self, k: int) -> NumpyDataset:
        """Return a dataset with the same elements, up to k of them made ahead of time in a background thread.

        Each iteration has a thread. It ends with the iteration: at the last element, or when the iterator is dropped,
        by a `break`, an exception or a cancellation.

        Args:
            k: how many elements, from 1.

        Raises:
            TypeError: k is no integer.
            ValueError: it is below 1.
        """
        prefetched = self._with()
        prefetched._ahead = _checked("k", k, 1)
        return prefetched

    def _with(self, *stages: Stage) -> NumpyDataset:
        other = NumpyDataset.__new__(NumpyDataset)
        other._leaves, other._structure, other._size = self._leaves, self._structure, self._size
        other._stages = (*self._stages, *stages)
        other._ahead = self._ahead
        other._iterations = itertools.count()
        return other

    def __iter__(self) -> Steps | Prefetched:
        elements = self._elements(next(self._iterations))
        return Prefetched(elements, self._ahead) if self._ahead else Steps(elements)

    def __aiter__(self) -> Steps | Prefetched:
        return iter(self)

    def __repr__(self) -> str:
        ahead = f", {self._ahead} ahead" if self._ahead else ""
        return f"<NumpyDataset: {self._size} examples{''.join(f', {stage}' for stage in self._stages)}{ahead}>"

    def _elements(self, iteration: int) -> Iterator[Any]:
        for run in index_runs(self._size, self._stages, (iteration,)):
            for index in run:
                yield nests.unflatten(self._structure, [_rows(leaf, index) for leaf in self._leaves])


class Steps:
    """An iterator over a plain one, asynchronous too: then each step lets other tasks run, and can be cancelled."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._elements)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        await checkpoint()
        for element in self._elements:
            return element
        raise StopAsyncIteration


def _rows(array: np.ndarray[Any, Any], index: Any) -> Any:
    """Return a copy of what stands at an index or at an array of indices."""
    return array[index] if index.ndim else array[index].copy()


def _checked(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    number: int = value.__index__()
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


NumpyDataset.__module__ = "aiodist"
