# SPDX-License-Identifier: Apache-2.0
"""Reductions of n buffers to one: the same bits on every tier, in the order of the buffers.

It knows nothing of replicas, strategies or event loops, and imports NumPy alone; a compiler
is loaded only on request.
"""

from aiodist_kernels.pieces import Pieces
from aiodist_kernels.plans import KernelSpec, is_ready, pays_from, warm
from aiodist_kernels.python_numbers import Number, check_number, reduce_numbers
from aiodist_kernels.reduce_op import ReduceOp
from aiodist_kernels.reductions import bytes_moved, cost, cut, reduce, reduce_alike, reduce_scalars, result_dtype
from aiodist_kernels.rules import Accumulate

__all__ = [
    "Accumulate",
    "KernelSpec",
    "Number",
    "Pieces",
    "ReduceOp",
    "bytes_moved",
    "check_number",
    "cost",
    "cut",
    "is_ready",
    "pays_from",
    "reduce",
    "reduce_alike",
    "reduce_numbers",
    "reduce_scalars",
    "result_dtype",
    "warm",
]
