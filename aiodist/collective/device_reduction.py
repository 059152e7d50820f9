"""all_reduce of device arrays: the leaves of a dtype that lie alike in one launch, and those on the host meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import aiodist_kernels as kernels
from aiodist.collective.device_work import DeviceWork
from aiodist.collective.handing_out import each
from aiodist.collective.reduction import reduce_leaf
from aiodist.collective.signature import OP
from aiodist.gpu.plan import Job, Place
from aiodist.vocabulary.device_arrays import DeviceArray, DeviceType, DType
from aiodist_kernels.rules import rule_for

_rule_for = cache(rule_for)


class AllReduce(DeviceWork):
    """An all_reduce."""

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[DeviceArray]) -> None:
        """Reduce a leaf into an array for each replica."""
        ordinals = [array.ordinal for array in arrays]
        made, seen = self.fresh(mark, arrays[0].shape, self.result_dtype(arrays), ordinals)
        self.results(place, made)
        self.reduce_into(arrays, seen)

    def result_dtype(self, arrays: Sequence[DeviceArray]) -> DType:
        """Return the dtype of a leaf's reduction."""
        return kernels.result_dtype(self.signature[OP], arrays[0].dtype)

    def reduce_into(self, arrays: Sequence[DeviceArray], outs: Sequence[DeviceArray]) -> None:
        """Reduce a leaf."""
        job = Job(
            tuple([Place(array.ordinal, array.address) for array in arrays]),
            tuple([Place(array.ordinal, array.address) for array in outs]),
            arrays[0].size,
            arrays[0].dtype.itemsize,
            outs[0].dtype.itemsize,
        )
        self.reduce(_rule_for(self.signature[OP], arrays[0].dtype, self.options.accumulate), job)

    def on_host(self, place: int) -> list[Any]:
        """Reduce a leaf on the host."""
        column, mark = self.columns[place], self.marks[place]
        return each(mark, reduce_leaf(self.signature[OP], column, mark, self.options.accumulate), len(column))
