# SPDX-License-Identifier: Apache-2.0
"""The kernels for the CPU: one pass over n buffers, in vectors of 64 bytes of result, compiled by LLVM.

Two forms of one recipe: up to 16 buffers, whose fold stays in registers; and any number, block by block through an
accumulator in the nearest cache. Kernels start no threads and see addresses, never arrays: the caller keeps the memory
alive.

They are written in LLVM's own instructions, through llvmlite. To compile one takes 20 to 60 ms, most of it without the
interpreter's lock. (Numba, which makes such instructions of Python functions, takes ten times as long and a second for
the first kernel, nearly all of it in Python, and a cache on disk would save only half of that.)
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

from llvmlite import binding, ir

from aiodist_kernels import lanes
from aiodist_kernels.lanes import Builder, Value, constant
from aiodist_kernels.rules import Recipe

VECTOR_BYTES: Final = 64
BLOCK_LANES: Final = 2048

TURN_BYTES: Final = 2 << 20
"""Bytes that are read before other threads are let onto the core, some tenths of a millisecond. Systems look only
every few milliseconds whether somebody else should run, which is long for an event loop."""

_WORD: Final = ir.IntType(8 * ctypes.sizeof(ctypes.c_void_p))
_TABLE: Final = _WORD.as_pointer()
Part = Callable[[int, Any, int, int, int, bool], None]
"""(address of the result, addresses of the buffers, how many, first lane, lane behind the last, streaming)

The addresses are a ctypes array of `c_size_t`."""

Whole = Callable[[list[Any], int, int, bool, bool], int]
"""(`__array_struct__` of the buffers, and of the result behind them; how many buffers; bytes of one; streaming; free)

It returns 0, and has done nothing, unless all lie without gaps in one order."""


class Kernel(NamedTuple):
    """A compiled kernel, which may be called in two ways.

    Attributes:
        part: reduces a range of lanes, without the interpreter's lock.
        whole: reduces arrays, with the lock or, if it is to be free, without.
        engine: owns the machine code.
    """

    part: Part
    whole: Whole
    engine: object


def compile_kernel(recipe: Recipe) -> Kernel:
    """Compile the kernel of a recipe."""
    module = ir.Module()
    kernel = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD, _TABLE, *[_WORD] * 4]), "part")
    builder = ir.IRBuilder(kernel.append_basic_block())
    if recipe.count:
        _fold_in_registers(recipe, builder, *kernel.args)
    else:
        _fold_in_blocks(recipe, builder, *kernel.args)
    builder.ret_void()
    _enter_with_arrays(recipe, kernel)
    engine = _machine_code(module)
    part: Any = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_void_p, *[ctypes.c_ssize_t] * 4)
    whole: Any = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, ctypes.py_object, *[ctypes.c_ssize_t] * 4)
    return Kernel(part(engine.get_function_address("part")), whole(engine.get_function_address("whole")), engine)


def _fold_in_registers(
    recipe: Recipe, builder: Builder, out: Value, table: Value, _count: Value, start: Value, stop: Value, stream: Value
) -> None:
    width, grain = VECTOR_BYTES // recipe.result.size, recipe.lanes_per_element
    turn = max(width, TURN_BYTES // (recipe.storage.size * recipe.count) // width * width)
    bases = [builder.load(builder.gep(table, [_word(place)])) for place in range(recipe.count)]
    streaming = builder.icmp_signed("!=", stream, _word(0))
    index, which = _Variable(builder, start), _Variable(builder)
    element = _Variable(builder, kind=ir.VectorType(lanes.lane_type(recipe.accumulator), grain))

    def load(base: Value, many: int) -> Value:
        return lanes.load_storage(builder, recipe, _place(builder, base, index.value, recipe.storage.size), many)

    def finish(total: Value, many: int, *, streaming: bool = False) -> None:
        """Store so many lanes of the result, and go on to the next."""
        result = lanes.finish(builder, recipe, total, constant(total.type, recipe.count))
        lanes.store(builder, result, _place(builder, out, index.value, recipe.result.size), streaming=streaming)
        index.value = builder.add(index.value, _word(many))

    def fold_vector(*, streaming: bool) -> None:
        total = load(bases[0], width)
        for base in bases[1:]:
            total = lanes.fold(builder, recipe, total, load(base, width))
        finish(total, width, streaming=streaming)

    def fold_element() -> None:
        """Fold an element at the ends, in a loop over the buffers: this is less to compile."""
        element.value, which.value = load(bases[0], grain), _word(1)
        with _while(builder, lambda: builder.icmp_signed("<", which.value, _word(recipe.count))):
            value = load(builder.load(builder.gep(table, [which.value])), grain)
            element.value = lanes.fold(builder, recipe, element.value, value)
            which.value = builder.add(which.value, _word(1))
        finish(element.value, grain)

    def whole_vector_below(end: Value) -> Value:
        return builder.icmp_signed("<=", builder.add(index.value, _word(width)), end)

    def unaligned() -> Value:
        place = _place(builder, out, index.value, recipe.result.size)
        behind = builder.urem(place, _word(VECTOR_BYTES))
        more = builder.icmp_signed("<", index.value, stop)
        return builder.and_(more, builder.icmp_signed("!=", behind, _word(0)))

    with builder.if_then(streaming), _while(builder, unaligned):
        fold_element()
    with _while(builder, lambda: whole_vector_below(stop)):
        pause = _least(builder, builder.add(index.value, _word(turn)), stop)
        with builder.if_else(streaming) as (yes, no):
            with yes, _while(builder, lambda: whole_vector_below(pause)):
                fold_vector(streaming=True)
            with no, _while(builder, lambda: whole_vector_below(pause)):
                fold_vector(streaming=False)
        with builder.if_then(builder.icmp_signed("<", pause, stop)):
            _give_way(builder)
    with builder.if_then(streaming):  # streaming stores come before whatever tells another thread of them
        builder.fence("seq_cst")
    with _while(builder, lambda: builder.icmp_signed("<", index.value, stop)):
        fold_element()


def _fold_in_blocks(
    recipe: Recipe, builder: Builder, out: Value, table: Value, count: Value, start: Value, stop: Value, _stream: Value
) -> None:
    width, grain, size = VECTOR_BYTES // recipe.result.size, recipe.lanes_per_element, recipe.accumulator.size
    block = builder.alloca(ir.ArrayType(ir.IntType(8), BLOCK_LANES * size))
    block.align = VECTOR_BYTES
    low, index, moved, which = (_Variable(builder, first) for first in (start, start, _word(0), _word(0)))

    def accumulator() -> Value:
        """Return where the accumulator of lane 0 would lie."""
        return builder.sub(builder.ptrtoint(block, _WORD), builder.mul(low.value, _word(size)))

    def begin(many: int) -> None:
        lanes.store(builder, load(many), _place(builder, accumulator(), index.value, size), streaming=False)

    def add(many: int) -> None:
        address = _place(builder, accumulator(), index.value, size)
        before = lanes.load(builder, recipe.accumulator, address, many)
        lanes.store(builder, lanes.fold(builder, recipe, before, load(many)), address, streaming=False)

    def end(many: int) -> None:
        address = _place(builder, accumulator(), index.value, size)
        value = lanes.load(builder, recipe.accumulator, address, many)
        result = lanes.finish(builder, recipe, value, lanes.spread_count(builder, recipe, count, many))
        lanes.store(builder, result, _place(builder, out, index.value, recipe.result.size), streaming=False)

    def load(many: int) -> Value:
        base = builder.load(builder.gep(table, [which.value]))
        return lanes.load_storage(builder, recipe, _place(builder, base, index.value, recipe.storage.size), many)

    def over_block(step: Callable[[int], None]) -> None:
        index.value = low.value
        repeat(step, width, middle)
        repeat(step, grain, high)

    def repeat(step: Callable[[int], None], many: int, end: Value) -> None:
        with _while(builder, lambda: builder.icmp_signed("<", index.value, end)):
            step(many)
            index.value = builder.add(index.value, _word(many))

    with _while(builder, lambda: builder.icmp_signed("<", low.value, stop)):
        high = _least(builder, builder.add(low.value, _word(BLOCK_LANES)), stop)
        middle = builder.sub(high, builder.urem(builder.sub(high, low.value), _word(width)))
        which.value = _word(0)
        over_block(begin)
        which.value = _word(1)
        with _while(builder, lambda: builder.icmp_signed("<", which.value, count)):
            over_block(add)
            which.value = builder.add(which.value, _word(1))
        over_block(end)
        low.value = high
        moved.value = builder.add(moved.value, builder.mul(count, _word(BLOCK_LANES * recipe.storage.size)))
        with builder.if_then(builder.icmp_signed(">=", moved.value, _word(TURN_BYTES))):
            moved.value = _word(0)
            _give_way(builder)


# What arrays say of themselves, by NumPy's documented array interface: its C side costs a tenth of `array.ctypes`.


class _ArrayInterface(ctypes.Structure):
    """What the capsule of an array's `__array_struct__` points to."""

    _fields_ = (
        ("two", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("kind", ctypes.c_char),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_int),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    )


_GAPLESS: Final = 3  # of its flags: no gaps in C's order, and in Fortran's


def _enter_with_arrays(recipe: Recipe, kernel: Any) -> None:
    """Add the function that is given arrays' interfaces to the module of a kernel."""
    thing = ir.IntType(8).as_pointer()
    function = ir.Function(kernel.module, ir.FunctionType(_WORD, [thing, *[_WORD] * 4]), "whole")
    builder = ir.IRBuilder(function.append_basic_block())
    given, count, nbytes, streaming, free = function.args
    table = builder.alloca(_WORD, builder.add(count, _word(1)))
    flags, which = _Variable(builder, _word(_GAPLESS)), _Variable(builder, _word(0))
    item = _python(builder, "PyList_GetItem", thing, [thing, _WORD])
    pointer = _python(builder, "PyCapsule_GetPointer", thing, [thing, thing])

    def field(interface: Value, name: str, kind: Any) -> Value:
        place = builder.gep(interface, [_word(getattr(_ArrayInterface, name).offset)])
        return builder.load(builder.bitcast(place, kind.as_pointer()))

    with _while(builder, lambda: builder.icmp_signed("<=", which.value, count)):
        interface = builder.call(pointer, [builder.call(item, [given, which.value]), ir.Constant(thing, None)])
        flags.value = builder.and_(flags.value, builder.sext(field(interface, "flags", ir.IntType(32)), _WORD))
        builder.store(field(interface, "data", _WORD), builder.gep(table, [which.value]))
        which.value = builder.add(which.value, _word(1))
    with builder.if_then(builder.icmp_signed("!=", flags.value, _word(0))):
        out, stop = builder.load(builder.gep(table, [count])), builder.sdiv(nbytes, _word(recipe.storage.size))
        arguments = [out, table, count, _word(0), stop, streaming]
        with builder.if_else(builder.icmp_signed("!=", free, _word(0))) as (yes, no):
            with yes:
                state = builder.call(_python(builder, "PyEval_SaveThread", thing, []), [])
                builder.call(kernel, arguments)
                builder.call(_python(builder, "PyEval_RestoreThread", ir.VoidType(), [thing]), [state])
            with no:
                builder.call(kernel, arguments)
    builder.ret(flags.value)


# Writing instructions.


class _Variable:
    """A value that changes; it becomes a register."""

    def __init__(self, builder: Builder, first: Value = None, *, kind: Any = _WORD) -> None:
        self._builder = builder
        with builder.goto_entry_block():
            self._place = builder.alloca(kind)
        if first is not None:
            self.value = first

    @property
    def value(self) -> Value:
        return self._builder.load(self._place)

    @value.setter
    def value(self, number: Value) -> None:
        self._builder.store(number, self._place)


@contextmanager
def _while(builder: Builder, condition: Callable[[], Value]) -> Iterator[None]:
    """Repeat what is built inside while a condition holds, which is built before it."""
    head, body, rest = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    builder.cbranch(condition(), body, rest)
    builder.position_at_end(body)
    yield
    builder.branch(head)
    builder.position_at_end(rest)


def _give_way(builder: Builder) -> None:
    """Let the core run another thread, if one waits for it."""
    library: Any = ctypes.pythonapi
    if hasattr(os, "sched_yield"):
        builder.call(_function(builder, library.sched_yield, ir.IntType(32), []), [])


def _python(builder: Builder, name: str, result: Any, arguments: list[Any]) -> Value:
    return _function(builder, getattr(ctypes.pythonapi, name), result, arguments)


def _function(builder: Builder, function: Any, result: Any, arguments: list[Any]) -> Value:
    """Return a C function of the process, by its address."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    return builder.inttoptr(_word(address or 0), ir.FunctionType(result, arguments).as_pointer())


def _word(number: int) -> Value:
    return ir.Constant(_WORD, number)


def _least(builder: Builder, one: Value, other: Value) -> Value:
    return builder.select(builder.icmp_signed("<", one, other), one, other)


def _place(builder: Builder, base: Value, index: Value, size: int) -> Value:
    return builder.add(base, builder.mul(index, _word(size)))


# Compiling.


def _machine_code(module: Any) -> Any:
    """Return what owns the machine code of a module."""
    code = binding.parse_assembly(str(module))
    machine = _target().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(code, passes)
    engine = binding.create_mcjit_compiler(code, machine)
    engine.finalize_object()
    return engine


@cache
def _target() -> Any:
    """Return the processor of this machine."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple()
