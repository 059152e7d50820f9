# SPDX-License-Identifier: Apache-2.0
"""LLVM code for one step of a rule on a vector of lanes: load, widen, fold, finish, round, store.

Python functions that build instructions. Vectors are written out rather than left to the vectoriser, which gives up on
many pointers that might overlap, and never streams.
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
    product_is_fused,
)

Builder = Any
Value = Any

_TYPES: Final = {FLOAT32: ir.FloatType(), FLOAT64: ir.DoubleType()}


def lane_type(dtype: DType) -> Any:
    """Return the LLVM type of a lane; 16-bit floats are integers until they are widened."""
    return _TYPES.get(dtype) or ir.IntType(8 * dtype.itemsize)


def load(builder: Builder, rule: Rule, address: Value, width: int) -> Value:
    """Load `width` lanes of a buffer from any address, widened to the accumulator."""
    kind = ir.VectorType(lane_type(lane(rule.dtype)), width)
    return widen(builder, rule, builder.load(builder.inttoptr(address, kind.as_pointer()), align=1))


def spread_count(builder: Builder, rule: Rule, count: Value, width: int) -> Value:
    """Put an integer into every lane of an accumulator, which is one of floats, for `finish`."""
    number = builder.sitofp(count, lane_type(rule.registers))
    undefined = ir.Constant(ir.VectorType(number.type, width), ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    return shuffle(builder, first, [0] * width)


def store(builder: Builder, value: Value, address: Value, *, streaming: bool) -> None:
    """Store to any address, or, past the caches, to one that is a multiple of the vector's size."""
    pointer = builder.inttoptr(address, value.type.as_pointer())
    if not streaming:
        builder.store(value, pointer, align=1)
        return
    kind = value.type.element
    size = {ir.FloatType(): 4, ir.DoubleType(): 8}.get(kind) or kind.width // 8
    instruction = builder.store(value, pointer, align=value.type.count * size)
    hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    instruction.set_metadata("nontemporal", hint)


def widen(builder: Builder, rule: Rule, value: Value) -> Value:
    """Turn storage lanes into accumulator lanes, exactly (but for 64-bit integers into float64)."""
    storage, accumulator = lane(rule.dtype), rule.registers
    if storage.kind == "b":
        return builder.zext(builder.icmp_unsigned("!=", value, constant(value.type, 0)), value.type)
    if is_bfloat16(storage):
        value = widen_bfloat16(builder, value)
    elif is_half(storage):
        value = builder.bitcast(value, like(value.type, ir.HalfType()))
    elif storage == accumulator:
        return value
    kind = like(value.type, lane_type(accumulator))
    if _is_integer(value):
        convert = builder.uitofp if storage.kind == "u" else builder.sitofp
        return convert(value, kind)
    return value if value.type == kind else builder.fpext(value, kind)


def fold(builder: Builder, rule: Rule, total: Value, value: Value) -> Value:
    """Take one step of the fold."""
    if rule.op in (ReduceOp.SUM, ReduceOp.MEAN):
        return builder.add(total, value) if _is_integer(total) else builder.fadd(total, value)
    if rule.op is ReduceOp.PRODUCT:
        if rule.grain > 1:
            return _multiply_complex(builder, rule, total, value)
        return builder.mul(total, value) if _is_integer(total) else builder.fmul(total, value)
    if _is_integer(total):
        return _choose_integer(builder, rule, total, value)
    return _choose_float(builder, rule, total, value)


def finish(builder: Builder, rule: Rule, total: Value, count: Value, *, narrows_double: bool = False) -> Value:
    """Scale or divide by the number of buffers (given in accumulator lanes), and round once.

    `narrows_double`: there is an instruction that rounds float64 to float16.
    """
    if rule.finish is Finish.SCALE:
        total = builder.fmul(total, builder.fdiv(constant(total.type, 1.0), count))
    elif rule.finish is Finish.DIVIDE:
        total = builder.fdiv(total, count)
    if lane(rule.result) == rule.registers:
        return total
    if not is_half(rule.result):
        return builder.fptrunc(total, like(total.type, lane_type(lane(rule.result))))
    to_bfloat16 = is_bfloat16(rule.result)
    if rule.registers == FLOAT64 and (to_bfloat16 or not narrows_double):
        total = round_to_odd_float32(builder, total)
    if to_bfloat16:
        return round_to_bfloat16(builder, total)
    half = builder.fptrunc(total, like(total.type, ir.HalfType()))
    return builder.bitcast(half, like(total.type, ir.IntType(16)))


def _choose_float(builder: Builder, rule: Rule, total: Value, value: Value) -> Value:
    """Choose the smaller or greater; a NaN wins, and `later_zero_wins` decides between equals.

    The first choice is the one instruction that processors have for it, which takes its second
    operand when they are equal or one is NaN.
    """
    first, second = (total, value) if later_zero_wins(rule.dtype) else (value, total)
    sign = "<" if rule.op is ReduceOp.MIN else ">"
    chosen = builder.select(builder.fcmp_ordered(sign, first, second), first, second)
    return builder.select(builder.fcmp_unordered("uno", first, first), first, chosen)


def _choose_integer(builder: Builder, rule: Rule, total: Value, value: Value) -> Value:
    sign = "<" if rule.op is ReduceOp.MIN else ">"
    signed = rule.dtype.kind == "i"
    compare = builder.icmp_signed if signed else builder.icmp_unsigned
    return builder.select(compare(sign, total, value), total, value)


def _multiply_complex(builder: Builder, rule: Rule, total: Value, value: Value) -> Value:
    """Multiply pairs (x, y)(u, v) as (x * u - y * v, x * v + y * u), the second products first."""
    width = total.type.count
    real = shuffle(builder, total, [i & ~1 for i in range(width)])
    imaginary = shuffle(builder, total, [i | 1 for i in range(width)])
    swapped = shuffle(builder, value, [i ^ 1 for i in range(width)])
    crossed = builder.fmul(imaginary, swapped)
    negated = builder.fneg(crossed)
    mask = [i + width * (i & 1) for i in range(width)]
    signed = shuffle(builder, negated, mask, crossed)
    if product_is_fused(rule.accumulator):
        return multiply_add(builder, real, value, signed)
    return builder.fadd(builder.fmul(real, value), signed)


def _is_integer(value: Value) -> bool:
    return isinstance(value.type.element, ir.IntType)


# 16-bit floats, in vectors of 16-bit integers. Processors and GPUs have instructions for float16; of bfloat16, integer
# operations give the same everywhere.


def widen_bfloat16(builder: Builder, half: Value) -> Value:
    """Put 16 zero bits below."""
    wide = builder.zext(half, like(half.type, ir.IntType(32)))
    return _as_float(builder, builder.shl(wide, constant(wide.type, 16)))


def round_to_bfloat16(builder: Builder, number: Value) -> Value:
    """Round to nearest even by adding just less than half a unit, or half of one if it is odd."""
    bits = _as_bits(builder, number)
    kind = bits.type
    high = builder.lshr(bits, constant(kind, 16))
    odd = builder.and_(high, constant(kind, 1))
    near = builder.add(bits, builder.add(odd, constant(kind, 0x7FFF)))
    quiet_nan = builder.or_(high, constant(kind, 0x40))
    is_nan = builder.fcmp_unordered("uno", number, number)
    return _low_half(builder, builder.select(is_nan, quiet_nan, builder.lshr(near, constant(kind, 16))))


def round_to_odd_float32(builder: Builder, number: Value) -> Value:
    """Round float64 to float32 so that a second rounding, to 16 bits, is right; see `rules.to_odd_float32`."""
    near = builder.fptrunc(number, like(number.type, ir.FloatType()))
    exact = builder.fpext(near, number.type)
    bits = _as_bits(builder, near)
    magnitude = _magnitude(builder, number)
    beyond = builder.fcmp_ordered(">", _magnitude(builder, exact), magnitude)
    inexact = builder.fcmp_unordered("!=", exact, number)
    cut = builder.sub(bits, builder.zext(beyond, bits.type))
    return _as_float(builder, builder.or_(cut, builder.zext(inexact, bits.type)))


def _magnitude(builder: Builder, number: Value) -> Value:
    kind = like(number.type, ir.IntType(64))
    bits = builder.and_(builder.bitcast(number, kind), constant(kind, 0x7FFFFFFFFFFFFFFF))
    return builder.bitcast(bits, number.type)


def _as_bits(builder: Builder, number: Value) -> Value:
    return builder.bitcast(number, like(number.type, ir.IntType(32)))


def _as_float(builder: Builder, bits: Value) -> Value:
    return builder.bitcast(bits, like(bits.type, ir.FloatType()))


def _low_half(builder: Builder, bits: Value) -> Value:
    return builder.trunc(bits, like(bits.type, ir.IntType(16)))


# Instructions.


def constant(kind: Any, number: float) -> Value:
    """Return `number` in every lane of a vector type."""
    return ir.Constant(kind, [number] * kind.count)


def like(kind: Any, scalar: Any) -> Any:
    """Return the type of as many lanes of type `scalar`."""
    return ir.VectorType(scalar, kind.count)


def shuffle(builder: Builder, one: Value, mask: list[int], other: Value | None = None) -> Value:
    """Return the lanes `mask` of `one`, with those of `other` counted behind."""
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), len(mask)), mask)
    return builder.shuffle_vector(one, one if other is None else other, lanes)


def multiply_add(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """Return x * y + z, rounded once, for vectors of floats."""
    kind = x.type
    bits = 64 if isinstance(kind.element, ir.DoubleType) else 32
    signature = ir.FunctionType(kind, [kind] * 3)
    name = f"llvm.fma.v{kind.count}f{bits}"
    return builder.call(function(builder.module, signature, name), [x, y, z])


def function(module: Any, signature: Any, name: str) -> Value:
    """Return a function of the module, declared at the first call."""
    return module.globals.get(name) or ir.Function(module, signature, name)
