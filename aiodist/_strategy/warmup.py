"""Warming up: compiles the kernels that a strategy's reductions will need before they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.devices import gpu_number
from aiodist._arrays.leaves import describe_leaf
from aiodist_kernels import Accumulate, Plan, ReduceOp, plan_for, warm


async def compile_kernels(values: Sequence[Any], devices: Sequence[str], accumulate: Accumulate) -> None:
    """Compile what SUM and MEAN of these nests over replicas on these devices need, in a worker thread."""
    leaves = [leaf for value in values for leaf in nests.flatten(value)[0]] if values else [np.float32(), np.float64()]
    dtypes, ops = dict.fromkeys(map(_dtype, leaves)), (ReduceOp.SUM, ReduceOp.MEAN)
    plans = [plan_for(op, dtype, len(devices), accumulate) for dtype in dtypes for op in ops]
    ordinals = sorted({gpu_number(device) for device in devices if device.startswith("GPU:")})
    if len(devices) > 1 and any(device.startswith("CPU:") for device in devices):
        await anyio.to_thread.run_sync(warm, plans)
    if ordinals:
        await anyio.to_thread.run_sync(_load, plans, ordinals)


def _load(plans: Sequence[Plan], ordinals: Sequence[int]) -> None:
    """Load the kernels for one leaf, and for several, on each GPU, and those that copy results."""
    from aiodist._gpu import enqueue
    from aiodist_kernels.cuda.forms import copying, form_for

    driver = enqueue.queue().driver
    for plan in plans:
        size = plan.rule.result.itemsize
        forms = [*(form_for(plan.rule, plan.count, leaves=leaves) for leaves in (1, 2)), copying(size)]
        for form in dict.fromkeys(forms):
            for ordinal in ordinals:
                driver.load(ordinal, form)


def _dtype(leaf: Any) -> np.dtype[Any]:
    native: np.dtype[Any] = np.dtype(describe_leaf(leaf)[1]).newbyteorder("=")
    return native
