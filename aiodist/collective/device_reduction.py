"""all_reduce of device arrays: the leaves of a dtype that lie alike in one launch, and those on the host meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import aiodist_kernels as kernels
from aiodist._arrays.device import DeviceType, DType
from aiodist.collective.device_course import Known
from aiodist.collective.device_work import DeviceWork
from aiodist.collective.signature import OP
from aiodist.gpu.plan import Job
from aiodist_kernels.rules import rule_for

_rule_for = cache(rule_for)


class AllReduce(DeviceWork):
    """An all_reduce."""

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Reduce a leaf into an array for each replica."""
        self.reduce_into(arrays, self.results(place, mark, arrays[0].shape, self.result_dtype(arrays)))

    def result_dtype(self, arrays: Sequence[Known]) -> DType:
        """Return the dtype of a leaf's reduction."""
        return kernels.result_dtype(self.signature[OP], arrays[0].dtype)

    def reduce_into(self, arrays: Sequence[Known], outs: Sequence[Known]) -> None:
        """Reduce a leaf."""
        job = Job(
            tuple([array.place for array in arrays]),
            tuple([out.place for out in outs]),
            math.prod(arrays[0].shape),
            arrays[0].dtype.itemsize,
            outs[0].dtype.itemsize,
        )
        self.reduce(_rule_for(self.signature[OP], arrays[0].dtype, self.options.accumulate), job)
