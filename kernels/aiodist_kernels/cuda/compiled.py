# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs: what a thread does, how threads iterate over leaves and buffers, and the kernels' PTX.

    direct(out, addresses, vectors, lanes)
        out         address of the result
        addresses   addresses of the buffers, a tuple: they travel in the launch, without an upload
        vectors     vectors in the leaf; 0 if an address is no multiple of 16
        lanes       lanes in the leaf

    tabled(heads, rows, chunks, count)
        heads, rows addresses of 64-bit words in device memory, see `forms`
        chunks      entries of the heads, each for one block
        count       buffers of each leaf

Loops over lanes use `while`: a `range` with a step costs a 64-bit division in every thread. A thread loads its lanes of
all buffers before it stores any, and no other thread touches them: so the result may be one of the buffers. Nothing
here calls a function that has to be compiled separately, not even `min`, because Numba's CUDA target does that for a
device only.

Operations on lanes are the CPU kernels' own LLVM code. Only memory and one operation differ: vectors are loaded and
stored as 32- or 64-bit words, which the compiler combines into one 128-bit access for any lanes; and each operation of
the complex product is rounded explicitly, because otherwise the compiler would fuse multiplications with additions.

numba-cuda compiles without a GPU if libNVVM is installed. (numba-cuda-mlir, its successor, makes no PTX without a
driver, and its intrinsics are not written in LLVM code.)
"""

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir

from aiodist_kernels import lanes
from aiodist_kernels.cuda.forms import UNROLLED, VECTOR_BYTES, Form
from aiodist_kernels.lanes import Builder, Value
from aiodist_kernels.rules import DType, lane, product_is_fused

INSTALL: Final = "pip install 'aiodist[cuda]'"

PTX_VERSION: Final = "7.8"
"""The oldest for compute capability 9.0. Compilers write their own version, which older linkers and drivers refuse."""


@contextlib.contextmanager
def needing_cuda() -> Iterator[None]:
    """Raise an ImportError if a CUDA library is missing, instead of the library's own error."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        what = str(error).strip().partition("\n")[0]
        raise ImportError(
            "compiling for CUDA needs numba-cuda, its runtime, libNVVM and NVRTC, of one version of CUDA: "
            f"{INSTALL}; or set CUDA_HOME to the folder of a CUDA toolkit ({what})"
        ) from error


with needing_cuda():
    importlib.import_module("numba_cuda")  # replaces Numba's own `numba.cuda`
    cuda: Any = importlib.import_module("numba.cuda")
    types: Any = importlib.import_module("numba.cuda.types")
    intrinsic: Any = importlib.import_module("numba.cuda.extending").intrinsic


# What a thread does.

_WORD: Final = ir.IntType(64)
_GLOBAL: Final = 1  # the address space of device memory


class _Lanes:
    """Emits the instructions of a fold: for an aligned vector of 16 bytes of each buffer, or for one element."""

    def __init__(self, builder: Builder, form: Form, *, vector: bool) -> None:
        self.builder, self.rule, self.vector = builder, form.rule, vector
        self.width = form.width if vector else form.rule.grain

    def fold_all(self, addresses: Sequence[Value], index: Value, total: Value | None = None) -> Value:
        """Fold the same lanes of all buffers in their order, starting from `total` if there is one."""
        values = [self._load(address, index) for address in addresses]  # all in flight before the first is used
        for value in values:
            total = value if total is None else self._fold(total, value)
        return total

    def fold_table(self, table: Value, index: Value, count: Value) -> Value:
        """Fold lanes of any number of buffers, with addresses from a table: in steps of many, then one by one."""
        builder = self.builder
        total, done = self.fold_all(_read(builder, table, 1), index), _integer(1)
        for many in (UNROLLED, 1) if self.vector else (1,):
            before = builder.block
            test, step, behind = (builder.append_basic_block(name) for name in ("test", "step", "behind"))
            builder.branch(test)
            builder.position_at_end(test)
            so_far, folded = builder.phi(total.type), builder.phi(_WORD)
            builder.cbranch(builder.icmp_signed("<", folded, builder.sub(count, _integer(many - 1))), step, behind)
            builder.position_at_end(step)
            places = _read(builder, builder.add(table, builder.mul(folded, _integer(8))), many)
            so_far.add_incoming(total, before)
            so_far.add_incoming(self.fold_all(places, index, so_far), step)
            folded.add_incoming(done, before)
            folded.add_incoming(builder.add(folded, _integer(many)), step)
            builder.branch(test)
            builder.position_at_end(behind)
            total, done = so_far, folded
        return total

    def finish(self, out: Value, total: Value, index: Value, count: Value) -> None:
        """Finish the fold of `count` buffers, and store lanes of the result."""
        self._store(out, index, lanes.finish(self.builder, self.rule, total, count, narrows_double=True))

    def _load(self, address: Value, index: Value) -> Value:
        """Load lanes of a buffer, from `index`, and widen them to the accumulator."""
        stored = lane(self.rule.dtype)
        kind, size = lanes.lane_type(stored), stored.itemsize
        place = lanes.address(self.builder, address, index, stored)
        if self.vector:
            word = _word(stored)
            kept = self._pointer(place, 0, ir.VectorType(word, 128 // word.width))
            parts = self._parts(self.builder.load(kept, align=VECTOR_BYTES), kind, 8 * size)
        else:
            pointers = [self._pointer(place, i * size, kind) for i in range(self.width)]
            parts = [self.builder.load(pointer, align=size) for pointer in pointers]
        return lanes.widen(self.builder, self.rule, _joined(self.builder, parts))

    def _parts(self, words: Value, kind: Any, bits: int) -> list[Value]:
        """Take lanes out of words one by one: a cast of the whole vector would be compiled to narrower accesses."""
        parts, word = [], words.type.element
        for each in _split(self.builder, words):
            if word.width == bits:
                parts.append(self.builder.bitcast(each, kind))
                continue
            for shift in range(0, word.width, bits):
                moved = self.builder.lshr(each, ir.Constant(word, shift)) if shift else each
                parts.append(self.builder.trunc(moved, kind))
        return parts

    def _store(self, address: Value, index: Value, value: Value) -> None:
        stored = lane(self.rule.result)
        place = lanes.address(self.builder, address, index, stored)
        parts, size = _split(self.builder, value), stored.itemsize
        if not self.vector:
            for i, part in enumerate(parts):
                self.builder.store(part, self._pointer(place, i * size, part.type), align=size)
            return
        word = _word(stored)
        words, in_vector = self._words(parts, word, word.width // (8 * size)), 128 // word.width
        for first in range(0, len(words), in_vector):
            # There are fewer words if the result is narrower than the buffers.
            vector = _joined(self.builder, words[first : first + in_vector])
            pointer = self._pointer(place, first * word.width // 8, vector.type)
            self.builder.store(vector, pointer, align=vector.type.count * word.width // 8)

    def _words(self, parts: Sequence[Value], word: Any, per_word: int) -> list[Value]:
        """Pack lanes into words."""
        if per_word == 1:
            return [self.builder.bitcast(part, word) for part in parts]
        words = []
        for first in range(0, len(parts), per_word):
            bits, *more = [self.builder.zext(part, word) for part in parts[first : first + per_word]]
            for i, each in enumerate(more, 1):
                bits = self.builder.or_(bits, self.builder.shl(each, ir.Constant(word, i * word.width // per_word)))
            words.append(bits)
        return words

    def _pointer(self, place: Value, offset: int, kind: Any) -> Value:
        moved = self.builder.add(place, ir.Constant(place.type, offset)) if offset else place
        return self.builder.inttoptr(moved, kind.as_pointer(_GLOBAL))

    def _fold(self, total: Value, value: Value) -> Value:
        if self.rule.grain == 1:
            return lanes.fold(self.builder, self.rule, total, value)
        # Pairs (x, y)(u, v) are (x * u - y * v, x * v + y * u), as in NumPy's loops.
        totals, values, product = _split(self.builder, total), _split(self.builder, value), []
        for x, y, u, v in zip(totals[::2], totals[1::2], values[::2], values[1::2], strict=True):
            # The same as LLVM's fneg, which CUDA's compiler does not know before compute capability 10.
            minus = self.builder.fsub(ir.Constant(x.type, -0.0), self._rounded("mul", y, v))
            product += [self._multiply_add(x, u, minus), self._multiply_add(x, v, self._rounded("mul", y, u))]
        return _joined(self.builder, product)

    def _multiply_add(self, x: Value, y: Value, z: Value) -> Value:
        if product_is_fused(self.rule.accumulator):
            return self._rounded("fma", x, y, z)
        return self._rounded("add", self._rounded("mul", x, y), z)

    def _rounded(self, operation: str, *operands: Value) -> Value:
        """Emit one operation that is rounded to nearest even, and never fused with another."""
        kind, module = operands[0].type, self.builder.module
        name = f"llvm.nvvm.{operation}.rn.{'d' if isinstance(kind, ir.DoubleType) else 'f'}"
        signature = ir.FunctionType(kind, [kind] * len(operands))
        return self.builder.call(module.globals.get(name) or ir.Function(module, signature, name), operands)


def _word(stored: DType) -> Any:
    return ir.IntType(64 if stored.itemsize == 8 else 32)


def _integer(number: int) -> Any:
    return ir.Constant(_WORD, number)


def _split(builder: Builder, vector: Value) -> list[Value]:
    return [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(vector.type.count)]


def _joined(builder: Builder, parts: Sequence[Value]) -> Value:
    vector = ir.Constant(ir.VectorType(parts[0].type, len(parts)), ir.Undefined)
    for i, part in enumerate(parts):
        vector = builder.insert_element(vector, part, ir.Constant(ir.IntType(32), i))
    return vector


def _read(builder: Builder, table: Value, many: int) -> list[Value]:
    """Read words of a table. No kernel writes tables, so the loads may be cached and moved before stores."""
    pointer = builder.inttoptr(table, _WORD.as_pointer(_GLOBAL))
    words = [builder.load(builder.gep(pointer, [_integer(i)]), align=8) for i in range(many)]
    for word in words:
        word.set_metadata("invariant.load", builder.module.add_metadata([]))
    return words


def _reducing(form: Form, *, vector: bool) -> Any:
    """Make `f(out, addresses, index, count)`: reduce lanes of all buffers, with addresses in a tuple or a table."""

    def reduce(_typing: Any, out: Any, addresses: Any, index: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            out, addresses, index, count = given
            some = _Lanes(builder, form, vector=vector)
            if form.count:
                count = _integer(form.count)
                if form.tabled:
                    places = _read(builder, addresses, form.count)
                else:
                    places = [builder.extract_value(addresses, i) for i in range(form.count)]
                total = some.fold_all(places, index)
            else:
                total = some.fold_table(addresses, index, count)
            some.finish(out, total, index, count)
            return context.get_dummy_value()

        return types.void(out, addresses, index, count), generate

    return intrinsic(reduce)


@intrinsic  # type: ignore[untyped-decorator]
def _word_at(_typing: Any, table: Any, place: Any) -> Any:
    """Read one word of a table."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        table, place = given
        return _read(builder, builder.add(table, builder.mul(place, _integer(8))), 1)[0]

    return types.int64(table, place), generate


# How threads iterate over leaves and buffers.

Kernel = Callable[..., None]


def _direct(form: Form) -> Kernel:
    width, grain, count = form.width, form.rule.grain, form.count
    whole, single = _reducing(form, vector=True), _reducing(form, vector=False)

    def direct(out: Any, addresses: Any, vectors: Any, lanes: Any) -> None:
        thread = cuda.grid(1)
        threads = cuda.gridsize(1)
        index = thread
        while index < vectors:
            whole(out, addresses, index * width, count)
            index += threads
        index = vectors * width + thread * grain
        while index < lanes:
            single(out, addresses, index, count)
            index += threads * grain

    return direct


def _tabled(form: Form) -> Kernel:
    width, grain, word = form.width, form.rule.grain, _word_at
    whole, single = _reducing(form, vector=True), _reducing(form, vector=False)

    def tabled(heads: Any, rows: Any, chunks: Any, count: Any) -> None:
        thread = cuda.threadIdx.x
        chunk = cuda.blockIdx.x
        while chunk < chunks:
            entry = heads + 32 * chunk
            leaf = rows + 8 * word(entry, 0)
            low, middle, high = word(entry, 1), word(entry, 2), word(entry, 3)
            if word(leaf, 0) == 0:
                middle = low
            out = word(leaf, 1)
            addresses = leaf + 16
            index = low + thread * width
            while index < middle:
                whole(out, addresses, index, count)
                index += cuda.blockDim.x * width
            index = middle + thread * grain
            while index < high:
                single(out, addresses, index, count)
                index += cuda.blockDim.x * grain
            chunk += cuda.gridDim.x

    return tabled


# PTX.


class Program(NamedTuple):
    """A compiled kernel, for devices of its compute capability and later ones."""

    name: str
    ptx: str


@functools.lru_cache(maxsize=1024)
def compile_form(form: Form, capability: tuple[int, int]) -> Program:
    """Compile a kernel, in a few tenths of a second; an ImportError if no compiler for CUDA is installed."""
    make, arguments = _tabled, (types.int64,) * 4
    if not form.tabled:
        make, arguments = _direct, (types.int64, types.UniTuple(types.int64, form.count), types.int64, types.int64)
    with needing_cuda():
        ptx, _ = cuda.compile_ptx(make(form), types.void(*arguments), cc=capability)
    found = re.search(r"\.visible\s+\.entry\s+(\w+)", ptx)
    assert found is not None, "a kernel has an entry"
    return Program(
        found[1], re.sub(r"^\.version\s+[\d.]+", f".version {PTX_VERSION}", ptx, count=1, flags=re.MULTILINE)
    )
