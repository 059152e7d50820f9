# SPDX-License-Identifier: Apache-2.0
"""Reductions of n buffers to one: the same bits on every tier, in the order of the buffers.

It knows nothing of replicas, strategies or event loops, and imports NumPy alone; a compiler is loaded only on request.
Its modules, each of which imports only from those above it:

    rules          what a reduction means, for each op and dtype, and what of it a kernel computes
    pool           memory for large results, used again
    arguments      what callers pass: checks, and how arrays lie in memory
    scalars        Python's numbers
    numpy_tier     folds by ufuncs, for every rule and every layout
    lanes          LLVM instructions for one step on a vector of lanes
    kernels_cpu    the kernels for the CPU, which Numba compiles
    compiled_tier  which kernels there are, and how they are given their buffers
    policy         plans: what serves a reduction, and from which sizes on
    reductions     the entry: checked, alike, in pieces for worker threads
    cuda           kernels for GPUs
"""

from aiodist_kernels.policy import KernelSpec, is_due, is_ready, warm, warm_if_possible
from aiodist_kernels.reductions import (
    Pieces,
    cost,
    cut,
    nest_reduction,
    reduce,
    reduce_alike,
    reduce_scalars,
    reduction,
    result_dtype,
)
from aiodist_kernels.rules import Accumulate, ReduceOp
from aiodist_kernels.scalars import Number, check_number, reduce_numbers

__all__ = [
    "Accumulate",
    "KernelSpec",
    "Number",
    "Pieces",
    "ReduceOp",
    "check_number",
    "cost",
    "cut",
    "is_due",
    "is_ready",
    "nest_reduction",
    "reduce",
    "reduce_alike",
    "reduce_numbers",
    "reduce_scalars",
    "reduction",
    "result_dtype",
    "warm",
    "warm_if_possible",
]
