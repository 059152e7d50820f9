# SPDX-License-Identifier: Apache-2.0
"""LLVM code for one step of a recipe on a vector of lanes: load, widen, fold, finish, round, store.

Python functions that build instructions. Vectors are written out rather than left to the vectoriser, which gives up on
many pointers that might overlap, and never streams.
"""

from typing import Any, Final

from llvmlite import ir

from aiodist_kernels.rules import Finish, Lane, Recipe, Step

Builder = Any
Value = Any

_TYPES: Final = {Lane.FLOAT32: ir.FloatType(), Lane.FLOAT64: ir.DoubleType()}


def lane_type(lane: Lane) -> Any:
    """Return the LLVM type of a lane; 16-bit floats are integers until they are widened."""
    return _TYPES.get(lane) or ir.IntType(8 * lane.size)


def load(builder: Builder, recipe: Recipe, address: Value, width: int) -> Value:
    """Load `width` lanes of a buffer from any address, widened to the accumulator."""
    kind = ir.VectorType(lane_type(recipe.storage), width)
    return widen(builder, recipe, builder.load(builder.inttoptr(address, kind.as_pointer()), align=1))


def spread_count(builder: Builder, recipe: Recipe, count: Value, width: int) -> Value:
    """Put an integer into every accumulator lane, for `finish`."""
    scalar = lane_type(recipe.accumulator)
    if not isinstance(scalar, ir.IntType):
        count = builder.sitofp(count, scalar)
    else:
        count = builder.trunc(count, scalar) if scalar.width < count.type.width else count
    kind = ir.VectorType(scalar, width)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), count, ir.Constant(ir.IntType(32), 0))
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


def widen(builder: Builder, recipe: Recipe, value: Value) -> Value:
    """Turn storage lanes into accumulator lanes, exactly (but for 64-bit integers into float64)."""
    storage, accumulator = recipe.storage, recipe.accumulator
    if storage is Lane.BOOL:
        return builder.zext(builder.icmp_unsigned("!=", value, constant(value.type, 0)), value.type)
    if storage is Lane.BFLOAT16:
        value = widen_bfloat16(builder, value)
    elif storage is Lane.FLOAT16:
        value = widen_float16(builder, value)
    elif storage is accumulator:
        return value
    kind = like(value.type, lane_type(accumulator))
    if _is_integer(value):
        convert = builder.uitofp if storage.value.startswith("uint") else builder.sitofp
        return convert(value, kind)
    return value if value.type == kind else builder.fpext(value, kind)


def fold(builder: Builder, recipe: Recipe, total: Value, value: Value) -> Value:
    """Take one step of the fold."""
    if recipe.step is Step.ADD:
        return builder.add(total, value) if _is_integer(total) else builder.fadd(total, value)
    if recipe.step is Step.MULTIPLY:
        return builder.mul(total, value) if _is_integer(total) else builder.fmul(total, value)
    if recipe.step is Step.COMPLEX_MULTIPLY:
        return _multiply_complex(builder, recipe, total, value)
    if _is_integer(total):
        return _choose_integer(builder, recipe, total, value)
    return _choose_float(builder, recipe, total, value)


def finish(builder: Builder, recipe: Recipe, total: Value, count: Value) -> Value:
    """Scale or divide by the number of buffers (given in accumulator lanes), and round once."""
    if recipe.finish is Finish.SCALE:
        total = builder.fmul(total, builder.fdiv(constant(total.type, 1.0), count))
    elif recipe.finish is Finish.DIVIDE:
        total = builder.fdiv(total, count)
    if recipe.result is recipe.accumulator:
        return total
    if not recipe.result.is_half:
        return builder.fptrunc(total, like(total.type, lane_type(recipe.result)))
    if recipe.accumulator is Lane.FLOAT64:
        total = round_to_odd_float32(builder, total)
    if recipe.result is Lane.BFLOAT16:
        return round_to_bfloat16(builder, total)
    return round_to_float16(builder, total)


def _choose_float(builder: Builder, recipe: Recipe, total: Value, value: Value) -> Value:
    """Choose the smaller or greater; a NaN wins, and `later_zero_wins` decides between equals.

    The first choice is the one instruction that processors have for it, which takes its second
    operand when they are equal or one is NaN.
    """
    first, second = (total, value) if recipe.later_zero_wins else (value, total)
    sign = "<" if recipe.step is Step.MINIMUM else ">"
    chosen = builder.select(builder.fcmp_ordered(sign, first, second), first, second)
    return builder.select(builder.fcmp_unordered("uno", first, first), first, chosen)


def _choose_integer(builder: Builder, recipe: Recipe, total: Value, value: Value) -> Value:
    sign = "<" if recipe.step is Step.MINIMUM else ">"
    signed = recipe.storage.value.startswith("int")
    compare = builder.icmp_signed if signed else builder.icmp_unsigned
    return builder.select(compare(sign, total, value), total, value)


def _multiply_complex(builder: Builder, recipe: Recipe, total: Value, value: Value) -> Value:
    """Multiply pairs (x, y)(u, v) as (x * u - y * v, x * v + y * u), the second products first."""
    width = total.type.count
    real = shuffle(builder, total, [i & ~1 for i in range(width)])
    imaginary = shuffle(builder, total, [i | 1 for i in range(width)])
    swapped = shuffle(builder, value, [i ^ 1 for i in range(width)])
    crossed = builder.fmul(imaginary, swapped)
    negated = builder.fneg(crossed)
    mask = [i + width * (i & 1) for i in range(width)]
    signed = shuffle(builder, negated, mask, crossed)
    if recipe.fused:
        return multiply_add(builder, real, value, signed)
    return builder.fadd(builder.fmul(real, value), signed)


def _is_integer(value: Value) -> bool:
    return isinstance(value.type.element, ir.IntType)


# float16 and bfloat16, in vectors of 16-bit integers: widened to float32, and rounded back. Integer operations alone do
# it, so no conversion instructions are needed (nor a library's fallback for them, which compiled code cannot link), and
# every processor gives the same.
#
# Source of the float16 conversions: F. Giesen, "Half to float done quick", and its companion float_to_half_fast3_rtne
# (public domain).

_EXPONENT = 0x7C00 << 13  # of float16, moved to where float32 has its own
_LEAST_NORMAL = 113 << 23  # 2**-14, the smallest normal float16, in the bits of float32


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


def widen_float16(builder: Builder, half: Value) -> Value:
    """Move the exponent to its place and correct its bias; subnormals by a subtraction."""
    wide = builder.zext(half, like(half.type, ir.IntType(32)))
    kind = wide.type
    sign = builder.shl(builder.and_(wide, constant(kind, 0x8000)), constant(kind, 16))
    magnitude = builder.shl(builder.and_(wide, constant(kind, 0x7FFF)), constant(kind, 13))
    exponent = builder.and_(magnitude, constant(kind, _EXPONENT))
    normal = builder.add(magnitude, constant(kind, (127 - 15) << 23))
    infinite = builder.add(normal, constant(kind, (128 - 16) << 23))
    above = _as_float(builder, builder.add(magnitude, constant(kind, _LEAST_NORMAL)))
    subnormal = _as_bits(builder, builder.fsub(above, constant(above.type, 2.0**-14)))
    is_subnormal = builder.icmp_unsigned("==", exponent, constant(kind, 0))
    is_infinite = builder.icmp_unsigned("==", exponent, constant(kind, _EXPONENT))
    finite = builder.select(is_subnormal, subnormal, normal)
    return _as_float(builder, builder.or_(builder.select(is_infinite, infinite, finite), sign))


def round_to_float16(builder: Builder, number: Value) -> Value:
    """Round to nearest even; subnormals by an addition that moves their last bit to the end."""
    signed = _as_bits(builder, number)
    kind = signed.type
    bits = builder.and_(signed, constant(kind, 0x7FFFFFFF))
    sign = builder.lshr(builder.xor(signed, bits), constant(kind, 16))
    magic = constant(kind, ((127 - 15) + (23 - 10) + 1) << 23)
    moved = builder.fadd(_as_float(builder, bits), _as_float(builder, magic))
    subnormal = builder.sub(_as_bits(builder, moved), magic)
    odd = builder.and_(builder.lshr(bits, constant(kind, 13)), constant(kind, 1))
    near = builder.add(builder.add(bits, constant(kind, ((15 - 127) << 23) + 0xFFF)), odd)
    normal = builder.lshr(near, constant(kind, 13))
    is_nan = builder.icmp_unsigned(">", bits, constant(kind, 255 << 23))
    beyond = builder.select(is_nan, constant(kind, 0x7E00), constant(kind, 0x7C00))
    is_subnormal = builder.icmp_unsigned("<", bits, constant(kind, _LEAST_NORMAL))
    is_beyond = builder.icmp_unsigned(">=", bits, constant(kind, (127 + 16) << 23))
    finite = builder.select(is_subnormal, subnormal, normal)
    return _low_half(builder, builder.or_(builder.select(is_beyond, beyond, finite), sign))


def round_to_odd_float32(builder: Builder, number: Value) -> Value:
    """Round float64 to float32 so that a second rounding, to 16 bits, is right; see `rounding`."""
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
    """Return `number` in every lane of a scalar or vector type."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [number] * kind.count)
    return ir.Constant(kind, number)


def like(kind: Any, scalar: Any) -> Any:
    """Return the type with the shape of `kind` and lanes of type `scalar`."""
    return ir.VectorType(scalar, kind.count) if isinstance(kind, ir.VectorType) else scalar


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
