"""Warming up: compiles the kernels that a strategy's reductions will need before they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.devices import gpu_number
from aiodist._arrays.leaves import describe_leaf
from aiodist_kernels import Accumulate, KernelSpec, ReduceOp, warm
from aiodist_kernels.rules import rule_for


async def compile_kernels(values: Sequence[Any], devices: Sequence[str], accumulate: Accumulate) -> None:
    """Compile what SUM and MEAN of these nests over replicas on these devices need, in a worker thread."""
    leaves = [leaf for value in values for leaf in nests.flatten(value)[0]] if values else [np.float32(), np.float64()]
    dtypes, ops = dict.fromkeys(map(_dtype, leaves)), (ReduceOp.SUM, ReduceOp.MEAN)
    specs = [KernelSpec(op, dtype, len(devices), accumulate) for dtype in dtypes for op in ops]
    ordinals = sorted({gpu_number(device) for device in devices if device.startswith("GPU:")})
    if len(devices) > 1 and any(device.startswith("CPU:") for device in devices):
        try:
            await anyio.to_thread.run_sync(warm, specs)
        except ImportError as error:
            raise ImportError(
                f"warmup compiles kernels with Numba, which does not load ({error}); pip install --upgrade "
                "numba, or leave warmup out: NumPy serves, with the same bits"
            ) from error
    if ordinals:
        await anyio.to_thread.run_sync(_load, specs, ordinals)


def _load(specs: Sequence[KernelSpec], ordinals: Sequence[int]) -> None:
    """Load the kernels for one leaf, and for several, on each GPU, and those that copy results."""
    from aiodist._gpu import enqueue
    from aiodist_kernels.cuda.forms import copying, form_for

    driver = enqueue.queue().driver
    for spec in specs:
        rule = rule_for(spec.op, spec.dtype, spec.accumulate)
        forms = [*(form_for(rule, spec.count, leaves=leaves) for leaves in (1, 2)), copying(rule.result.itemsize)]
        for form in dict.fromkeys(forms):
            for ordinal in ordinals:
                driver.load(ordinal, form)


def _dtype(leaf: Any) -> np.dtype[Any]:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        raise TypeError(f"warmup expects nests of arrays, or of anything with a dtype, got {leaf!r}")
    try:
        found = np.dtype(dtype)
    except TypeError:  # a framework's own
        found = describe_leaf(leaf)[1]
    native: np.dtype[Any] = found.newbyteorder("=")
    return native
