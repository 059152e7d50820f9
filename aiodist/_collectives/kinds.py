"""The table of collectives: each kind's name, what it accepts, how many results it has, and its plan.

To add one, write a row in the table and a function that makes its plan. The row says what the kind accepts, so all
kinds raise the same errors; every executor can carry out any plan.

A plan says how the replicas' inputs become their results. It is data, the same for any shape and dtype. It can do three
things with arrays: fold them into one, cut them into equal parts, and concatenate them:

    all_reduce       one fold of all                                 broadcast    the source's, unchanged
    reduce_scatter   one fold of all, cut: a part for each           all_gather   all, concatenated
    scan             a fold of the first i + 1, for replica i
    all_to_all       all, cut: the i-th parts, concatenated, for replica i

An executor decides where and in how many steps it does each fold and copy, but never changes the result: a fold is a
left fold in the plan's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.leaves import LeafType, Spec
from aiodist._arrays.options import integer
from aiodist._core.text import clause
from aiodist_kernels import ReduceOp
from aiodist_kernels.rules import rule_for

# Plans.


class Cut(NamedTuple):
    """One of several equal parts of an array along an axis."""

    axis: int
    number: int
    parts: int

    def bounds(self, size: int) -> tuple[int, int]:
        """Return where the part begins and ends on an axis of that size."""
        step = size // self.parts
        return self.number * step, (self.number + 1) * step


class Result(NamedTuple):
    """The sources of one result."""

    sources: Sequence[int]  # indices of the inputs, followed by the plan's folds
    cut: Cut | None = None  # the part of each source that is taken; None for the whole
    axis: int | None = None  # along which several sources are concatenated


class LeafPlan(NamedTuple):
    """The plan of one leaf."""

    size: int  # the number of inputs
    folds: tuple[Sequence[int], ...]  # for each total, the inputs that are folded into it, in this order
    results: tuple[Result, ...]  # one for all replicas, or one for each

    @property
    def is_one_fold(self) -> bool:
        """Whether all results are made from one fold of all inputs."""
        return self.folds == (range(self.size),) and all(result.sources == (self.size,) for result in self.results)

    @property
    def inputs(self) -> set[int]:
        """The inputs that results are made from, folded or not."""
        sources = {source for result in self.results for source in result.sources}
        folded = {index for number, fold in enumerate(self.folds) if self.size + number in sources for index in fold}
        return folded | {source for source in sources if source < self.size}

    def cut(self, index: int) -> Cut:
        """Return the part of each input that a result takes, by the result's index."""
        cut = self.results[index].cut
        assert cut is not None
        return cut


def all_reduce_plan(size: int, _: Any = None) -> LeafPlan:
    """Plan an all_reduce."""
    return LeafPlan(size, (range(size),), (Result((size,)),))


def all_gather_plan(size: int, axis: int) -> LeafPlan:
    """Plan an all_gather along an axis."""
    return LeafPlan(size, (), (Result(range(size), axis=axis),))


def broadcast_plan(size: int, source: int) -> LeafPlan:
    """Plan a broadcast from the input at an index."""
    return LeafPlan(size, (), (Result((source,)),))


def reduce_scatter_plan(size: int, axis: int) -> LeafPlan:
    """Plan a reduce_scatter along an axis."""
    return LeafPlan(size, (range(size),), tuple([Result((size,), Cut(axis, index, size)) for index in range(size)]))


def scan_plan(size: int, _: Any = None) -> LeafPlan:
    """Plan a scan."""
    folds = tuple([range(index + 1) for index in range(size)])
    return LeafPlan(size, folds, tuple([Result((size + index,)) for index in range(size)]))


def all_to_all_plan(size: int, axes: tuple[int, int]) -> LeafPlan:
    """Plan an all_to_all that cuts along the first axis and concatenates along the second."""
    split, concat = axes
    return LeafPlan(size, (), tuple([Result(range(size), Cut(split, index, size), concat) for index in range(size)]))


# Kinds.


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of collective.

    ``plan`` makes a leaf's plan from the number of inputs and the leaf's detail. A kind that computes nothing from
    values, like a barrier, has no plan, nor does one whose result a user's function computes.
    """

    name: str  # of the method of a replica context
    plan: Callable[[int, Any], LeafPlan] | None = None
    by_leaf: bool = False  # the detail is an axis for each leaf, or two: to cut along, and to concatenate along
    from_one: bool = False  # the detail is the position of the source
    takes_slices: bool = False  # it takes `IndexedSlices`
    cut: str | None = None  # the name of the axis along which each replica gets an equal part
    shared: bool = True  # one result serves all replicas; otherwise there is one for each

    def __repr__(self) -> str:
        return self.name


ALL_REDUCE: Final = Kind("all_reduce", all_reduce_plan, takes_slices=True)
ALL_GATHER: Final = Kind("all_gather", all_gather_plan, by_leaf=True)
BROADCAST: Final = Kind("broadcast", broadcast_plan, from_one=True)
REDUCE_SCATTER: Final = Kind("reduce_scatter", reduce_scatter_plan, by_leaf=True, cut="axis", shared=False)
SCAN: Final = Kind("scan", scan_plan, shared=False)
ALL_TO_ALL: Final = Kind("all_to_all", all_to_all_plan, by_leaf=True, cut="split_axis", shared=False)
BARRIER: Final = Kind("barrier")
JOIN: Final = Kind("join")
MERGE_CALL: Final = Kind("merge_call", shared=False)


class Collective(NamedTuple):
    """The collective that replicas request together."""

    kind: Kind
    op: ReduceOp | None = None  # for kinds that take one
    detail: Any = None  # see `Kind`; axes count from the front
    spec: Spec | None = None  # of each replica's value; None if there is no value

    def check(self, size: int) -> None:
        """Check that it works for a number of replicas."""
        kind, spec = self.kind, self.spec
        if spec is None:
            return
        for dtype, mark in zip(spec.dtypes, spec.marks, strict=True):
            check_leaf(kind, self.op, dtype, mark)
        if kind.cut is not None:
            for shape, detail in zip(spec.shapes, self.detail, strict=True):
                axis = detail[0] if isinstance(detail, tuple) else detail
                if (shape[axis] or 0) % size:
                    raise ValueError(
                        f"the size along {kind.cut}={axis} must be divisible by the {size} replicas, got {shape[axis]} "
                        f"in shape {tuple(shape)}; pad it, or cut it before the call"
                    )
        if kind.from_one and not 0 <= self.detail < size:
            raise ValueError(f"source must be a replica id from 0 to {size - 1}, got {self.detail}")

    def check_present(self, absent: Sequence[int]) -> None:
        """Check that it works without the replicas at some positions, which have joined."""
        kind = self.kind
        if kind.shared and not (kind.from_one and self.detail in absent):
            return
        which = f"replica {self.detail}'s value" if kind.from_one else "a value of every replica"
        raise ValueError(
            f"{kind.name} needs {which}, and {clause(absent, 'has')} joined; make it before the first joins, or after "
            "the last has"
        )

    def without(self, absent: Sequence[int]) -> Collective:
        """Return it for the replicas that have not joined: the source becomes an index among these."""
        if not absent or not self.kind.from_one:
            return self
        return self._replace(detail=self.detail - sum(position < self.detail for position in absent))

    def of(self, indices: Sequence[int]) -> Collective:
        """Return it for some of the leaves, as a nest."""
        assert self.spec is not None
        detail = tuple([self.detail[index] for index in indices]) if self.kind.by_leaf else self.detail
        return self._replace(detail=detail, spec=self.spec.of(indices))

    def plans(self, size: int) -> list[LeafPlan]:
        """Return the plan of each leaf, for a number of inputs."""
        if self.kind.plan is None or self.spec is None:
            return []
        details = self.detail if self.kind.by_leaf else (self.detail,) * len(self.spec.shapes)
        return [_leaf_plan(self.kind.plan, size, detail) for detail in details]


@lru_cache(maxsize=1024)  # there may be hundreds of leaves with the same plan
def _leaf_plan(plan: Callable[[int, Any], LeafPlan], size: int, detail: Any) -> LeafPlan:
    return plan(size, detail)


def check_leaf(kind: Kind, op: ReduceOp | None, dtype: Any, mark: Any) -> None:
    """Check that a kind, with its op, takes leaves of a dtype; only SUM and MEAN reduce `IndexedSlices`."""
    if mark != LeafType.INDEXED_SLICES:
        if op is not None:
            kernels.result_dtype(op, dtype)
        elif isinstance(dtype, np.dtype) and dtype.hasobject:
            raise TypeError(
                f"expected arrays of numbers, got dtype {dtype}: Python objects would be shared by the replicas; "
                "return them from the replica function, or pass them to merge_call"
            )
    elif op is None or not kind.takes_slices:
        raise TypeError(f"{kind.name} does not take IndexedSlices, all_reduce does; pass their .values and .indices")
    elif op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"IndexedSlices are reduced by SUM or MEAN, in which rows that are not there count as zeros; got {op.name}"
        )
    else:
        rule_for(op, dtype)


# Axes, as callers give them.


def normalized_axis(axis: Any, rank: int, what: str = "axis") -> int:
    """Return an axis counted from the front."""
    index = axis if type(axis) is int else integer(what, axis)
    if rank == 0:
        raise ValueError(f"{what}={index} needs arrays with at least one axis, got a scalar; pass np.array([value])")
    if not -rank <= index < rank:
        axes = "1 axis" if rank == 1 else f"{rank} axes"
        raise ValueError(f"{what} must be from {-rank} to {rank - 1} for an array with {axes}, got {index}")
    return index % rank


def axes_of(spec: Spec, axis: Any, what: str = "axis") -> tuple[int, ...]:
    """Return the axis of each leaf, counted from the front."""
    return tuple([normalized_axis(axis, len(shape), what) for shape in spec.shapes])


def split_axes_of(spec: Spec, split_axis: Any, concat_axis: Any) -> tuple[tuple[int, int], ...]:
    """Return for each leaf the axes of an all_to_all, counted from the front; see `axes_of`."""
    splits, concats = axes_of(spec, split_axis, "split_axis"), axes_of(spec, concat_axis, "concat_axis")
    return tuple(zip(splits, concats, strict=True))


def ragged(spec: Spec, axes: Sequence[int]) -> Spec:
    """Return a spec of leaves whose sizes along their axes may differ between replicas."""
    shapes = [(*shape[:axis], None, *shape[axis + 1 :]) for shape, axis in zip(spec.shapes, axes, strict=True)]
    return spec._replace(shapes=tuple(shapes))
