# SPDX-License-Identifier: Apache-2.0
"""Reductions of n buffers to one, in the order of the buffers, with the same bits on every tier.

It knows nothing of replicas, strategies or event loops, and imports only NumPy; a compiler is loaded on request.
Its modules, each of which imports only from those above it:

- `rules`: what a reduction means, for each op and dtype, and which part a kernel computes
- `pool`: reused memory for large results
- `numpy_tier`: folds by ufuncs, for every rule and every layout
- `lanes`: LLVM instructions for one step on a vector of lanes
- `kernels_cpu`: the kernels for the CPU, which Numba compiles
- `policy`: plans: which tier does a reduction, depending on its size
- `reductions`: the entry points for arrays, as a whole or in pieces for worker threads, and for Python numbers
- `cuda`: kernels for GPUs
"""

from aiodist_kernels.policy import Plan, plan_for, warm
from aiodist_kernels.reductions import cut, nest_reduction, reduce, reduce_numbers, reduction, result_dtype
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
