# SPDX-License-Identifier: Apache-2.0
"""What a reduction means: one rule for each (op, dtype, accumulate).

All tiers read the same rules and must give the same bits. A reduction is a left fold in buffer order that starts from
buffer 0 (from zero, -0.0 would become 0.0):

    dtype               SUM, PRODUCT            MEAN                    MIN, MAX
    float64, longdouble in itself               in itself, / n          NaN propagates
    float32             in itself               in float64, * (1/n)     NaN propagates
    float16, bfloat16   in float32              in float32, * (1/n)     NaN propagates
    integers            in itself, wraps        in float64, / n         exact
    bool                TypeError               TypeError               all / any
    complex128          in itself               in itself, / n          TypeError
    complex64           in itself               in complex128, * (1/n)  TypeError

An accumulator wider than the result is rounded once, to nearest even, at the end. The mean then multiplies by 1/n in
the accumulator, which is cheaper than a division and rounds to the same value, except for a tie that the accumulator's
last bit decides; the mean of identical buffers is exact either way. `accumulate="float64"` widens the accumulator of
every inexact SUM, MEAN and PRODUCT to float64 (complex128).
"""

import enum
import functools
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

Accumulate = Literal["native", "float64"]
DType = np.dtype[Any]
Array = np.ndarray[Any, np.dtype[Any]]

FLOAT32: Final[DType] = np.dtype(np.float32)
FLOAT64: Final[DType] = np.dtype(np.float64)


class ReduceOp(enum.Enum):
    """How the values of several replicas are combined, under the names of `tf.distribute`.

    `ReduceOp("sum")` finds a member by its name in any case.

    Raises:
        ValueError: from `ReduceOp(value)`, for anything that names no member.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PRODUCT = "PRODUCT"

    # Every small reduction hashes a member, and Enum's hash is written in Python. Members are singletons.
    if not TYPE_CHECKING:
        __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> "ReduceOp":
        member = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if member is None:
            raise ValueError(
                f"expected a reduce op, one of {', '.join(cls.__members__)} "
                f"(ReduceOp.SUM, or the string 'SUM' in any case), got {value!r}"
            )
        return member


ReduceOp.__module__ = "aiodist_kernels"


class Finish(enum.Enum):
    """The last step, before rounding."""

    NOTHING = "nothing"
    SCALE = "multiply by 1/n"
    DIVIDE = "divide by n"


class Rule(NamedTuple):
    """How buffers of one dtype are reduced by one op."""

    op: ReduceOp
    dtype: DType  # the buffers', in native byte order
    accumulator: DType  # in which the fold runs
    result: DType
    ufunc: np.ufunc  # one step of the fold
    finish: Finish
    # Whether operands must be contiguous to always give the same bits. NumPy's complex product fuses a multiplication
    # and an addition in its vector loops, but not in the scalar loop for some strides.
    contiguous: bool

    @property
    def is_native(self) -> bool:
        """Whether the fold runs in the buffers' own dtype, and its total is the result."""
        return self.accumulator == self.dtype and self.finish is Finish.NOTHING

    @property
    def grain(self) -> int:
        """The number of lanes that stay together: two for a complex product, which mixes both components."""
        return 2 if self.contiguous else 1

    @property
    def registers(self) -> DType:
        """The dtype in which a compiled kernel folds: never 16 bits, which are widened even for MIN and MAX."""
        return FLOAT32 if is_half(self.accumulator) else lane(self.accumulator)


_UFUNCS: Final[dict[ReduceOp, np.ufunc]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def is_bfloat16(dtype: DType) -> bool:
    """Return whether `dtype` is bfloat16, which NumPy has only if a library has registered it."""
    return dtype.name == "bfloat16"


def is_half(dtype: DType) -> bool:
    """Return whether `dtype` is a float of 16 bits."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"


@functools.cache
def rule_for(op: ReduceOp, dtype: DType, accumulate: Accumulate = "native") -> Rule:
    """Return the rule for buffers of `dtype`; raise a TypeError if `op` is not defined for it."""
    native = np.dtype(dtype.type) if dtype.kind in "biufc" else dtype  # the one object that NumPy has for it
    _check_defined(op, native)
    accumulator = _accumulator(op, native, accumulate)
    result = accumulator if op is ReduceOp.MEAN and native.kind in "iu" else native
    finish = Finish.NOTHING
    if op is ReduceOp.MEAN:
        finish = Finish.DIVIDE if accumulator == result else Finish.SCALE
    return Rule(op, native, accumulator, result, _UFUNCS[op], finish, op is ReduceOp.PRODUCT and native.kind == "c")


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


def _check_defined(op: ReduceOp, dtype: DType) -> None:
    is_numpys = dtype.isbuiltin == 1  # others, such as an 8-bit float, may have these kinds, too
    if not ((is_numpys and dtype.kind in "biufc") or is_bfloat16(dtype)):
        found = {"O": "objects", "S": "strings", "U": "strings"}.get(dtype.kind, "another dtype")
        raise TypeError(
            f"{op.name} of {dtype}: expected numbers, got {found}; reduce the numbers in it as arrays of their own"
        )
    ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
    if dtype.kind == "b" and not ordered:
        raise TypeError(
            f"{op.name} of bool: expected numbers, got bool; cast first, e.g. x.astype(np.int64) or int(x), or use "
            "MIN (all) or MAX (any)"
        )
    if dtype.kind == "c" and ordered:
        raise TypeError(
            f"{op.name} of {dtype}: expected an ordered dtype, got complex numbers, which have no order; reduce "
            "abs(x), or x.real and x.imag"
        )


# Rounding.


def rounded(values: Array, dtype: DType) -> Array:
    """Return `values` as `dtype`, each rounded once to nearest even; in fresh memory if the dtypes differ."""
    if dtype.isbuiltin != 1 and values.dtype == FLOAT64:  # bfloat16
        values = _to_odd_float32(values)
    return values.astype(dtype, copy=False)


def _to_odd_float32(values: Array) -> Array:
    """Round float64 to float32 such that a second rounding to bfloat16 is right.

    Libraries convert float64 to bfloat16 by way of float32 and so round twice. Rounding to odd (truncate, and set the
    last bit if that lost something) keeps what the second rounding needs, because float32 has more than two bits more
    than bfloat16.

    Source: S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
    odd", IEEE Transactions on Computers 57(4), 2008.
    """
    near = np.array(values, np.float32)
    bits = near.view(np.uint32)
    exact = near.astype(np.float64)
    beyond = np.abs(exact) > np.abs(values)
    bits[...] = np.where(beyond, bits - np.uint32(1), bits) | (exact != values)
    return near


# For compiled kernels.


def lane(dtype: DType) -> DType:
    """Return the dtype of the parts of an element: a complex number has two."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def components(dtype: DType) -> int:
    """Return the number of lanes of an element."""
    return 2 if dtype.kind == "c" else 1


def has_kernels(rule: Rule) -> bool:
    """Return whether compiled kernels support the dtypes: all but long double."""
    return all(lane(dtype).itemsize <= FLOAT64.itemsize for dtype in (rule.dtype, rule.accumulator, rule.result))


@functools.cache
def later_zero_wins(dtype: DType) -> bool:
    """Ask NumPy which of two zeros MIN and MAX return, which depends on the processor and the dtype."""
    zero: np.ndarray[Any, DType] = np.zeros(64, dtype)
    return dtype.kind not in "biu" and bool(np.signbit(np.maximum(zero, -zero)[0]))


@functools.cache
def product_is_fused(dtype: DType) -> bool:
    """Ask NumPy whether its loops for complex products fuse operations, which depends on the processor."""
    # The real part of (x + xi)(x + xi) is x * x - x * x: zero, unless one of the products was not rounded.
    x = 1 + np.finfo(dtype).eps
    factors = np.full(64, complex(x, x), dtype)
    return bool((factors * factors)[0].real != 0)
