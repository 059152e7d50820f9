# SPDX-License-Identifier: Apache-2.0
"""The functions that a kernel for GPUs calls, written in LLVM instructions; and the package that compiles for CUDA.

What the functions compute is the CPU kernels' own code. Only memory and one operation differ from the CPU. Vectors are
loaded and stored as 32- or 64-bit words, which the compiler keeps together as one 128-bit access, whatever the lanes
are. And the complex product says how each of its operations is rounded: else the compiler would fuse a multiplication
with an addition.

The functions carry a fold's accumulator from one to the next as a tuple of numbers, which the compiler keeps in
registers.

numba-cuda compiles, without a GPU if libNVVM is there. (numba-cuda-mlir, the successor, makes no PTX without a driver,
and its intrinsics are not written in LLVM's instructions.)
"""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from llvmlite import ir

from aiodist_kernels import lanes
from aiodist_kernels.cuda.forms import VECTOR_BYTES, Form
from aiodist_kernels.lanes import Builder, Value
from aiodist_kernels.rules import DType, Finish, lane, product_is_fused

INSTALL: Final = "pip install 'aiodist[cuda]'"
"""The command that installs the compiler for CUDA, its libraries, and the launcher of kernels."""


@contextlib.contextmanager
def needing_cuda() -> Iterator[None]:
    """Raise an ImportError where a library of CUDA's is not there, for which each has an error of its own."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        what = str(error).strip().partition("\n")[0]
        raise ImportError(
            "compiling for CUDA needs numba-cuda, its runtime, libNVVM and NVRTC, of one version of CUDA: "
            f"{INSTALL}; or set CUDA_HOME to the folder of a CUDA toolkit ({what})"
        ) from error


with needing_cuda():
    cuda: Any = importlib.import_module("numba.cuda")  # numba-cuda takes this name over
    types: Any = importlib.import_module("numba.cuda.types")
    intrinsic: Any = importlib.import_module("numba.cuda.extending").intrinsic

_WORD = ir.IntType(64)
_GLOBAL = 1  # the address space of device memory


class Emitter:
    """Writes the instructions of a fold for some lanes.

    Args:
        builder: appends them.
        form: the kernel.
        vector: take a whole vector of 16 bytes of each buffer, whose addresses are multiples of 16; else one element.
    """

    def __init__(self, builder: Builder, form: Form, *, vector: bool) -> None:
        self.builder = builder
        self.rule = form.rule
        self.width = form.width if vector else form.rule.grain
        self.vector = vector

    def fold_all(self, addresses: Sequence[Value], index: Value, total: Value | None = None) -> Value:
        """Fold the same lanes of all buffers in their order, on top of `total` if there is one."""
        values = [self._load(address, index) for address in addresses]  # all in flight before the first is needed
        for value in values:
            total = value if total is None else self._fold(total, value)
        return total

    def finish(self, out: Value, total: Value, index: Value, count: Value) -> None:
        """Scale or divide by the number of buffers, an integer, round, and store lanes of the result."""
        spread = total
        if self.rule.finish is not Finish.NOTHING:
            spread = lanes.spread_count(self.builder, self.rule, count, self.width)
        self._store(out, index, lanes.finish(self.builder, self.rule, total, spread, narrows_double=True))

    def _load(self, address: Value, index: Value) -> Value:
        """Load the lanes from `index` on of a buffer, widened to the accumulator."""
        stored = lane(self.rule.dtype)
        place = self._place(address, index, stored)
        value = self._load_words(place, stored) if self.vector else self._load_lanes(place, stored)
        return lanes.widen(self.builder, self.rule, value)

    def _load_lanes(self, place: Value, stored: DType) -> Value:
        kind = lanes.lane_type(stored)
        value = ir.Constant(self._vector_of(kind), ir.Undefined)
        for i in range(self.width):
            pointer = self._pointer(place, i * stored.itemsize, kind)
            value = self._insert(value, self.builder.load(pointer, align=stored.itemsize), i)
        return value

    def _load_words(self, place: Value, stored: DType) -> Value:
        # Lanes are taken out of words one by one: of a cast of the whole vector the compiler makes narrower accesses.
        kind, word = lanes.lane_type(stored), _word(stored)
        words = self.builder.load(self._pointer(place, 0, ir.VectorType(word, 128 // word.width)), align=VECTOR_BYTES)
        value = ir.Constant(self._vector_of(kind), ir.Undefined)
        per_word = word.width // (8 * stored.itemsize)
        for i in range(self.width):
            bits, shift = self._extract(words, i // per_word), i % per_word * 8 * stored.itemsize
            if per_word == 1:
                part = self.builder.bitcast(bits, kind)
            else:
                part = self.builder.trunc(self.builder.lshr(bits, ir.Constant(word, shift)) if shift else bits, kind)
            value = self._insert(value, part, i)
        return value

    def _store(self, address: Value, index: Value, value: Value) -> None:
        stored = lane(self.rule.result)
        place = self._place(address, index, stored)
        if self.vector:
            self._store_words(place, value, stored)
            return
        for i in range(self.width):
            pointer = self._pointer(place, i * stored.itemsize, value.type.element)
            self.builder.store(self._extract(value, i), pointer, align=stored.itemsize)

    def _store_words(self, place: Value, value: Value, stored: DType) -> None:
        word = _word(stored)
        per_word = word.width // (8 * stored.itemsize)
        words = [self._joined(value, i, per_word, word) for i in range(0, self.width, per_word)]
        in_vector = 128 // word.width
        for first in range(0, len(words), in_vector):
            some = words[first : first + in_vector]  # fewer where the result is narrower than the buffers
            vector = ir.Constant(ir.VectorType(word, len(some)), ir.Undefined)
            for i, bits in enumerate(some):
                vector = self._insert(vector, bits, i)
            pointer = self._pointer(place, first * word.width // 8, vector.type)
            self.builder.store(vector, pointer, align=len(some) * word.width // 8)

    def _joined(self, value: Value, first: int, per_word: int, word: Any) -> Value:
        if per_word == 1:
            return self.builder.bitcast(self._extract(value, first), word)
        joined = None
        for i in range(per_word):
            bits = self.builder.zext(self._extract(value, first + i), word)
            moved = self.builder.shl(bits, ir.Constant(word, i * word.width // per_word)) if i else bits
            joined = moved if joined is None else self.builder.or_(joined, moved)
        return joined

    def _place(self, address: Value, index: Value, stored: DType) -> Value:
        return self.builder.add(address, self.builder.mul(index, ir.Constant(index.type, stored.itemsize)))

    def _pointer(self, place: Value, offset: int, kind: Any) -> Value:
        moved = self.builder.add(place, ir.Constant(place.type, offset)) if offset else place
        return self.builder.inttoptr(moved, kind.as_pointer(_GLOBAL))

    def _fold(self, total: Value, value: Value) -> Value:
        if self.rule.grain == 1:
            return lanes.fold(self.builder, self.rule, total, value)
        # Pairs (x, y)(u, v) are (x * u - y * v, x * v + y * u), as in the CPU's kernels.
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
        if product_is_fused(self.rule.accumulator):
            return self._rounded("fma", x, y, z)
        return self._rounded("add", self._rounded("mul", x, y), z)

    def _rounded(self, operation: str, *operands: Value) -> Value:
        """Return the result of one operation, rounded to nearest even, and fused with no other."""
        kind = operands[0].type
        letter = "d" if isinstance(kind, ir.DoubleType) else "f"
        signature = ir.FunctionType(kind, [kind] * len(operands))
        name = f"llvm.nvvm.{operation}.rn.{letter}"
        module = self.builder.module
        return self.builder.call(module.globals.get(name) or ir.Function(module, signature, name), operands)

    def _vector_of(self, kind: Any) -> Any:
        return ir.VectorType(kind, self.width)

    def _extract(self, vector: Value, place: int) -> Value:
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), place))

    def _insert(self, vector: Value, value: Value, place: int) -> Value:
        return self.builder.insert_element(vector, value, ir.Constant(ir.IntType(32), place))


def _word(stored: DType) -> Any:
    return ir.IntType(64 if stored.itemsize == 8 else 32)


# The functions.


class Functions:
    """Makes the functions that the kernel of one form calls, for whole vectors or for single elements."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def reduce(self, *, vector: bool) -> Any:
        """Make `f(out, addresses, index)`: reduce lanes of all buffers; addresses are a tuple, or lie in a table."""
        form, count = self.form, self.form.count

        def reduce(_typing: Any, out: Any, addresses: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
                out, addresses, index = given
                if form.tabled:
                    places = _read(builder, addresses, count)
                else:
                    places = [builder.extract_value(addresses, i) for i in range(count)]
                emitter = Emitter(builder, form, vector=vector)
                emitter.finish(out, emitter.fold_all(places, index), index, _integer(count))
                return context.get_dummy_value()

            return types.void(out, addresses, index), generate

        return intrinsic(reduce)

    def begin(self, *, vector: bool) -> Any:
        """Make `f(table, index)`: load lanes of the first buffer of a table into an accumulator."""
        form, registers = self.form, self.form.rule.registers
        number = getattr(types, "uint8" if registers.kind == "b" else registers.name)
        accumulator = types.UniTuple(number, form.width if vector else form.rule.grain)

        def begin(_typing: Any, table: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
                table, index = given
                total = Emitter(builder, form, vector=vector).fold_all(_read(builder, table, 1), index)
                return _as_tuple(context, builder, signature.return_type, total)

            return accumulator(table, index), generate

        return intrinsic(begin)

    def fold(self, many: int, *, vector: bool) -> Any:
        """Make `f(total, table, index)`: fold lanes of the next `many` buffers of a table into an accumulator."""
        form = self.form

        def fold(_typing: Any, total: Any, table: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
                total, table, index = given
                emitter = Emitter(builder, form, vector=vector)
                after = emitter.fold_all(_read(builder, table, many), index, _as_vector(builder, total))
                return _as_tuple(context, builder, signature.return_type, after)

            return total(total, table, index), generate

        return intrinsic(fold)

    def end(self, *, vector: bool) -> Any:
        """Make `f(out, total, index, count)`: finish an accumulator and store the result."""
        form = self.form

        def end(_typing: Any, out: Any, total: Any, index: Any, count: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
                out, total, index, count = given
                Emitter(builder, form, vector=vector).finish(out, _as_vector(builder, total), index, count)
                return context.get_dummy_value()

            return types.void(out, total, index, count), generate

        return intrinsic(end)

    def word(self) -> Any:
        """Make `f(table, place)`: read one word of a table."""

        def word(_typing: Any, table: Any, place: Any) -> Any:
            def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
                table, place = given
                return _read(builder, builder.add(table, builder.mul(place, _integer(8))), 1)[0]

            return types.int64(table, place), generate

        return intrinsic(word)


def _read(builder: Any, table: Any, many: int) -> list[Any]:
    """Read words of a table, which no kernel writes: such loads may be cached, and moved before stores."""
    pointer = builder.inttoptr(table, _WORD.as_pointer(1))
    places = []
    for i in range(many):
        word = builder.load(builder.gep(pointer, [_integer(i)]), align=8)
        word.set_metadata("invariant.load", builder.module.add_metadata([]))
        places.append(word)
    return places


def _integer(number: int) -> Any:
    return ir.Constant(_WORD, number)


def _as_tuple(context: Any, builder: Any, kind: Any, vector: Any) -> Any:
    numbers = [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(vector.type.count)]
    return context.make_tuple(builder, kind, numbers)


def _as_vector(builder: Any, numbers: Any) -> Any:
    count = numbers.type.count
    vector = ir.Constant(ir.VectorType(numbers.type.element, count), ir.Undefined)
    for i in range(count):
        number = builder.extract_value(numbers, i)
        vector = builder.insert_element(vector, number, ir.Constant(ir.IntType(32), i))
    return vector
