"""Plans: how the replicas' inputs become their results. A plan is data, the same for any shape and dtype.

There are three things that can become of arrays: they are folded into one, cut into equal parts, and put together:

    all_reduce       one fold of all                                 broadcast    the source's, as it is
    reduce_scatter   one fold of all, cut: a part for each           all_gather   all, put together
    scan             a fold of the first i + 1, for replica i
    all_to_all       all, cut: the i-th parts, put together, for replica i

An executor reads a plan leaf by leaf. It decides where and in how many steps each fold and copy is made, never what
comes out: a fold is a left fold in the order that the plan gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np


class Cut(NamedTuple):
    """One of so many equal parts of an array along an axis."""

    axis: int
    place: int
    parts: int


class Result(NamedTuple):
    """What one result is made of."""

    sources: Sequence[int]  # places of inputs among those that take part, behind them the plan's folds
    cut: Cut | None = None  # which part of each is taken; None for the whole
    axis: int | None = None  # along which they are put together, where they may be several


class Folded(NamedTuple):
    """What several replicas contributed of a leaf, folded already; it stands in the first one's place."""

    array: np.ndarray[Any, Any]  # in the accumulator's dtype
    dtype: np.dtype[Any]  # of what they contributed


class LeafPlan(NamedTuple):
    """What becomes of one leaf."""

    size: int  # how many inputs there are
    folds: tuple[Sequence[int], ...]  # for each total, the inputs that are folded into it, in this order
    results: tuple[Result, ...]  # one for all replicas, or one for each

    @property
    def is_one_fold(self) -> bool:
        """Whether everything is made of one fold of all inputs."""
        return self.folds == (range(self.size),) and all(result.sources == (self.size,) for result in self.results)

    @property
    def inputs(self) -> set[int]:
        """The inputs that results are made of, folded or not."""
        sources = {source for result in self.results for source in result.sources}
        folded = {place for number, fold in enumerate(self.folds) if self.size + number in sources for place in fold}
        return folded | {source for source in sources if source < self.size}

    def cut(self, place: int) -> Cut:
        """Return which part of each input the result at a place takes."""
        cut = self.results[place].cut
        assert cut is not None
        return cut


@lru_cache(maxsize=1024)
def all_reduce(size: int, _: Any = None) -> LeafPlan:
    """Plan an all_reduce of so many inputs."""
    return LeafPlan(size, (range(size),), (Result((size,)),))


@lru_cache(maxsize=1024)
def all_gather(size: int, axis: int) -> LeafPlan:
    """Plan an all_gather along an axis."""
    return LeafPlan(size, (), (Result(range(size), axis=axis),))


@lru_cache(maxsize=1024)
def broadcast(size: int, source: int) -> LeafPlan:
    """Plan a broadcast from the input at a place."""
    return LeafPlan(size, (), (Result((source,)),))


@lru_cache(maxsize=1024)
def reduce_scatter(size: int, axis: int) -> LeafPlan:
    """Plan a reduce_scatter along an axis."""
    return LeafPlan(size, (range(size),), tuple([Result((size,), Cut(axis, index, size)) for index in range(size)]))


@lru_cache(maxsize=1024)
def scan(size: int, _: Any = None) -> LeafPlan:
    """Plan a scan of so many inputs."""
    folds = tuple([range(index + 1) for index in range(size)])
    return LeafPlan(size, folds, tuple([Result((size + index,)) for index in range(size)]))


@lru_cache(maxsize=1024)
def all_to_all(size: int, axes: tuple[int, int]) -> LeafPlan:
    """Plan an all_to_all that cuts along the first axis and puts together along the second."""
    split, concat = axes
    return LeafPlan(size, (), tuple([Result(range(size), Cut(split, index, size), concat) for index in range(size)]))
