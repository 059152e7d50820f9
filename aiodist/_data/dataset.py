"""Datasets over arrays in memory: shuffled, batched, repeated, prefetched.

Shuffle, batch and repeat are **stages**: pure functions of indices that do not see the data. They pass on **runs**,
integer arrays whose first axis counts elements. An element is one example's index before the first `batch`, and an
array of indices after it. The data are indexed only when an element is taken. So a shuffle moves eight bytes for each
example, and a stage handles a whole epoch in a few array operations.

The order depends only on the seed and on the **epoch**, which is the number of the iteration and of the repetition
within it. It does not depend on what other iterations have read, or on the progress of a background thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.options import integer
from aiodist._data.batches import common_size
from aiodist._data.prefetch import ElementIterator, Prefetched

Run: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
Epoch: TypeAlias = tuple[int, ...]
Upstream: TypeAlias = Callable[[Epoch], Iterator[Run]]
Stage: TypeAlias = Callable[[Upstream, Epoch], Iterator[Run]]
"""Yields the runs of an epoch, made from those of the previous stage."""


def _shuffle(seed: int, upstream: Upstream, epoch: Epoch) -> Iterator[Run]:
    """Yield all elements in random order."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=epoch))
    runs = [run for run in upstream(epoch) if len(run)]
    if len({run.shape[1:] for run in runs}) == 1:
        yield rng.permutation(np.concatenate(runs))
        return
    elements = [run[k : k + 1] for run in runs for k in range(len(run))]  # one is a short batch
    yield from (elements[k] for k in rng.permutation(len(elements)))


def _batch(size: int, drop_remainder: bool, upstream: Upstream, epoch: Epoch) -> Iterator[Run]:
    """Yield consecutive elements, stacked; the last batch may be short."""
    rest: Run | None = None
    for run in upstream(epoch):
        elements = run if rest is None or not len(rest) else _joined(rest, run)
        whole = len(elements) // size
        if whole:
            yield elements[: whole * size].reshape(whole, size, *elements.shape[1:])
        rest = elements[whole * size :]
    if rest is not None and len(rest) and not drop_remainder:
        yield rest[np.newaxis]


def _joined(rest: Run, run: Run) -> Run:
    if rest.shape[1:] != run.shape[1:]:
        raise ValueError(
            f"batches of {rest.shape[1]} and {run.shape[1]} elements cannot be stacked into one; make the first batch "
            "of the two with drop_remainder=True"
        )
    return np.concatenate([rest, run])


def _repeat(count: int | None, upstream: Upstream, epoch: Epoch) -> Iterator[Run]:
    """Yield all elements again and again; without a count endlessly, unless there are none."""
    for repetition in itertools.count() if count is None else range(count):
        found = 0
        for run in upstream((*epoch, repetition)):
            found += len(run)
            yield run
        if not found:
            return


class NumpyDataset:
    """A dataset of examples in NumPy arrays; `Strategy.experimental_make_numpy_dataset` makes one.

    It is an iterable and an async iterable. Its elements are single examples until `batch` stacks them. Each method
    returns a new dataset and leaves this one unchanged; methods apply in the order in which they are written::

        strategy.experimental_make_numpy_dataset((images, labels)).shuffle(seed=0).batch(32).prefetch(2)

    The arrays are not copied; they are read during iteration. Elements are copies.

    Args:
        arrays: a nest of arrays with equal sizes along the first axis, which is the number of examples.

    Raises:
        TypeError: a leaf is not a NumPy array.
        ValueError: the sizes along the first axis differ, an array has no axis, or there are no arrays.
    """

    def __init__(self, arrays: Any) -> None:
        self._leaves, self._structure = nests.flatten(arrays)
        self._size = common_size(self._leaves, self._structure, "numpy_input")
        for leaf, path in zip(self._leaves, nests.leaf_paths(self._structure, "numpy_input"), strict=True):
            if not isinstance(leaf, np.ndarray):
                raise TypeError(f"{path} must be a NumPy array, got an object of type {type(leaf).__name__}")
        self._stages: tuple[Stage, ...] = ()
        self._endless = False
        self._ahead = 0
        self._iterations = itertools.count()

    def _with(self, *stages: Stage, **changed: Any) -> NumpyDataset:
        """Return a copy with further stages and changed attributes, which counts its own iterations."""
        made = copy(self)
        vars(made).update(_stages=(*self._stages, *stages), _iterations=itertools.count(), **changed)
        return made

    def shuffle(self, seed: int) -> NumpyDataset:
        """Return a dataset with the elements in random order.

        Each iteration and each repetition has an order of its own. It depends only on the seed, on the number of
        earlier iterations of this dataset, and on the repetition.

        Args:
            seed: an int of 0 or more.

        Raises:
            TypeError, ValueError: ``seed`` is not an int, or negative; the dataset is endless.
        """
        if self._endless:
            raise ValueError("an endless dataset cannot be shuffled; write .shuffle(seed) before .repeat()")
        return self._with(partial(_shuffle, integer("seed", seed, 0)))

    def batch(self, n: int, drop_remainder: bool = False) -> NumpyDataset:
        """Return a dataset whose elements are n consecutive elements of this one, stacked along a new first axis.

        Args:
            n: the size of a batch, at least 1.
            drop_remainder: whether to leave out a last batch of fewer than n.

        Raises:
            TypeError, ValueError: ``n`` is not an int, or less than 1; while iterating, batches of different sizes
                cannot be batched again.
        """
        stage = partial(_batch, integer("n", n, 1), drop_remainder)
        return self._with(stage, _ahead=-(-self._ahead // n))  # elements prefetched so far, in batches

    def repeat(self, k: int | None = None) -> NumpyDataset:
        """Return a dataset that repeats this one k times, or endlessly.

        Args:
            k: the number of repetitions; None: endlessly, unless there are no elements.

        Raises:
            TypeError, ValueError: ``k`` is not an int, or negative.
        """
        count = None if k is None else integer("k", k, 0)
        return self._with(partial(_repeat, count), _endless=self._endless or count is None)

    def prefetch(self, k: int) -> NumpyDataset:
        """Return a dataset with the same elements, up to k of them made ahead of time in a background thread.

        Each iteration has a thread. It ends after the last element, or when the iterator is dropped because of a
        ``break``, an exception or a cancellation.

        Args:
            k: the number of elements, at least 1.

        Raises:
            TypeError, ValueError: ``k`` is not an int, or less than 1.
        """
        return self._with(_ahead=integer("k", k, 1))

    def __iter__(self) -> ElementIterator:
        elements = self._elements(next(self._iterations))
        return Prefetched(elements, self._ahead) if self._ahead else ElementIterator(elements)

    __aiter__ = __iter__

    def _elements(self, iteration: int) -> Iterator[Any]:
        upstream: Upstream = lambda _: iter([np.arange(self._size, dtype=np.intp)])  # noqa: E731
        for stage in self._stages:
            upstream = partial(stage, upstream)
        for run in upstream((iteration,)):
            for index in run:  # NumPy copies the rows for an array of indices, but not the row for a single one
                rows = [leaf[index] if index.ndim else leaf[index].copy() for leaf in self._leaves]
                yield self._structure.unflatten(rows)


NumpyDataset.__module__ = "aiodist"
