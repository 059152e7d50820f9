"""Transfers: what workers exchange, flat and contiguous, and how it is read when it comes.

Whoever moves a transfer takes from it what this worker contributes, and gives it what all have contributed. Nothing is
copied that can be moved from where it lies, or read where it came to.

A **reduction** has one row a worker: the left fold, in the accumulator, of what its replicas contribute; an ordered one
has more (`ordered`). The rows of all workers become one, which is scaled and rounded at the end. All this goes range by
range, so that nothing of the size of a whole value is ever folded, copied or rounded at one go. The others move bytes:
of all workers to all (**gathering**), of one to all (**broadcast**), of each for each (**exchange**).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate as running_sums
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.leaves import LeafType
from aiodist._collectives.host import frozen, put_together
from aiodist._collectives.ordered import Tree, fold_into, forest_of
from aiodist_kernels import ReduceOp
from aiodist_kernels.pool import results as pool
from aiodist_kernels.rules import Finish, Rule, rounded, rule_for

Array = np.ndarray[Any, Any]
Column = Sequence[Any]
"""One leaf of the local replicas, in their order."""

Spec: TypeAlias = "tuple[tuple[int | None, ...], np.dtype[Any]]"
"""Shape and dtype of a leaf; one size may be None, for it differs."""

NUMBERS: Final[dict[Any, np.dtype[Any]]] = {
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
    bool: np.dtype(np.uint8),
}
"""Python's numbers that have a size, and how they travel."""

_BLOCK: Final = 256 * 1024
_NO_LENGTHS: Final = np.empty(0, np.int64)
_CHARACTER: Final = {"U": 4, "S": 1}
"""The bytes of a character, by the kind of the dtype."""


@dataclass(frozen=True, eq=False)
class Members:
    """Who takes part.

    Attributes:
        rank: this worker's place among those that have replicas in it.
        ids: by rank, the positions of a worker's replicas among all, ascending; all of them are somewhere.
    """

    rank: int
    ids: tuple[tuple[int, ...], ...]

    @property
    def own(self) -> tuple[int, ...]:
        """The positions of this worker's replicas."""
        return self.ids[self.rank]

    @cached_property
    def replicas(self) -> int:
        """How many replicas there are."""
        return sum(map(len, self.ids))

    @property
    def order(self) -> list[int]:
        """By position, the place of a replica among those of all workers, by rank."""
        positions = list(chain(*self.ids))
        return sorted(range(len(positions)), key=positions.__getitem__)

    @property
    def in_blocks(self) -> bool:
        """Whether each worker's replicas come behind those of the one before it."""
        return all(one[-1] < other[0] for one, other in pairwise(self.ids))


@lru_cache(maxsize=64)  # workers in one process, of which there may be thousands, share it
def _one_each(workers: int) -> tuple[int, ...]:
    return (1,) * workers


# Reductions.


class Part(NamedTuple):
    """A leaf of a reduction.

    Attributes:
        rule: how it is reduced.
        arrays: the local replicas', in their order; or one fold of them, in the accumulator.
        scalar: its result is a NumPy scalar.
    """

    rule: Rule
    arrays: Sequence[Array]
    scalar: bool = False

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
        self.op = op
        self.dtype = leaves[0].rule.accumulator
        self.size = sum(leaf.size for leaf in leaves)
        self.engine_may_reduce = not ordered
        self._leaves = leaves
        self._replicas = members.replicas
        self._forest = forest_of(members.ids) if ordered else None
        self.rows: Sequence[int] = _one_each(len(members.ids)) if self._forest is None else self._forest.rows
        whole: list[tuple[slice, Tree | None]] = [(slice(None), None)]
        self._parts = whole if self._forest is None else self._forest.parts(members.rank)
        self.cost = sum(kernels.cost(self.op, leaf.arrays[0].dtype, leaf.size, len(leaf.arrays)) for leaf in leaves)
        self._flat: list[list[Array]] | None = None
        self._direct = all(leaf.rule.result == leaf.rule.accumulator for leaf in leaves)
        self._total: Array | None = None
        self._results: list[Array] = []

    def own(self, begin: int, end: int) -> Array | None:
        """Return a range of this worker's row as it lies in memory; None where something has to be made of it."""
        if len(self._parts) > 1:
            return None
        index, low, high, _ = next(self._ranges(begin, end))
        arrays = self._flattened()[index]
        if len(arrays) > 1 or high - low < end - begin or arrays[0].dtype != self.dtype:
            return None
        part = arrays[0][low:high]
        if not (part.flags.c_contiguous and part.flags.aligned):
            return None
        return part.view(self.dtype)  # there are equal dtypes of other names, of which an engine may know one

    def fold(self, begin: int, end: int, out: Array) -> None:
        """Fold a range of this worker's rows, one behind the other."""
        size = end - begin
        for number, (places, tree) in enumerate(self._parts):
            self._fill(begin, end, out[number * size : (number + 1) * size], places, tree)

    def combine(self, rows: Sequence[Array]) -> Array:
        """Return one row of all workers', by rank; it lies in one of them."""
        if self._forest is not None:
            return self._forest.combine(self.op, rows)
        return kernels.reduce(self.op, rows, out=rows[0]) if len(rows) > 1 else rows[0]

    def room(self, begin: int, end: int) -> Array | None:
        """Return where the total of a range may lie for its result to lie there, too; None where it cannot."""
        self._prepare()
        return None if self._total is None else self._total[begin:end]

    def finish(self, begin: int, end: int, total: Array) -> None:
        """Make a range of the results of its total, which is spoilt."""
        self._prepare()
        for index, low, high, at in self._ranges(begin, end):
            self._finish_part(self._leaves[index].rule, total[at : at + high - low], self._results[index][low:high])

    def results(self) -> list[Any]:
        """Return the leaves' results, all ranges of which are finished."""
        self._prepare()
        found = []
        for leaf, flat in zip(self._leaves, self._results, strict=True):
            whole = frozen(flat.reshape(leaf.arrays[0].shape))
            found.append(whole[()] if leaf.scalar else whole)
        return found

    def _prepare(self) -> None:
        if not self._results:
            if self._direct:
                self._total = pool.empty((self.size,), self.dtype)
                ends = running_sums(leaf.size for leaf in self._leaves)
                self._results = [self._total[e - leaf.size : e] for e, leaf in zip(ends, self._leaves, strict=True)]
            else:
                self._results = [pool.empty((leaf.size,), leaf.rule.result) for leaf in self._leaves]

    def _finish_part(self, rule: Rule, total: Array, out: Array) -> None:
        with np.errstate(all="ignore"):
            if rule.finish is not Finish.NOTHING:
                for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):
                    if rule.finish is Finish.DIVIDE:
                        np.divide(part, self._replicas, out=part)
                    else:
                        np.multiply(part, 1.0 / self._replicas, out=part)
            if not np.may_share_memory(total, out):
                out[...] = rounded(total, rule.result)

    def _flattened(self) -> list[list[Array]]:
        """Return the arrays with one axis; those in another order than C's are copied."""
        if self._flat is None:
            self._flat = [[array.reshape(-1) for array in leaf.arrays] for leaf in self._leaves]
        return self._flat

    def _ranges(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what a range has of each leaf: the leaf, the range in it, and where that lies."""
        at = 0
        for index, leaf in enumerate(self._leaves):
            low, high = max(begin - at, 0), min(end - at, leaf.size)
            if low < high:
                yield index, low, high, at + low - begin
            at += leaf.size

    def _fill(self, begin: int, end: int, out: Array, places: slice, tree: Tree | None) -> None:
        step = _BLOCK // self.dtype.itemsize  # a cache holds what is folded at a time
        for index, low, high, at in self._ranges(begin, end):
            arrays = self._flattened()[index][places]
            for a in range(low, high, step):
                b = min(a + step, high)
                target = out[at + a - low : at + b - low]
                if len(arrays) == 1:
                    np.copyto(target, arrays[0][a:b])
                    continue
                parts = [array[a:b].astype(self.dtype, copy=False) for array in arrays]
                if tree is None:
                    kernels.reduce(self.op, parts, out=target)
                else:
                    fold_into(tree, self.op, parts, target)


class Integers:
    """Python's integers, reduced exactly as arrays, however large they are.

    A sum goes in limbs of 31 bits, so that some thousand million workers do not overflow one. Integers beyond what the
    limbs hold say so, and then all are gathered after all.
    """

    _BITS: Final = 31
    _LIMBS: Final = 4
    _MOST: Final = {ReduceOp.SUM: 123, ReduceOp.MIN: 63, ReduceOp.MAX: 63}
    _TOO_LARGE: Final = {ReduceOp.SUM: 1, ReduceOp.MIN: -1, ReduceOp.MAX: 1}

    def __init__(self, op: ReduceOp, columns: Sequence[Column], members: Members) -> None:
        self._fold, self._op = folding(op), op
        self._replicas = members.replicas
        own = [int(kernels.reduce_numbers(self._fold, column)) for column in columns]  # type: ignore[arg-type]
        self._width = self._LIMBS if self._fold is ReduceOp.SUM else 1
        flat = np.zeros(len(own) * self._width + 1, np.int64)
        if any(number.bit_length() > self._MOST[self._fold] for number in own):
            flat[-1] = self._TOO_LARGE[self._fold]
        else:
            flat[:-1] = np.ravel([self._limbs(number) for number in own])
        self.reduction = Reduction(self._fold, [Part(rule_for(self._fold, flat.dtype), [flat])], members)

    def are_too_large(self) -> bool:
        """Return whether some integers do not fit; the reduction has been carried out."""
        (total,) = self.reduction.results()
        return bool(total[-1])

    def results(self) -> list[Any]:
        """Return the results."""
        (total,) = self.reduction.results()
        found = [
            sum(limb << (self._BITS * place) for place, limb in enumerate(limbs.tolist()))
            for limbs in total[:-1].reshape(-1, self._width)
        ]
        return [number / self._replicas for number in found] if self._op is ReduceOp.MEAN else found

    def _limbs(self, number: int) -> list[int]:
        if self._width == 1:
            return [number]
        low = [(number >> (self._BITS * place)) & ((1 << self._BITS) - 1) for place in range(self._width - 1)]
        return [*low, number >> (self._BITS * (self._width - 1))]


# Bytes.


class Gathering:
    """Bytes of every worker, given to all.

    Attributes:
        length_counts: by rank, how many numbers say what a worker contributes; 0 where its plan says that.
        lengths: these numbers, of this worker.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self.length_counts: Sequence[int] = [0] * len(members.ids)
        self.lengths: Array = _NO_LENGTHS

    def sizes(self, lengths: Sequence[Array]) -> list[int]:
        """Return by rank how many bytes a worker contributes that has these lengths."""
        raise NotImplementedError

    def data(self) -> Array:
        """Return this worker's bytes."""
        raise NotImplementedError

    def take(self, lengths: Sequence[Array], parts: Sequence[Array]) -> None:
        """Take the lengths and bytes of all workers, by rank. The bytes are not written to afterwards."""
        raise NotImplementedError

    def in_order(self, by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """Return what workers have for each of their replicas in the order of the replicas."""
        items = list(chain(*by_rank))
        return items if self.members.in_blocks else [items[place] for place in self.members.order]


class Numbers(Gathering):
    """Python's floats, complex numbers and booleans."""

    def __init__(self, members: Members, columns: Sequence[Column], kinds: Sequence[type]) -> None:
        super().__init__(members)
        self._columns, self._kinds = columns, kinds
        self.columns: list[list[Any]] = []
        """By leaf, the numbers of all replicas, in their order."""

    def sizes(self, lengths: Sequence[Array]) -> list[int]:  # noqa: ARG002
        """Return by rank how many bytes a worker contributes."""
        one = sum(NUMBERS[kind].itemsize for kind in self._kinds)
        return [one * len(ids) for ids in self.members.ids]

    def data(self) -> Array:
        """Return the numbers, by leaf."""
        given = zip(self._columns, self._kinds, strict=True)
        return np.concatenate([np.array(column, NUMBERS[kind]).view(np.uint8) for column, kind in given])

    def take(self, lengths: Sequence[Array], parts: Sequence[Array]) -> None:  # noqa: ARG002
        """Take the numbers of all workers."""
        at = [0] * len(parts)
        for kind in self._kinds:
            by_rank = []
            for rank, (part, ids) in enumerate(zip(parts, self.members.ids, strict=True)):
                end = at[rank] + len(ids) * NUMBERS[kind].itemsize
                by_rank.append([kind(x) for x in part[at[rank] : end].copy().view(NUMBERS[kind]).tolist()])
                at[rank] = end
            self.columns.append(self.in_order(by_rank))


class LargeIntegers(Gathering):
    """Python's integers of any size."""

    def __init__(self, members: Members, columns: Sequence[Column]) -> None:
        super().__init__(members)
        self._encoded = [_bytes_of(number) for column in columns for number in column]
        self._count = len(columns)
        self.length_counts = [self._count * len(ids) for ids in members.ids]
        self.lengths = np.array([len(each) for each in self._encoded], np.int64)
        self.columns: list[list[Any]] = []
        """By leaf, the integers of all replicas, in their order."""

    def sizes(self, lengths: Sequence[Array]) -> list[int]:
        """Return by rank how many bytes a worker contributes."""
        return [int(each.sum()) for each in lengths]

    def data(self) -> Array:
        """Return the integers, by leaf."""
        return np.frombuffer(b"".join(self._encoded), np.uint8)

    def take(self, lengths: Sequence[Array], parts: Sequence[Array]) -> None:
        """Take the integers of all workers."""
        found = [_split(part.tobytes(), each.tolist()) for part, each in zip(parts, lengths, strict=True)]
        for leaf in range(self._count):
            by_rank = []
            for numbers, ids in zip(found, self.members.ids, strict=True):
                own = numbers[leaf * len(ids) : (leaf + 1) * len(ids)]
                by_rank.append([int.from_bytes(each, "little", signed=True) for each in own])
            self.columns.append(self.in_order(by_rank))


class Arrays(Gathering):
    """Leaves of all replicas, or rows and their indices. Lengths along an axis and widths of strings may differ.

    Args:
        members: who takes part.
        columns: by leaf, what the local replicas contribute.
        specs: the leaves' shapes and dtypes.
        axes: along which the lengths of a leaf may differ; None where they do not.
    """

    def __init__(
        self,
        members: Members,
        columns: Sequence[Column],
        specs: Sequence[tuple[tuple[int | None, ...], np.dtype[Any]]],
        axes: Sequence[int | None],
    ) -> None:
        super().__init__(members)
        self._columns, self._axes = columns, axes
        self._specs = [(shape, dtype.newbyteorder("=")) for shape, dtype in specs]
        ragged = [(column, axis) for column, axis in zip(columns, axes, strict=True) if axis is not None]
        texts = [column for column, (_, dtype) in zip(columns, specs, strict=True) if dtype.kind in "US"]
        self.length_counts = [(len(ragged) + len(texts)) * len(ids) for ids in members.ids]
        lengths = [array.shape[axis] for column, axis in ragged for array in column]
        self.lengths = np.array([*lengths, *(array.dtype.itemsize for column in texts for array in column)], np.int64)
        self.columns: list[list[Array]] = []
        """By leaf, the arrays of all replicas, in their order, in memory that others may share."""
        self.whole: Array | None = None
        """The only leaf, put together, where that is how it has come."""

    def sizes(self, lengths: Sequence[Array]) -> list[int]:
        """Return by rank how many bytes a worker contributes."""
        return [
            sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes(rank, each))
            for rank, each in enumerate(lengths)
        ]

    def _shapes(self, rank: int, lengths: Array) -> Iterator[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Yield shape and dtype of a worker's arrays, by leaf, by replica."""
        count = len(self.members.ids[rank])
        known = iter(lengths.tolist())
        widths = iter(lengths.tolist()[count * sum(axis is not None for axis in self._axes) :])
        for (shape, dtype), axis in zip(self._specs, self._axes, strict=True):
            for _ in range(count):
                own = np.dtype((dtype.type, next(widths) // _CHARACTER[dtype.kind])) if dtype.kind in "US" else dtype
                yield tuple([next(known) if place == axis else size or 0 for place, size in enumerate(shape)]), own

    def data(self) -> Array:
        """Return the arrays, by leaf, by replica."""
        parts = [
            _as_bytes(array, array.dtype.newbyteorder("=") if dtype.kind in "US" else dtype)
            for column, (_, dtype) in zip(self._columns, self._specs, strict=True)
            for array in column
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.uint8)])

    def take(self, lengths: Sequence[Array], parts: Sequence[Array]) -> None:
        """Take the arrays of all workers."""
        found: list[list[Array]] = []
        for rank, (each, part) in enumerate(zip(lengths, parts, strict=True)):
            at, arrays = 0, []
            for shape, dtype in self._shapes(rank, each):
                nbytes = math.prod(shape) * dtype.itemsize
                arrays.append(_array(part[at : at + nbytes], shape, dtype))
                at += nbytes
            found.append(arrays)
        for leaf in range(len(self._specs)):
            counts = [len(ids) for ids in self.members.ids]
            by_rank = [a[leaf * count : (leaf + 1) * count] for a, count in zip(found, counts, strict=True)]
            self.columns.append(self.in_order(by_rank))
        if len(self._specs) == 1:
            self._find_whole(lengths, parts)

    def _find_whole(self, lengths: Sequence[Array], parts: Sequence[Array]) -> None:
        """See whether the only leaf has come as it is put together: one replica's part behind the other's."""
        (shape, dtype), axis = self._specs[0], self._axes[0]
        if dtype.kind in "US":
            return
        base = parts[0].base
        lies = [_address(part) for part in parts]
        ends = [begin + part.nbytes for begin, part in zip(lies, parts, strict=True)]
        if axis is None or not isinstance(base, np.ndarray) or lies[1:] != ends[:-1] or not self.members.in_blocks:
            return
        if math.prod(size or 0 for size in shape[:axis]) == 1 or axis == 0:
            total = tuple([int(sum(map(sum, lengths))) if p == axis else size or 0 for p, size in enumerate(shape)])
            if lies[0] % max(dtype.alignment, 1) == 0:
                self.whole = np.ndarray(total, dtype, base, lies[0] - _address(base))


class Broadcast:
    """Bytes of one worker, given to all.

    Attributes:
        root: that worker's rank.
        nbytes: how many they are; None where the root alone knows.
    """

    def __init__(self, root: int, leaves: Sequence[tuple[Any, Any, Any]], values: Sequence[Any] | None) -> None:
        self.root = root
        self._leaves = leaves  # shape, dtype and mark of each
        self._values = values
        sizes = [None if dtype is int else nbytes_of(shape, dtype) for shape, dtype, _ in leaves]
        known = [size for size in sizes if size is not None]
        self.nbytes = sum(known) if len(known) == len(sizes) else None
        self._own: Array | None = None
        self.results: list[Any] = []

    def data(self) -> Array:
        """Return the bytes, on the root."""
        if self._own is None:
            assert self._values is not None
            parts = [_encoded(value, dtype) for value, (_, dtype, _) in zip(self._values, self._leaves, strict=True)]
            self._own = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self._own

    def take(self, data: Array) -> None:
        """Take the bytes; they are not written to afterwards, and on the root may be those of the value."""
        at, copies = 0, len(self._leaves) > 1 or data is self._own
        for shape, dtype, mark in self._leaves:
            if dtype is int:
                begin = at + 8
                at = begin + int(data[at:begin].copy().view(np.int64)[0])
                self.results.append(int.from_bytes(data[begin:at].tobytes(), "little", signed=True))
                continue
            nbytes = nbytes_of(shape, dtype)
            part, at = data[at : at + nbytes], at + nbytes
            if isinstance(dtype, type):
                self.results.append(dtype(part.copy().view(NUMBERS[dtype])[0].item()))
            else:
                native = dtype.newbyteorder("=")
                found = _array(part, shape, native)
                found = found.copy() if copies or not found.flags.aligned else found
                self.results.append(found[()] if mark == LeafType.NUMPY_SCALAR else frozen(found))


class Exchange:
    """Bytes of each worker for each other one.

    Attributes:
        send_counts: by rank, how many are for that worker.
        receive_counts: by rank, how many come from that worker.
        most: how many any worker has for any other, at most.
    """

    def __init__(
        self, members: Members, columns: Sequence[Column], specs: Sequence[Any], axes: Sequence[tuple[int, int]]
    ) -> None:
        self._members, self._columns, self._axes = members, columns, axes
        replicas, local = members.replicas, len(members.own)
        self._specs = []
        for (shape, dtype), (split, _) in zip(specs, axes, strict=True):
            part = (*shape[:split], shape[split] // replicas, *shape[split + 1 :])
            self._specs.append((part, dtype.newbyteorder("=")))
        nbytes = sum(nbytes_of(*spec) for spec in self._specs)
        self.send_counts = self.receive_counts = [len(ids) * local * nbytes for ids in members.ids]
        self.most = nbytes * max(map(len, members.ids)) ** 2
        self.results: list[list[Array]] = []
        """By leaf, the local replicas' results."""

    def data(self) -> Array:
        """Return this worker's bytes by rank: by leaf, by its replica, by ours."""
        replicas = self._members.replicas
        if len(self._columns) == len(self._members.own) == 1 and self._members.in_blocks:
            (column,), ((split, _),) = self._columns, self._axes
            if math.prod(column[0].shape[:split]) == 1:
                return _as_bytes(column[0], self._specs[0][1])
        cut = [
            [np.split(array, replicas, axis=split) for array in column]
            for column, (split, _) in zip(self._columns, self._axes, strict=True)
        ]
        parts = [
            _as_bytes(by_replica[i], dtype)
            for ids in self._members.ids
            for column, (_, dtype) in zip(cut, self._specs, strict=True)
            for i in ids
            for by_replica in column
        ]
        return np.concatenate(parts or [np.empty(0, np.uint8)])

    def take(self, data: Array) -> None:
        """Take the bytes of all workers, by rank; they are not written to afterwards."""
        members, local = self._members, len(self._members.own)
        replicas = members.replicas
        if len(self._specs) == local == 1 and self._members.in_blocks:
            (shape, dtype), (_, concat) = self._specs[0], self._axes[0]
            if math.prod(shape[:concat]) == 1:
                whole = (*shape[:concat], shape[concat] * replicas, *shape[concat + 1 :])
                self.results = [[frozen(_array(data, whole, dtype))]]
                return
        received: list[list[list[list[Array]]]] = [[[] for _ in range(local)] for _ in self._specs]
        at = 0
        for ids in members.ids:
            for leaf, (shape, dtype) in enumerate(self._specs):
                nbytes = nbytes_of(shape, dtype)
                for place in range(local):
                    begins = range(at, at + nbytes * len(ids), nbytes) if nbytes else [at] * len(ids)
                    found = [_array(data[begin : begin + nbytes], shape, dtype) for begin in begins]
                    received[leaf][place].append(found)
                    at += nbytes * len(ids)
        ordered = Gathering(members)
        self.results = [
            [frozen(put_together(ordered.in_order(by_rank), concat)) for by_rank in by_place]
            for by_place, (_, concat) in zip(received, self._axes, strict=True)
        ]


Transfer: TypeAlias = Reduction | Gathering | Broadcast | Exchange


def folding(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def nbytes_of(shape: Sequence[int | None], dtype: Any) -> int:
    itemsize = (0 if dtype is int else NUMBERS[dtype].itemsize) if isinstance(dtype, type) else dtype.itemsize
    return math.prod(size or 0 for size in shape) * int(itemsize)


def _as_bytes(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array's bytes in C's order, of a dtype that is its own but for the byte order."""
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)


def _array(data: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return bytes as an array, over the same memory."""
    if not data.nbytes:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, data)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _encoded(value: Any, dtype: Any) -> Array:
    if dtype is int:
        data = _bytes_of(value)
        return np.frombuffer(len(data).to_bytes(8, "little") + data, np.uint8)
    if isinstance(dtype, type):
        return np.array([value], NUMBERS[dtype]).view(np.uint8)
    return _as_bytes(np.asarray(value), dtype.newbyteorder("="))


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _split(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = list(running_sums(sizes))
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
