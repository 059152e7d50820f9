# SPDX-License-Identifier: Apache-2.0
"""Reductions of n buffers to one: the same bits on every tier, in the order of the buffers.

It knows nothing of replicas, strategies or event loops, and imports NumPy alone; a compiler is loaded only on request.
Its modules, each of which imports only from those above it:

- `rules`: what a reduction means, for each op and dtype, and what of it a kernel computes
- `pool`: memory for large results, used again
- `numpy_tier`: folds by ufuncs, for every rule and every layout
- `lanes`: LLVM instructions for one step on a vector of lanes
- `kernels_cpu`: the kernels for the CPU, which Numba compiles
- `policy`: plans: what serves a reduction, and from which sizes on
- `reductions`: the entry: arrays, in one go and in pieces for worker threads, and Python's numbers
- `cuda`: kernels for GPUs
"""

from aiodist_kernels.policy import Plan, plan_for, warm
from aiodist_kernels.reductions import (
    cut,
    nest_reduction,
    reduce,
    reduce_numbers,
    reduction,
    result_dtype,
)
from aiodist_kernels.rules import Accumulate, ReduceOp

__all__ = [
    "Accumulate",
    "Plan",
    "ReduceOp",
    "cut",
    "nest_reduction",
    "plan_for",
    "reduce",
    "reduce_numbers",
    "reduction",
    "result_dtype",
    "warm",
]
