# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel computes, in the terms of the machine: lanes, accumulators, steps.

A recipe is what is left of a rule when everything that compiles to the same code is made one:
complex sums are sums of their components, signed and unsigned sums of one size are the same.
"""

import dataclasses
import enum
import functools
from typing import Any, Final

import numpy as np

from aiodist_kernels.reduce_op import ReduceOp
from aiodist_kernels.rules import DType, Finish, Rule, is_bfloat16

UNROLLED_COUNT: Final = 16
"""Kernels are specialised for up to so many buffers; beyond, one kernel serves every count."""


class Lane(enum.Enum):
    """How one number lies in memory or in a register."""

    BOOL = "bool"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    def __init__(self, name: str) -> None:
        digits = "".join(filter(str.isdigit, name))
        self.size: Final = int(digits or 8) // 8
        """Bytes of one number."""

    @property
    def is_half(self) -> bool:
        """Whether it has 16 bits and is widened to float32 before anything else."""
        return self in (Lane.FLOAT16, Lane.BFLOAT16)


class Step(enum.Enum):
    """One step of the fold."""

    ADD = "add"
    MULTIPLY = "multiply"
    COMPLEX_MULTIPLY = "complex multiply"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One kernel.

    Attributes:
        storage: lanes of the buffers.
        accumulator: lanes in which the fold runs.
        result: lanes of the result.
        step: one step of the fold.
        finish: the last step before rounding.
        count: the number of buffers, or 0 for any number.
        later_zero_wins: of two equal numbers, which can only differ as zeros, MIN and MAX take
            the later one.
        fused: the complex product fuses one multiplication with its addition.
    """

    storage: Lane
    accumulator: Lane
    result: Lane
    step: Step
    finish: Finish
    count: int
    later_zero_wins: bool = False
    fused: bool = False

    @property
    def lanes_per_element(self) -> int:
        """Lanes which must stay together: the two components that a complex product mixes."""
        return 2 if self.step is Step.COMPLEX_MULTIPLY else 1


@functools.lru_cache(maxsize=1024)
def recipe_for(rule: Rule, count: int) -> Recipe | None:
    """Return the recipe for `count` buffers, or None where NumPy alone serves.

    That is a single buffer, which is a copy, and long double, which no kernel knows.
    """
    storage, result = _lane(rule.dtype), _lane(rule.result)
    accumulator = _lane(rule.accumulator)
    if count < 2 or storage is None or result is None or accumulator is None:
        return None
    step = _step(rule)
    ordered = step in (Step.MINIMUM, Step.MAXIMUM)
    if not ordered and storage is accumulator is result and storage.value.startswith("uint"):
        storage = accumulator = result = Lane(storage.value[1:])
    return Recipe(
        storage=storage,
        accumulator=Lane.FLOAT32 if accumulator.is_half else accumulator,
        result=result,
        step=step,
        finish=rule.finish,
        count=count if count <= UNROLLED_COUNT else 0,
        later_zero_wins=ordered and _later_zero_wins(rule.dtype),
        fused=step is Step.COMPLEX_MULTIPLY and _product_is_fused(rule.accumulator),
    )


def components(dtype: DType) -> int:
    """Return how many lanes one element has."""
    return 2 if dtype.kind == "c" else 1


def _lane(dtype: DType) -> Lane | None:
    if is_bfloat16(dtype):
        return Lane.BFLOAT16
    name = f"float{4 * dtype.itemsize}" if dtype.kind == "c" else dtype.name
    return Lane(name) if name in {lane.value for lane in Lane} else None


def _step(rule: Rule) -> Step:
    if rule.op is ReduceOp.PRODUCT:
        return Step.COMPLEX_MULTIPLY if rule.dtype.kind == "c" else Step.MULTIPLY
    steps = {ReduceOp.MIN: Step.MINIMUM, ReduceOp.MAX: Step.MAXIMUM}
    return steps.get(rule.op, Step.ADD)


def _later_zero_wins(dtype: DType) -> bool:
    """Ask NumPy: it depends on the dtype and on the processor's vector instructions."""
    zero: np.ndarray[Any, DType] = np.zeros(64, dtype)
    return dtype.kind not in "biu" and bool(np.signbit(np.maximum(zero, -zero)[0]))


def _product_is_fused(dtype: DType) -> bool:
    """Ask NumPy: its vector loops for complex products fuse where the processor can."""
    # The real part of (x + xi)(x + xi) is x * x - x * x: zero, unless one of the products was not rounded.
    x = 1 + np.finfo(dtype).eps
    factors = np.full(64, complex(x, x), dtype)
    return bool((factors * factors)[0].real != 0)
