# SPDX-License-Identifier: Apache-2.0
"""LLVM code for one step of a recipe on a vector of lanes: load, widen, fold, finish, round, store.

Python functions that build instructions. Vectors are written out rather than left to the
vectoriser, which gives up on many pointers that might overlap, and never streams.
"""

from typing import Any, Final

from aiodist_kernels import half_floats
from aiodist_kernels.llvm import Builder, Value, constant, ir, like, multiply_add, shuffle
from aiodist_kernels.recipes import Lane, Recipe, Step
from aiodist_kernels.rules import Finish

_TYPES: Final = {Lane.FLOAT32: ir.FloatType(), Lane.FLOAT64: ir.DoubleType()}


def lane_type(lane: Lane) -> Any:
    """Return the LLVM type of a lane; 16-bit floats are integers until they are widened."""
    return _TYPES.get(lane) or ir.IntType(8 * lane.size)


def load(builder: Builder, lane: Lane, address: Value, width: int) -> Value:
    """Load `width` lanes from any address."""
    kind = ir.VectorType(lane_type(lane), width)
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def load_storage(builder: Builder, recipe: Recipe, address: Value, width: int) -> Value:
    """Load `width` lanes of a buffer, widened to the accumulator."""
    return widen(builder, recipe, load(builder, recipe.storage, address, width))


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
    instruction = builder.store(value, pointer, align=value.type.count * _size(value.type.element))
    hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    instruction.set_metadata("nontemporal", hint)


def widen(builder: Builder, recipe: Recipe, value: Value) -> Value:
    """Turn storage lanes into accumulator lanes, exactly (but for 64-bit integers into float64)."""
    storage, accumulator = recipe.storage, recipe.accumulator
    if storage is Lane.BOOL:
        return builder.zext(builder.icmp_unsigned("!=", value, constant(value.type, 0)), value.type)
    if storage is Lane.BFLOAT16:
        value = half_floats.widen_bfloat16(builder, value)
    elif storage is Lane.FLOAT16:
        value = half_floats.widen_float16(builder, value)
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
        total = half_floats.round_to_odd_float32(builder, total)
    if recipe.result is Lane.BFLOAT16:
        return half_floats.round_to_bfloat16(builder, total)
    return half_floats.round_to_float16(builder, total)


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


def _size(kind: Any) -> int:
    return {ir.FloatType(): 4, ir.DoubleType(): 8}.get(kind) or kind.width // 8


def _is_integer(value: Value) -> bool:
    return isinstance(value.type.element, ir.IntType)
