# SPDX-License-Identifier: Apache-2.0
"""Every reduction that has a GPU kernel, and its forms."""

from __future__ import annotations

import dataclasses

import numpy as np

from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.cuda.forms import DIRECT_COUNTS, Form, form_for
from aiodist_kernels.rules import Rule, rule_for
from tests.kernels.arrays import BFLOAT16, COMPLEX, FLOATS
from tests.kernels.test_reduce import COMPILED, DEFINED

ANY_COUNTS = (1, 5, 9, 10, 17, 20)
"""Numbers of buffers for the kernel for any number: below, at and beyond one and two unrolled steps."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One op on one dtype."""

    op: ReduceOp
    dtype: np.dtype
    accumulate: Accumulate

    def __str__(self) -> str:
        return f"{self.op.name}-{self.dtype}" + ("" if self.accumulate == "native" else "-float64")

    @property
    def rule(self) -> Rule:
        return rule_for(self.op, self.dtype, self.accumulate)

    def forms(self) -> list[tuple[Form, int]]:
        """Return all kernels, each with a number of buffers."""
        fixed = [(form_for(self.rule, count, leaves=leaves), count) for count in DIRECT_COUNTS for leaves in (1, 2)]
        return [*fixed, *((form_for(self.rule, count), count) for count in ANY_COUNTS)]


WIDENED = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT)

CASES = [
    *[Case(op, dtype, "native") for op, dtype in DEFINED],
    *[Case(op, dtype, "float64") for op in WIDENED for dtype in (*FLOATS[:3], COMPLEX[0])],
]

SOME_CASES = [
    *[Case(op, dtype, "native") for op, dtype in COMPILED],
    *[Case(ReduceOp.SUM, dtype, "float64") for dtype in (*FLOATS[:3], COMPLEX[0])],
    Case(ReduceOp.MEAN, BFLOAT16, "float64"),
]

ONE_OF_EACH_LAYOUT = [
    Case(ReduceOp.SUM, np.dtype(np.float32), "native"),
    Case(ReduceOp.MEAN, BFLOAT16, "native"),
    Case(ReduceOp.MEAN, np.dtype(np.int8), "native"),
    Case(ReduceOp.PRODUCT, COMPLEX[1], "native"),
    Case(ReduceOp.MAX, np.dtype(bool), "native"),
]
"""Lanes of 4, 2 and 1 bytes, results wider than the buffers, elements of two lanes, vectors of one element."""
