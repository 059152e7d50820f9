"""Device arrays whose reduction goes from GPU to GPU: what stands before and behind what the workers do together.

    arrays ── folded on one GPU, in the accumulator ──▶ part ── all workers ──▶ total ── rounded, scaled ──▶ results

Both are work as any other on devices: kernels of aiodist's, ordered by streams and events. Of what is broadcast, the
source's worker has the part, which is all workers' total then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from aiodist.collective.brought import Brought
from aiodist.collective.device_course import Known
from aiodist.collective.device_crossing import Launching
from aiodist.collective.device_work import DeviceWork
from aiodist.collective.out_buffers import OutBuffers
from aiodist.collective.signature import KIND, OP
from aiodist.gpu.execute import Completion
from aiodist.gpu.moves import Move
from aiodist.gpu.nccl import Buffer
from aiodist.gpu.plan import Job
from aiodist.vocabulary.device_arrays import DeviceArray, DeviceType, DType
from aiodist_kernels.rules import Finish, Rule, end_of, part_of, rule_for

_rule_for = cache(rule_for)


class Takeoff(DeviceWork):
    """What the local replicas brought, folded into one part.

    Args:
        brought: what they ask for, and bring: leaves on devices alone.
        ordinal: the GPU that takes the parts.
        source: the place of the one that is broadcast, where it is one of them.
    """

    def __init__(self, brought: Brought, ordinal: int, source: int | None = None) -> None:
        self._ordinal = ordinal
        self._source = source
        super().__init__(brought)

    def layout(self) -> Any:
        """Return what the plan depends on."""
        return self._ordinal, self._source

    def _rule(self, dtype: DType) -> Rule:
        return part_of(_rule_for(self.signature[OP], dtype, self.options.accumulate))

    def _part_dtype(self, dtype: DType) -> DType:
        return dtype if self.signature[OP] is None else self._rule(dtype).accumulator

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Fold a leaf; what needs none is copied, since the total takes its place."""
        first = arrays[0]
        (part,) = self.fresh(mark, first.shape, self._part_dtype(first.dtype), [self._ordinal])
        self._results[place] = [self._number(part)]
        if self.signature[OP] is None:
            if self._source is not None:
                self.move([Move(part.view(), arrays[self._source].view())])
            return
        rule = self._rule(first.dtype)
        if len(arrays) == 1 and rule.accumulator == rule.dtype:
            self.move([Move(part.view(), first.view())])
            return
        inputs = tuple([array.place for array in arrays])
        sizes = rule.dtype.itemsize, rule.accumulator.itemsize
        self.reduce(rule, Job(inputs, (part.place,), math.prod(first.shape), *sizes))

    def parts(self) -> list[DeviceArray]:
        """Return the parts, by leaf, once they are enqueued."""
        found = []
        for place, column in enumerate(self.columns):
            ((number,), mark) = self._course.results[place], self.marks[place]
            assert number is not None
            assert isinstance(mark, DeviceType)
            address, owner = self.begins[len(self.arrays) + number], self._made[number]
            dtype = self._part_dtype(column[0].dtype)
            stream = mark.stream(self._ordinal)
            found.append(DeviceArray(address, tuple(column[0].shape), dtype, self._ordinal, stream, owner))
        return found


def bytes_of(part: DeviceArray) -> Buffer:
    """Return a part as bytes."""
    return Buffer(part.address, part.nbytes, "uint8")


def buffer_of(part: DeviceArray) -> Buffer:
    """Return a part as NCCL reduces it: complex numbers by component, booleans as bytes."""
    count, dtype = math.prod(part.shape), part.dtype
    if dtype.kind == "c":
        return Buffer(part.address, 2 * count, f"float{4 * dtype.itemsize}")
    return Buffer(part.address, count, "uint8" if dtype.kind == "b" else dtype.name)


class Touchdown(Launching):
    """Totals on one GPU, on their way to the local replicas' results.

    Args:
        brought: what the replicas ask for, and bring, by which each result's device is known.
        totals: by leaf, or the only one.
        outs: by position, the buffers that they want the result in.
        replicas: how many there are over all workers.
        mine: the ids of the local ones.
    """

    def __init__(
        self, brought: Brought, totals: Any, outs: Mapping[int, OutBuffers] | None, replicas: int, mine: Sequence[int]
    ) -> None:
        first = brought.values[0]
        self._dtypes = [leaf.dtype for leaf in (first if isinstance(first, list) else [first])]
        self._replicas, self._mine = replicas, tuple(mine)
        super().__init__(brought, totals if brought.signature[KIND].shared else [totals] * len(mine), outs)

    def layout(self) -> Any:
        """Return what the plan depends on."""
        return self._replicas, self._mine, super().layout()

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Round a leaf's total, or divide it, into the results; or copy it where it is the result."""
        rule = None if self.signature[OP] is None else self._rule(place)
        if not self._shared:
            self._scatter(place, mark, arrays[0], rule)
        elif rule is None:
            super().plan(place, mark, arrays)
        else:
            self._end(rule, arrays[0], self.results(place, mark, arrays[0].shape, rule.result))

    def _rule(self, place: int) -> Rule | None:
        """Return the rule by which a total becomes a result; None where it is that already."""
        rule = end_of(_rule_for(self.signature[OP], self._dtypes[place], self.options.accumulate))
        return None if rule.finish is Finish.NOTHING and rule.result == rule.accumulator else rule

    def _end(self, rule: Rule, total: Known, results: Sequence[Known]) -> None:
        outputs = tuple([result.place for result in results])
        sizes = rule.accumulator.itemsize, rule.result.itemsize
        self.reduce(rule, Job((total.place,), outputs, math.prod(total.shape), *sizes), self._replicas)

    def _scatter(self, place: int, mark: DeviceType, total: Known, rule: Rule | None) -> None:
        """Give each replica its part of a leaf's result."""
        whole, axis = total, self.detail(place)
        if rule is not None:
            (whole,) = self.fresh(mark, total.shape, rule.result, [total.ordinal])
            self._end(rule, total, [whole])
        step = total.shape[axis] // self._replicas
        parts = self.results(place, mark, (*total.shape[:axis], step, *total.shape[axis + 1 :]), whole.dtype)
        for replica_id, part in zip(self._mine, parts, strict=True):
            self.move([Move(part.view(), whole.view().part(axis, replica_id * step, (replica_id + 1) * step))])

    def is_loaded(self) -> bool:
        """Return whether its kernels can be launched at once."""
        return self._course.scheme.is_loaded()

    def load(self) -> None:
        """Compile and load its kernels."""
        self._executor.load(self._course.scheme)

    def enqueue(self) -> Completion:
        """Enqueue it; its kernels are loaded."""
        return self._enqueue()

    def results_by_position(self) -> dict[int, Any]:
        """Return each replica's result, when all is done."""
        return self._collect()
