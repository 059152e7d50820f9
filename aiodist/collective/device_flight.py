"""Device arrays whose reduction goes from GPU to GPU: what stands before and behind what the workers do together.

    arrays ── folded on one GPU, in the accumulator ──▶ part ── all workers ──▶ total ── rounded, scaled ──▶ results

Both are work as any other on devices: kernels of aiodist's, ordered by streams and events.
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
from aiodist.collective.signature import OP
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
    """

    def __init__(self, brought: Brought, ordinal: int) -> None:
        self._ordinal = ordinal
        super().__init__(brought)

    def layout(self) -> Any:
        """Return what the plan depends on."""
        return self._ordinal

    def _rule(self, dtype: DType) -> Rule:
        return part_of(_rule_for(self.signature[OP], dtype, self.options.accumulate))

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Fold a leaf; what needs none is copied, since the total takes its place."""
        first, rule = arrays[0], self._rule(arrays[0].dtype)
        (part,) = self.fresh(mark, first.shape, rule.accumulator, [self._ordinal])
        self._results[place] = [self._number(part)]
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
            dtype = self._rule(column[0].dtype).accumulator
            stream = mark.stream(self._ordinal)
            found.append(DeviceArray(address, tuple(column[0].shape), dtype, self._ordinal, stream, owner))
        return found


def buffer_of(part: DeviceArray) -> Buffer:
    """Return a part as NCCL sees it: complex numbers by component, booleans as bytes."""
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
    """

    def __init__(self, brought: Brought, totals: Any, outs: Mapping[int, OutBuffers] | None, replicas: int) -> None:
        first = brought.values[0]
        self._dtypes = [leaf.dtype for leaf in (first if isinstance(first, list) else [first])]
        self._replicas = replicas
        super().__init__(brought, totals, outs)

    def layout(self) -> Any:
        """Return what the plan depends on."""
        return self._replicas, super().layout()

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Round a leaf's total, or divide it, into the results; or copy it where it is the result."""
        rule = end_of(_rule_for(self.signature[OP], self._dtypes[place], self.options.accumulate))
        if rule.finish is Finish.NOTHING and rule.result == rule.accumulator:
            super().plan(place, mark, arrays)
            return
        total = arrays[0]
        results = self.results(place, mark, total.shape, rule.result)
        outputs = tuple([result.place for result in results])
        sizes = rule.accumulator.itemsize, rule.result.itemsize
        self.reduce(rule, Job((total.place,), outputs, math.prod(total.shape), *sizes), self._replicas)

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
