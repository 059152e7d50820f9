"""Transfers: what workers exchange, flat and contiguous, and how it is read when it comes.

Whoever moves a transfer takes from it what this worker contributes, and gives it what all have contributed. Nothing is
copied that can be moved from where it lies, or read where it came to.

A **reduction** has one row a worker: the left fold, in the accumulator, of what its replicas contribute; an ordered one
has more (`ordered`). The rows of all workers become one, which is scaled and rounded at the end. All this goes range by
range, so that nothing of the size of a whole value is ever folded, copied or rounded at one go. The others move values
as bytes, by a codec a leaf: to all workers (**gathering**), or parts of them for each worker (**exchange**).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate as running_sums
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.leaves import LeafMark, LeafType
from aiodist._arrays.slices import IndexedSlices
from aiodist._collectives.host import frozen, part, put_together
from aiodist._collectives.ordered import Tree, fold_into, forest_of
from aiodist._collectives.plan import LeafPlan
from aiodist_kernels import ReduceOp
from aiodist_kernels.numpy_tier import finished, quietly
from aiodist_kernels.pool import results as pool
from aiodist_kernels.rules import Rule

Array = np.ndarray[Any, Any]
DType: TypeAlias = np.dtype[Any]

_BLOCK: Final = 256 * 1024
_CHARACTER: Final = {"U": 4, "S": 1}
"""The bytes of a character, by the kind of the dtype."""
_FEW: Final = 1 << 16
"""Bytes that are copied sooner than anybody finds out how they lie."""


@dataclass(frozen=True, eq=False)
class Members:
    """Who takes part."""

    rank: int  # this worker's place among those that have replicas in it
    ids: tuple[tuple[int, ...], ...]  # by rank, the positions of a worker's replicas among all, ascending

    @property
    def own(self) -> tuple[int, ...]:
        """The positions of this worker's replicas."""
        return self.ids[self.rank]

    @cached_property
    def replicas(self) -> int:
        """How many replicas there are."""
        return sum(map(len, self.ids))


@lru_cache(maxsize=64)  # workers in one process, of which there may be thousands, share it
def _alike(count: int, workers: int) -> tuple[int, ...]:
    return (count,) * workers


# Reductions.


class Part(NamedTuple):
    """A leaf of a reduction."""

    rule: Rule  # how it is reduced
    arrays: Sequence[Array]  # the local replicas', in their order; or one fold of them, in the accumulator

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(self.arrays[0].size)


class Reduction:
    """Rows to be reduced over the workers: leaves of one accumulator, one behind the other.

    Attributes:
        op: SUM, PRODUCT, MIN or MAX.
        dtype: the accumulator.
        size: how many elements a row has.
        rows: by rank, how many rows a worker contributes.
        engine_may_reduce: the order in which rows become one does not matter.
        cost: about how many bytes could be moved in the time that it takes to fold this worker's rows.
    """

    def __init__(self, op: ReduceOp, leaves: Sequence[Part], members: Members, *, ordered: bool = False) -> None:
        self.op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        self.dtype = leaves[0].rule.accumulator
        self.size = sum(leaf.size for leaf in leaves)
        self.engine_may_reduce = not ordered
        self.cost = sum(kernels.cost(self.op, leaf.arrays[0].dtype, leaf.size, len(leaf.arrays)) for leaf in leaves)
        self._leaves = leaves
        self._flattened: list[list[Array]] | None = None
        self._room: tuple[Array | None, list[Array]] | None = None
        self._replicas = members.replicas
        self._forest = forest_of(members.ids) if ordered else None
        self.rows: Sequence[int] = _alike(1, len(members.ids))
        self._own_rows: Sequence[tuple[slice, Tree | None]] = [(slice(None), None)]
        if self._forest is not None:
            self.rows, self._own_rows = self._forest.rows, self._forest.parts(members.rank)

    def own(self, begin: int, end: int) -> Array | None:
        """Return a range of this worker's row as it lies in memory; None where something has to be made of it."""
        if len(self._own_rows) > 1:
            return None
        index, low, high, _ = next(self._ranges(begin, end))
        arrays = self._flat[index]
        if len(arrays) > 1 or high - low < end - begin or arrays[0].dtype != self.dtype:
            return None
        found = arrays[0][low:high]
        if not (found.flags.c_contiguous and found.flags.aligned):
            return None
        return found.view(self.dtype)  # there are equal dtypes of other names, of which an engine may know one

    def fold(self, begin: int, end: int, out: Array) -> None:
        """Fold a range of this worker's rows, one behind the other."""
        size, step = end - begin, _BLOCK // self.dtype.itemsize  # a cache holds what is folded at a time
        for number, (places, tree) in enumerate(self._own_rows):
            row = out[number * size : (number + 1) * size]
            for index, low, high, at in self._ranges(begin, end):
                arrays = self._flat[index][places]
                for a in range(low, high, step):
                    b = min(a + step, high)
                    self._fold([array[a:b] for array in arrays], tree, row[at + a - low : at + b - low])

    def _fold(self, arrays: Sequence[Array], tree: Tree | None, out: Array) -> None:
        if len(arrays) == 1:
            np.copyto(out, arrays[0])
            return
        parts = [array.astype(self.dtype, copy=False) for array in arrays]
        if tree is None:
            kernels.reduce(self.op, parts, out=out)
        else:
            fold_into(tree, self.op, parts, out)

    def combine(self, rows: Sequence[Array]) -> Array:
        """Return one row of all workers', by rank; it lies in one of them."""
        if self._forest is not None:
            return self._forest.combine(self.op, rows)
        return kernels.reduce(self.op, rows, out=rows[0]) if len(rows) > 1 else rows[0]

    def room(self, begin: int, end: int) -> Array | None:
        """Return where the total of a range may lie for its result to lie there, too; None where it cannot."""
        total, _ = self._made()
        return None if total is None else total[begin:end]

    def finish(self, begin: int, end: int, total: Array) -> None:
        """Make a range of the results of its total, which is spoilt."""
        _, results = self._made()
        for index, low, high, at in self._ranges(begin, end):
            row, out = total[at : at + high - low], results[index][low:high]
            result = quietly(finished, self._leaves[index].rule, row, self._replicas)
            if not np.may_share_memory(result, out):
                out[...] = result

    def results(self) -> list[Array]:
        """Return the leaves' results, all ranges of which are finished."""
        of_leaves = zip(self._leaves, self._made()[1], strict=True)
        return [frozen(flat.reshape(leaf.arrays[0].shape)) for leaf, flat in of_leaves]

    @property
    def _flat(self) -> list[list[Array]]:
        """The arrays with one axis; those in another order than C's are copied, once."""
        if self._flattened is None:
            self._flattened = [[array.reshape(-1) for array in leaf.arrays] for leaf in self._leaves]
        return self._flattened

    def _made(self) -> tuple[Array | None, list[Array]]:
        """Return where totals lie that are results as they are, None where they are not; and the leaves' results."""
        if self._room is None:
            leaves, total = self._leaves, None
            if any(leaf.rule.result != self.dtype for leaf in leaves):
                results = [pool.empty((leaf.size,), leaf.rule.result) for leaf in leaves]
            else:
                total, ends = pool.empty((self.size,), self.dtype), running_sums(leaf.size for leaf in leaves)
                results = [total[end - leaf.size : end] for end, leaf in zip(ends, leaves, strict=True)]
            self._room = total, results
        return self._room

    def _ranges(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what a range has of each leaf: the leaf, the range in it, and where that lies."""
        at = 0
        for index, leaf in enumerate(self._leaves):
            low, high = max(begin - at, 0), min(end - at, leaf.size)
            if low < high:
                yield index, low, high, at + low - begin
            at += leaf.size


# Bytes.


class Codec:
    """How values of a leaf travel: as one array, or several, whose bytes are moved.

    Args:
        fields: shape and dtype of each array; None in a shape stands for a length that differs between replicas.
        split: returns the arrays of a value.
        join: returns the value of such arrays.

    Attributes:
        told: how many numbers a worker sends about a value: its length if that differs, and the width of its strings.
    """

    __slots__ = ("_fields", "_fixed", "join", "split", "told")

    def __init__(
        self,
        fields: Sequence[tuple[tuple[int | None, ...], DType]],
        split: Callable[[Any], Sequence[Array]],
        join: Callable[..., Any],
    ) -> None:
        self.split, self.join = split, join
        self.told = 2 if any(None in shape for shape, _ in fields) else 0
        self._fields = fields
        self._fixed = None if self.told else self._sized((0, 0))

    def lengths(self, value: Any) -> list[int]:
        """Return the numbers that are sent about a value."""
        shape, array = self._fields[0][0], self.split(value)[0]
        return [array.shape[shape.index(None)], array.dtype.itemsize]

    def nbytes(self, lengths: Sequence[int] = ()) -> int:
        """Return how many bytes a value has, from the numbers that were sent about it."""
        return sum([nbytes for _, _, nbytes in self._fixed or self._sized(lengths)])

    def write(self, value: Any) -> list[Array]:
        """Return a value's bytes, as they lie where they can be moved from there."""
        fields = self._fixed or self._sized(self.lengths(value))
        arrays = zip(self.split(value), fields, strict=True)
        return [np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8) for array, (_, dtype, _) in arrays]

    def read(self, data: Array, at: int, lengths: Sequence[int] = ()) -> tuple[Any, int]:
        """Return the value that begins there, in the same memory if it is an array, and where it ends."""
        arrays = []
        for shape, dtype, nbytes in self._fixed or self._sized(lengths):
            end = at + nbytes
            arrays.append(np.ndarray(shape, dtype, data[at:end]) if nbytes else np.empty(shape, dtype))
            at = end
        return self.join(*arrays), at

    def _sized(self, lengths: Sequence[int]) -> list[tuple[tuple[int, ...], DType, int]]:
        """Return shape, dtype and bytes of each array of a value."""
        length, width = lengths
        found = []
        for shape, dtype in self._fields:
            own = tuple([length if size is None else size for size in shape])
            characters = _CHARACTER.get(dtype.kind)
            sent = np.dtype((dtype.type, width // characters)) if characters and self.told else dtype
            found.append((own, sent, math.prod(own) * sent.itemsize))
        return found


NUMBERS: Final[dict[Any, DType]] = {
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
    bool: np.dtype(np.uint8),
}
"""Python's numbers, and how they travel."""

TOO_LARGE: Final = -(2**63)
"""Stands for an integer that does not fit; then all are given once more, by `ANY_INTEGER`."""

_NO_LENGTHS: Final = np.empty(0, np.int64)


@lru_cache(maxsize=1024)
def codec_of(shape: tuple[int | None, ...], dtype: Any, mark: LeafMark) -> Codec:
    """Return how values of a leaf travel."""
    if mark == LeafType.PYTHON_NUMBER:
        sent = NUMBERS[dtype]
        make = _fitting if dtype is int else lambda number: (np.array(number, sent),)
        return Codec([((), sent)], make, lambda array: dtype(array.item()))
    native = dtype.newbyteorder("=")
    if mark == LeafType.INDEXED_SLICES:
        fields = [((None,), np.dtype(np.int64)), ((None, *shape[1:]), native)]
        whole = None if shape[0] is None else shape
        return Codec(fields, attrgetter("indices", "values"), lambda i, v: IndexedSlices(v, i, whole))
    join = (lambda array: array[()]) if mark == LeafType.NUMPY_SCALAR else (lambda array: array)
    return Codec([(shape, native)], lambda value: (np.asarray(value),), join)


def _fitting(number: int) -> tuple[Array]:
    return (np.array(number if TOO_LARGE < number < -TOO_LARGE else TOO_LARGE),)


def bounded(number: int, op: ReduceOp | None, count: int) -> Array:
    """Return an integer as so many are reduced, exactly, and behind it what does not stay 0 if one is too large."""
    fits = abs(number) < 2**62 // count
    return np.array([number if fits else 0, 0 if fits else -1 if op is ReduceOp.MIN else 1])


def _digits(number: int) -> tuple[Array]:
    return (np.frombuffer(number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True), np.uint8),)


ANY_INTEGER: Final = Codec(
    [((None,), np.dtype(np.uint8))], _digits, lambda digits: int.from_bytes(digits.tobytes(), "little", signed=True)
)
"""Python's integers of any size."""


class Gathering:
    """Values of some replicas, given to all workers.

    Args:
        sources: by rank, the positions of a worker's replicas whose values are given.
        codecs: by leaf.
        columns: by leaf, the values of this worker's sources.

    Attributes:
        length_counts: by rank, how many numbers say what a worker contributes; 0 where its plan says that.
        lengths: these numbers, of this worker.
        values: by leaf, the values by position, once they are taken. Those of a single leaf lie where they came to.
    """

    def __init__(
        self, sources: Sequence[Sequence[int]], codecs: Sequence[Codec], columns: Sequence[Sequence[Any]]
    ) -> None:
        self._sources, self._codecs, self._columns = sources, codecs, columns
        told = sum(codec.told for codec in codecs)
        self.length_counts: Sequence[int] = _alike(0, len(sources))
        self.lengths = _NO_LENGTHS
        if told:
            self.length_counts = [told * len(positions) for positions in sources]
            values = [(codec, value) for codec, column in zip(codecs, columns, strict=True) for value in column]
            self.lengths = np.array(
                [n for codec, value in values if codec.told for n in codec.lengths(value)], np.int64
            )
        self._own: Array | None = None
        self.values: list[dict[int, Any]] = [{} for _ in codecs]

    def sizes(self, lengths: Sequence[Array]) -> list[int]:
        """Return by rank how many bytes a worker contributes that has these lengths."""
        if not any(codec.told for codec in self._codecs):
            nbytes = sum([codec.nbytes() for codec in self._codecs])
            return [nbytes * len(positions) for positions in self._sources]
        return [
            sum(self._codecs[leaf].nbytes(told) for leaf, _, told in self._items(rank, each))
            for rank, each in enumerate(lengths)
        ]

    def data(self) -> Array:
        """Return this worker's bytes."""
        of_leaves = zip(self._codecs, self._columns, strict=True)
        self._own = joined([piece for codec, column in of_leaves for value in column for piece in codec.write(value)])
        return self._own

    def take(self, lengths: Sequence[Array], parts: Sequence[Array]) -> None:
        """Take the lengths and bytes of all workers, by rank. The bytes are not written to afterwards."""
        for rank, (each, given) in enumerate(zip(lengths, parts, strict=True)):
            data, at = given.copy() if given is self._own else given, 0
            for leaf, position, told in self._items(rank, each):
                self.values[leaf][position], at = self._codecs[leaf].read(data, at, told)

    def _items(self, rank: int, lengths: Array) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Yield leaf, position and lengths of a worker's values, in the order in which they travel."""
        found, at = lengths.tolist(), 0
        for leaf, codec in enumerate(self._codecs):
            for position in self._sources[rank]:
                yield leaf, position, found[at : at + codec.told]
                at += codec.told


class Exchange:
    """Parts of some replicas' arrays, given to the replicas whose results are made of them.

    Args:
        members: who takes part.
        sources: by rank, the positions of a worker's replicas whose arrays are given.
        plans: by leaf; each result takes its own part of every source.
        specs: by leaf, shape and dtype of an array.
        columns: by leaf, the arrays of this worker's sources.

    Attributes:
        send_counts, receive_counts: by rank, how many bytes are for that worker, and come from it.
        most: how many any worker has for any other, at most.
        values: by leaf, for each local replica by position, its parts by the position that they come from.
    """

    def __init__(
        self,
        members: Members,
        sources: Sequence[Sequence[int]],
        plans: Sequence[LeafPlan],
        specs: Sequence[tuple[Sequence[int], DType]],
        columns: Sequence[Sequence[Array]],
    ) -> None:
        self._members, self._sources, self._plans, self._columns = members, sources, plans, columns
        self._codecs = []
        for plan, (shape, dtype) in zip(plans, specs, strict=True):
            axis, _, count = plan.cut(0)
            piece = (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])
            self._codecs.append(codec_of(piece, dtype, LeafType.NUMPY_ARRAY))
        nbytes = sum(codec.nbytes() for codec in self._codecs)
        self.send_counts = [len(ids) * len(sources[members.rank]) * nbytes for ids in members.ids]
        self.receive_counts = [len(members.own) * len(positions) * nbytes for positions in sources]
        self.most = nbytes * max(map(len, members.ids)) * max(map(len, sources))
        self.values: list[dict[int, dict[int, Array]]] = [{i: {} for i in members.own} for _ in plans]

    def data(self) -> Array:
        """Return this worker's bytes by rank: by leaf, by its replica, by our source."""
        of_leaves = list(zip(self._codecs, self._plans, self._columns, strict=True))
        return joined(
            [
                piece
                for ids in self._members.ids
                for codec, plan, column in of_leaves
                for taker in ids
                for array in column
                for piece in codec.write(part(np.asarray(array), plan.cut(taker)))
            ]
        )

    def take(self, data: Array) -> None:
        """Take the bytes of all workers, by rank; they are not written to afterwards."""
        at = 0
        for positions in self._sources:
            for codec, values in zip(self._codecs, self.values, strict=True):
                for taker in self._members.own:
                    for source in positions:
                        values[taker][source], at = codec.read(data, at)


Transfer: TypeAlias = Reduction | Gathering | Exchange


def joined(pieces: Sequence[Array]) -> Array:
    """Return bytes one behind the other: where they lie, if they lie like that; else a copy."""
    if len(pieces) == 1:
        return pieces[0]
    found = _as_they_lie(pieces)
    return np.concatenate(pieces or [np.empty(0, np.uint8)]) if found is None else found


def together(arrays: Sequence[Array], axis: int) -> Array:
    """Return arrays that have come one behind the other along an axis; a copy only where they lie otherwise."""
    first = arrays[0]
    if math.prod(first.shape[:axis]) == 1 and all(array.dtype == first.dtype for array in arrays):
        found = _as_they_lie([array for array in arrays if array.nbytes])
        if found is not None:
            length = sum(array.shape[axis] for array in arrays)
            whole = found.view(first.dtype).reshape((*first.shape[:axis], length, *first.shape[axis + 1 :]))
            if whole.flags.aligned:
                return whole
    return put_together(arrays, axis)


def _as_they_lie(arrays: Sequence[Array]) -> Array | None:
    """Return the bytes of arrays without gaps that lie one behind the other, if they do, and are not just a few."""
    if len(arrays) < 2 or sum([array.nbytes for array in arrays]) < _FEW:
        return None
    base = arrays[0].base
    if not isinstance(base, np.ndarray) or not base.flags.c_contiguous or any(x.base is not base for x in arrays):
        return None
    ends = list(running_sums([array.nbytes for array in arrays], initial=_address(arrays[0])))
    if [_address(array) for array in arrays] != ends[:-1]:
        return None
    return np.ndarray((ends[-1] - ends[0],), np.uint8, base, ends[0] - _address(base))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
