# SPDX-License-Identifier: Apache-2.0
"""One door to the LLVM instructions that Numba brings along."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from numba.core import cgutils

_numba: Any = cast(Any, cgutils)  # it re-exports LLVM's builder, and annotates nothing
ir = _numba.ir

Builder = Any
Value = Any


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
    return _numba.get_or_insert_function(module, signature, name)


def alloca(builder: Builder, kind: Any) -> Value:
    """Return a place for a value, which becomes a register."""
    return _numba.alloca_once(builder, kind)


@contextmanager
def count_from_one(builder: Builder, stop: Value) -> Iterator[Value]:
    """Repeat what is built inside, for 1, 2, … below `stop`."""
    with _numba.for_range(builder, stop, start=constant(stop.type, 1)) as loop:
        yield loop.index
