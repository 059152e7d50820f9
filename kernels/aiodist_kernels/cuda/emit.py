# SPDX-License-Identifier: Apache-2.0
"""The machine that writes LLVM instructions for a GPU; what they compute is the CPU kernels' own code.

Only memory and two operations differ from the CPU. Vectors are loaded and stored as 32- or 64-bit
words, which the compiler keeps together as one 128-bit access, whatever the lanes are. float16
is converted by the GPU's own instructions, which round as IEEE says. And the complex product says how each
of its operations is rounded: else the compiler would fuse a multiplication with an addition.
"""

from typing import Any

from aiodist_kernels import lanes
from aiodist_kernels.llvm import Builder, Value, function, ir
from aiodist_kernels.recipes import Lane, Recipe, Step
from aiodist_kernels.rules import Finish

_GLOBAL = 1  # the address space of device memory


class Emitter:
    """Writes instructions for `width` lanes at a time.

    Args:
        builder: appends them.
        recipe: what they compute.
        width: a whole vector of 16 bytes of each buffer, or the lanes of one element.
        vector: whether addresses are multiples of 16.
    """

    def __init__(self, builder: Builder, recipe: Recipe, width: int, *, vector: bool) -> None:
        self.builder = builder
        self.recipe = recipe
        self.width = width
        self.vector = vector

    def load(self, address: Value, index: Value) -> Value:
        """See `folds.Machine`."""
        lane = self.recipe.storage
        place = self._place(address, index, lane)
        read = self._load_words if self.vector else self._load_lanes
        return self._widen(read(place, lane))

    def fold(self, total: Value, value: Value) -> Value:
        """See `folds.Machine`."""
        if self.recipe.step is Step.COMPLEX_MULTIPLY:
            return self._multiply_complex(total, value)
        return lanes.fold(self.builder, self.recipe, total, value)

    def finish(self, total: Value, count: Value) -> Value:
        """See `folds.Machine`; `count` is an integer."""
        spread = total
        if self.recipe.finish is not Finish.NOTHING:
            spread = lanes.spread_count(self.builder, self.recipe, count, self.width)
        if self.recipe.result is Lane.FLOAT16:
            return self._to_bits(self.builder.fptrunc(self._scaled(total, spread), self._vector_of(ir.HalfType())))
        return lanes.finish(self.builder, self.recipe, total, spread)

    def store(self, address: Value, index: Value, value: Value) -> None:
        """See `folds.Machine`."""
        place = self._place(address, index, self.recipe.result)
        write = self._store_words if self.vector else self._store_lanes
        write(place, value, self.recipe.result)

    def _place(self, address: Value, index: Value, lane: Lane) -> Value:
        return self.builder.add(address, self.builder.mul(index, ir.Constant(index.type, lane.size)))

    def _load_lanes(self, place: Value, lane: Lane) -> Value:
        kind = lanes.lane_type(lane)
        value = ir.Constant(self._vector_of(kind), ir.Undefined)
        for i in range(self.width):
            pointer = self._pointer(place, i * lane.size, kind)
            value = self._insert(value, self.builder.load(pointer, align=lane.size), i)
        return value

    def _store_lanes(self, place: Value, value: Value, lane: Lane) -> None:
        for i in range(self.width):
            pointer = self._pointer(place, i * lane.size, value.type.element)
            self.builder.store(self._extract(value, i), pointer, align=lane.size)

    def _load_words(self, place: Value, lane: Lane) -> Value:
        word = _word(lane)
        words = self.builder.load(self._pointer(place, 0, ir.VectorType(word, 128 // word.width)), align=16)
        kind = lanes.lane_type(lane)
        value = ir.Constant(self._vector_of(kind), ir.Undefined)
        per_word = word.width // (8 * lane.size)
        for i in range(self.width):
            bits = self._extract(words, i // per_word)
            value = self._insert(value, self._part(bits, i % per_word, kind, 8 * lane.size), i)
        return value

    def _part(self, word: Value, place: int, kind: Any, size: int) -> Value:
        if size == word.type.width:
            return self.builder.bitcast(word, kind)
        moved = self.builder.lshr(word, ir.Constant(word.type, place * size)) if place else word
        return self.builder.trunc(moved, kind)

    def _store_words(self, place: Value, value: Value, lane: Lane) -> None:
        word = _word(lane)
        per_word = word.width // (8 * lane.size)
        words = [self._joined(value, i, per_word, word) for i in range(0, self.width, per_word)]
        in_vector = 128 // word.width
        for first in range(0, len(words), in_vector):
            stored = words[first : first + in_vector]  # fewer where the result is narrower than the buffers
            vector = ir.Constant(ir.VectorType(word, len(stored)), ir.Undefined)
            for i, bits in enumerate(stored):
                vector = self._insert(vector, bits, i)
            pointer = self._pointer(place, first * word.width // 8, vector.type)
            self.builder.store(vector, pointer, align=len(stored) * word.width // 8)

    def _joined(self, value: Value, first: int, per_word: int, word: Any) -> Value:
        if per_word == 1:
            return self.builder.bitcast(self._extract(value, first), word)
        joined = None
        for i in range(per_word):
            bits = self.builder.zext(self._extract(value, first + i), word)
            moved = self.builder.shl(bits, ir.Constant(word, i * word.width // per_word)) if i else bits
            joined = moved if joined is None else self.builder.or_(joined, moved)
        return joined

    def _widen(self, value: Value) -> Value:
        if self.recipe.storage is not Lane.FLOAT16:
            return lanes.widen(self.builder, self.recipe, value)
        half = self.builder.bitcast(value, self._vector_of(ir.HalfType()))
        return self.builder.fpext(half, self._vector_of(lanes.lane_type(self.recipe.accumulator)))

    def _to_bits(self, half: Value) -> Value:
        return self.builder.bitcast(half, self._vector_of(ir.IntType(16)))

    def _scaled(self, total: Value, count: Value) -> Value:
        if self.recipe.finish is not Finish.SCALE:
            return total
        one = ir.Constant(total.type, [1.0] * self.width)
        return self.builder.fmul(total, self.builder.fdiv(one, count))

    def _multiply_complex(self, total: Value, value: Value) -> Value:
        """Multiply pairs (x, y)(u, v) as (x * u - y * v, x * v + y * u), as the CPU's kernels do."""
        product = ir.Constant(total.type, ir.Undefined)
        for i in range(0, self.width, 2):
            x, y = self._extract(total, i), self._extract(total, i + 1)
            u, v = self._extract(value, i), self._extract(value, i + 1)
            # older than LLVM's fneg, and the same: the compiler of CUDA knows no fneg before compute capability 10
            minus = self.builder.fsub(ir.Constant(x.type, -0.0), self._rounded("mul", y, v))
            product = self._insert(product, self._multiply_add(x, u, minus), i)
            product = self._insert(product, self._multiply_add(x, v, self._rounded("mul", y, u)), i + 1)
        return product

    def _multiply_add(self, x: Value, y: Value, z: Value) -> Value:
        if self.recipe.fused:
            return self._rounded("fma", x, y, z)
        return self._rounded("add", self._rounded("mul", x, y), z)

    def _rounded(self, operation: str, *operands: Value) -> Value:
        """Return the result of one operation, rounded to nearest even, and fused with no other."""
        kind = operands[0].type
        letter = "d" if isinstance(kind, ir.DoubleType) else "f"
        signature = ir.FunctionType(kind, [kind] * len(operands))
        name = f"llvm.nvvm.{operation}.rn.{letter}"
        return self.builder.call(function(self.builder.module, signature, name), operands)

    def _pointer(self, place: Value, offset: int, kind: Any) -> Value:
        moved = self.builder.add(place, ir.Constant(place.type, offset)) if offset else place
        return self.builder.inttoptr(moved, kind.as_pointer(_GLOBAL))

    def _vector_of(self, kind: Any) -> Any:
        return ir.VectorType(kind, self.width)

    def _extract(self, vector: Value, place: int) -> Value:
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), place))

    def _insert(self, vector: Value, value: Value, place: int) -> Value:
        return self.builder.insert_element(vector, value, ir.Constant(ir.IntType(32), place))


def _word(lane: Lane) -> Any:
    return ir.IntType(64 if lane.size == 8 else 32)
