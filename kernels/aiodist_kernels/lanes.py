# SPDX-License-Identifier: Apache-2.0
"""LLVM code for one step of a rule on a vector of lanes: load, widen, fold, finish, round, store.

The code uses vectors explicitly, because the vectoriser gives up on many pointers that might overlap, and never emits
streaming stores.
"""

from typing import Any, Final

from llvmlite import ir

from aiodist_kernels.rules import (
    FLOAT32,
    FLOAT64,
    DType,
    Finish,
    ReduceOp,
    Rule,
    is_bfloat16,
    is_half,
    lane,
    later_zero_wins,
)

Builder = Any
Value = Any

_TYPES: Final = {FLOAT32: ir.FloatType(), FLOAT64: ir.DoubleType()}


def lane_type(dtype: DType) -> Any:
    """Return the LLVM type of a lane; 16-bit floats are integers until they are widened."""
    return _TYPES.get(dtype) or ir.IntType(8 * dtype.itemsize)


def constant(kind: Any, number: float) -> Value:
    """Return `number` in every lane of a vector type."""
    return ir.Constant(kind, [number] * kind.count)


def _like(value: Value, scalar: Any) -> Any:
    """Return the type of as many lanes of type `scalar` as a vector has."""
    return ir.VectorType(scalar, value.type.count)


# Memory.


def address(builder: Builder, base: Value, index: Value, dtype: DType) -> Value:
    """Return the address of a lane of an array of `dtype`."""
    return builder.add(base, builder.mul(index, ir.Constant(index.type, lane(dtype).itemsize)))


def load(builder: Builder, rule: Rule, address: Value, width: int) -> Value:
    """Load `width` lanes of a buffer from any address, and widen them to the accumulator."""
    kind = ir.VectorType(lane_type(lane(rule.dtype)), width)
    return widen(builder, rule, builder.load(builder.inttoptr(address, kind.as_pointer()), align=1))


def store(builder: Builder, value: Value, address: Value, *, streaming: bool) -> None:
    """Store to any address; or, streaming past the caches, to a multiple of 64, the vector's size."""
    pointer = builder.inttoptr(address, value.type.as_pointer())
    instruction = builder.store(value, pointer, align=64 if streaming else 1)
    if streaming:
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        instruction.set_metadata("nontemporal", hint)


# The fold.


def widen(builder: Builder, rule: Rule, value: Value) -> Value:
    """Convert storage lanes to accumulator lanes, exactly (except 64-bit integers to float64)."""
    storage, accumulator = lane(rule.dtype), rule.registers
    if storage.kind == "b":
        return builder.zext(builder.icmp_unsigned("!=", value, constant(value.type, 0)), value.type)
    if is_bfloat16(storage):
        wide = builder.zext(value, _like(value, ir.IntType(32)))
        value = builder.bitcast(builder.shl(wide, constant(wide.type, 16)), _like(value, ir.FloatType()))
    elif is_half(storage):
        value = builder.bitcast(value, _like(value, ir.HalfType()))
    elif storage == accumulator:
        return value
    kind = _like(value, lane_type(accumulator))
    if _is_integer(value):
        convert = builder.uitofp if storage.kind == "u" else builder.sitofp
        return convert(value, kind)
    return value if value.type == kind else builder.fpext(value, kind)


def fold(builder: Builder, rule: Rule, total: Value, value: Value) -> Value:
    """Take one step of the fold. Complex products are not handled here, because they mix lanes."""
    integer = _is_integer(total)
    if rule.op in (ReduceOp.SUM, ReduceOp.MEAN):
        return builder.add(total, value) if integer else builder.fadd(total, value)
    if rule.op is ReduceOp.PRODUCT:
        return builder.mul(total, value) if integer else builder.fmul(total, value)
    sign = "<" if rule.op is ReduceOp.MIN else ">"
    if integer:
        compare = builder.icmp_signed if rule.dtype.kind == "i" else builder.icmp_unsigned
        return builder.select(compare(sign, total, value), total, value)
    # A NaN wins, and `later_zero_wins` decides between equal values. Processors have one instruction for the first
    # select, which takes the second operand if they are equal or one is NaN.
    first, second = (total, value) if later_zero_wins(rule.dtype) else (value, total)
    chosen = builder.select(builder.fcmp_ordered(sign, first, second), first, second)
    return builder.select(builder.fcmp_unordered("uno", first, first), first, chosen)


def finish(builder: Builder, rule: Rule, total: Value, count: Value, *, narrows_double: bool = False) -> Value:
    """Scale or divide by the number of buffers, an integer, and round once.

    `narrows_double`: whether there is an instruction that rounds float64 to float16.
    """
    if rule.finish is not Finish.NOTHING:
        number = builder.sitofp(count, total.type.element)
        first = builder.insert_element(ir.Constant(total.type, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
        by = builder.shuffle_vector(first, first, constant(_like(total, ir.IntType(32)), 0))
        if rule.finish is Finish.SCALE:
            total = builder.fmul(total, builder.fdiv(constant(total.type, 1.0), by))
        else:
            total = builder.fdiv(total, by)
    if lane(rule.result) == rule.registers:
        return total
    if not is_half(rule.result):
        return builder.fptrunc(total, _like(total, lane_type(lane(rule.result))))
    to_bfloat16 = is_bfloat16(rule.result)
    if rule.registers == FLOAT64 and (to_bfloat16 or not narrows_double):
        total = _round_to_odd_float32(builder, total)
    if to_bfloat16:
        return _round_to_bfloat16(builder, total)
    half = builder.fptrunc(total, _like(total, ir.HalfType()))
    return builder.bitcast(half, _like(total, ir.IntType(16)))


def _is_integer(value: Value) -> bool:
    return isinstance(value.type.element, ir.IntType)


# 16-bit floats, in vectors of 16-bit integers. Processors and GPUs have instructions for float16; bfloat16 is converted
# by integer operations, with the same bits everywhere.


def _round_to_bfloat16(builder: Builder, number: Value) -> Value:
    """Round to nearest even by adding just less than half a unit, or half of one if it is odd."""
    kind = _like(number, ir.IntType(32))
    bits = builder.bitcast(number, kind)
    high = builder.lshr(bits, constant(kind, 16))
    odd = builder.and_(high, constant(kind, 1))
    near = builder.add(bits, builder.add(odd, constant(kind, 0x7FFF)))
    quiet_nan = builder.or_(high, constant(kind, 0x40))
    is_nan = builder.fcmp_unordered("uno", number, number)
    chosen = builder.select(is_nan, quiet_nan, builder.lshr(near, constant(kind, 16)))
    return builder.trunc(chosen, _like(number, ir.IntType(16)))


def _round_to_odd_float32(builder: Builder, number: Value) -> Value:
    """Round float64 to float32 so that a second rounding, to 16 bits, is right; see `rules.rounded`."""
    near = builder.fptrunc(number, _like(number, ir.FloatType()))
    exact = builder.fpext(near, number.type)
    bits = builder.bitcast(near, _like(number, ir.IntType(32)))
    magnitude = _magnitude(builder, number)
    beyond = builder.fcmp_ordered(">", _magnitude(builder, exact), magnitude)
    inexact = builder.fcmp_unordered("!=", exact, number)
    cut = builder.sub(bits, builder.zext(beyond, bits.type))
    return builder.bitcast(builder.or_(cut, builder.zext(inexact, bits.type)), near.type)


def _magnitude(builder: Builder, number: Value) -> Value:
    kind = _like(number, ir.IntType(64))
    bits = builder.and_(builder.bitcast(number, kind), constant(kind, 0x7FFFFFFFFFFFFFFF))
    return builder.bitcast(bits, number.type)
