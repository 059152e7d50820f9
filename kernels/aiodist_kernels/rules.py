# SPDX-License-Identifier: Apache-2.0
"""What a reduction means: one rule for each (op, dtype, accumulate).

All tiers read the same rules, and must give the same bits. A reduction is a left fold in
buffer order that starts from buffer 0 (from zero, -0.0 would become 0.0):

    dtype               SUM, PRODUCT            MEAN                    MIN, MAX
    float64, longdouble in itself               in itself, / n          NaN propagates
    float32             in itself               in float64, * (1/n)     NaN propagates
    float16, bfloat16   in float32              in float32, * (1/n)     NaN propagates
    integers            in itself, wraps        in float64, / n         exact
    bool                TypeError               TypeError               all / any
    complex128          in itself               in itself, / n          TypeError
    complex64           in itself               in complex128, * (1/n)  TypeError

An accumulator wider than the result is rounded once, to nearest even, at the end. There the
mean multiplies by 1/n in the accumulator, which is cheaper than a division and rounds to the same
value but for a tie that the last bit of the accumulator decides; the mean of identical
buffers is exact either way. `accumulate="float64"` widens the accumulator of every inexact
SUM, MEAN and PRODUCT to float64 (complex128).
"""

import enum
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from aiodist_kernels.reduce_op import ReduceOp

Accumulate = Literal["native", "float64"]
DType = np.dtype[Any]

FLOAT32: Final[DType] = np.dtype(np.float32)
FLOAT64: Final[DType] = np.dtype(np.float64)
COMPLEX128: Final[DType] = np.dtype(np.complex128)

_UFUNCS: Final[dict[ReduceOp, np.ufunc]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


class Finish(enum.Enum):
    """What happens to the accumulator after the last buffer."""

    NOTHING = "nothing"
    SCALE = "multiply by 1/n"
    DIVIDE = "divide by n"


class Rule(NamedTuple):
    """How buffers of one dtype are reduced by one op.

    Attributes:
        op: the reduce op.
        dtype: of the buffers, in native byte order.
        accumulator: in which the fold runs.
        result: of the result.
        ufunc: one step of the fold.
        finish: the last step before rounding.
        contiguous: operands must be contiguous to give the same bits always. NumPy's complex
            product fuses a multiplication and an addition in its vector loops, and does not in
            the scalar loop that some strides get.
    """

    op: ReduceOp
    dtype: DType
    accumulator: DType
    result: DType
    ufunc: np.ufunc
    finish: Finish
    contiguous: bool


def is_bfloat16(dtype: DType) -> bool:
    """Say whether `dtype` is bfloat16, which NumPy knows only when a library registers it."""
    return dtype.name == "bfloat16"


def native_dtype(dtype: DType) -> DType:
    """Return `dtype` in native byte order: the one object that NumPy has for it, not an equal one."""
    return np.dtype(dtype.type) if dtype.kind in "iufc" else dtype


def rule_for(op: ReduceOp, dtype: DType, accumulate: Accumulate = "native") -> Rule:
    """Return the rule for buffers of `dtype`.

    Raises:
        TypeError: `op` is not defined for `dtype`.
        ValueError: `accumulate` is neither "native" nor "float64".
    """
    if accumulate not in get_args(Accumulate):
        raise ValueError(f"expected accumulate='native' or 'float64', got {accumulate!r}")
    native = native_dtype(dtype)
    _check(op, native)
    accumulator = _accumulator(op, native, accumulate)
    result = accumulator if op is ReduceOp.MEAN and native.kind in "iu" else native
    return Rule(
        op=op,
        dtype=native,
        accumulator=accumulator,
        result=result,
        ufunc=_UFUNCS[op],
        finish=_finish(op, accumulator, result),
        contiguous=op is ReduceOp.PRODUCT and native.kind == "c",
    )


def part_of(rule: Rule) -> Rule:
    """Return the rule for a part of the buffers: the fold, in the accumulator, and nothing of what comes last."""
    op = ReduceOp.SUM if rule.op is ReduceOp.MEAN else rule.op
    return rule._replace(op=op, result=rule.accumulator, finish=Finish.NOTHING)


def _accumulator(op: ReduceOp, dtype: DType, accumulate: Accumulate) -> DType:
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return dtype
    if dtype.kind in "iu":
        return FLOAT64 if op is ReduceOp.MEAN else dtype
    if is_bfloat16(dtype) or dtype == np.float16:
        return FLOAT64 if accumulate == "float64" else FLOAT32
    if op is ReduceOp.MEAN or accumulate == "float64":
        return np.promote_types(dtype, FLOAT64)
    return dtype


def _finish(op: ReduceOp, accumulator: DType, result: DType) -> Finish:
    if op is not ReduceOp.MEAN:
        return Finish.NOTHING
    return Finish.DIVIDE if accumulator == result else Finish.SCALE


def _check(op: ReduceOp, dtype: DType) -> None:
    """Raise TypeError where the table has none.

    Raises:
        TypeError: always with what was expected, what came, and what to do.
    """
    if not (dtype.kind in "biufc" or is_bfloat16(dtype)):
        raise TypeError(
            f"{op.name} of {dtype}: expected bool, integers, floats (bfloat16 too) or complex "
            f"numbers, got {_kind_name(dtype)}; reduce the numbers in it as arrays of their own"
        )
    ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
    if dtype.kind == "b" and not ordered:
        raise TypeError(
            f"{op.name} of bool: expected numbers, got bool; cast first, e.g. "
            f"x.astype(np.int64), or use MIN (all) or MAX (any)"
        )
    if dtype.kind == "c" and ordered:
        raise TypeError(
            f"{op.name} of {dtype}: expected an ordered dtype, got complex numbers, which have "
            f"no order; reduce np.abs(x), or x.real and x.imag"
        )


def _kind_name(dtype: DType) -> str:
    if dtype.names is not None:
        return "a structured dtype"
    names = {"O": "objects", "S": "bytes", "U": "strings", "T": "strings"}
    times = {"M": "dates", "m": "time differences"}
    return names.get(dtype.kind) or times.get(dtype.kind) or f"the dtype {dtype}"
