"""The stages of a dataset: shuffle, batch and repeat, as pure functions of indices.

A stage does not see the data. What flows through it are **runs**: integer arrays whose first axis counts elements. An
element is one example's index before the first `batch`, and an array of indices after it; only the indices of an
element that is taken are looked up in the data. So a shuffle moves eight bytes an example, and a whole epoch passes
through a stage in a few array operations.

The order depends on the seed, on the number of the iteration and on the repetition within it, and on nothing else:
what another iteration left unread, or how far a background thread had come, does not matter. Those numbers are the
**epoch**.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

Run: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
Epoch: TypeAlias = tuple[int, ...]
Upstream: TypeAlias = Callable[[Epoch], Iterator[Run]]


class Stage(Protocol):
    """What turns a stream of runs into another."""

    def runs(self, upstream: Upstream, epoch: Epoch) -> Iterator[Run]:
        """Yield the runs of one pass."""
        ...


@dataclass(frozen=True, slots=True)
class Shuffle:
    """All elements in random order."""

    seed: int

    def runs(self, upstream: Upstream, epoch: Epoch) -> Iterator[Run]:
        """Yield the runs of one pass."""
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=epoch))
        runs = [run for run in upstream(epoch) if len(run)]
        if len({run.shape[1:] for run in runs}) == 1:
            yield rng.permutation(np.concatenate(runs))
            return
        elements = [run[k : k + 1] for run in runs for k in range(len(run))]  # a short batch among them
        yield from (elements[k] for k in rng.permutation(len(elements)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive elements, stacked; the last batch may be short."""

    size: int
    drop_remainder: bool

    def runs(self, upstream: Upstream, epoch: Epoch) -> Iterator[Run]:
        """Yield the runs of one pass."""
        rest: Run | None = None
        for run in upstream(epoch):
            elements = run if rest is None or not len(rest) else _joined(rest, run)
            whole = len(elements) // self.size
            if whole:
                yield elements[: whole * self.size].reshape(whole, self.size, *elements.shape[1:])
            rest = elements[whole * self.size :]
        if rest is not None and len(rest) and not self.drop_remainder:
            yield rest[np.newaxis]


def _joined(rest: Run, run: Run) -> Run:
    if rest.shape[1:] != run.shape[1:]:
        raise ValueError(
            f"batches of {rest.shape[1]} and {run.shape[1]} elements cannot be stacked to one; make the first batch "
            "of the two with drop_remainder=True"
        )
    return np.concatenate([rest, run])


@dataclass(frozen=True, slots=True)
class Repeat:
    """The whole again and again; without a count for ever, unless there is nothing to repeat."""

    count: int | None

    def runs(self, upstream: Upstream, epoch: Epoch) -> Iterator[Run]:
        """Yield the runs of one pass."""
        for repetition in itertools.count() if self.count is None else range(self.count):
            found = False
            for run in upstream((*epoch, repetition)):
                found = found or bool(len(run))
                yield run
            if not found:
                return


def index_runs(size: int, stages: tuple[Stage, ...], epoch: Epoch) -> Iterator[Run]:
    """Yield the runs that come out of the last stage, over data with that many examples."""
    upstream: Upstream = partial(_all, size)
    for stage in stages:
        upstream = partial(stage.runs, upstream)
    return upstream(epoch)


def _all(size: int, epoch: Epoch) -> Iterator[Run]:  # noqa: ARG001  (the first of the streams)
    yield np.arange(size, dtype=np.intp)
