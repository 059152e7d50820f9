# SPDX-License-Identifier: Apache-2.0
"""LLVM code for float16 and bfloat16 in vectors of 16-bit integers: widen to float32, and round back.

It uses integer operations alone, so it needs no conversion instructions (nor a library's
fallback for them, which compiled code cannot link), and does on every processor the same.

Source of the float16 conversions: F. Giesen, "Half to float done quick", and its companion
float_to_half_fast3_rtne (public domain).
"""

from aiodist_kernels.llvm import Builder, Value, constant, ir, like

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
