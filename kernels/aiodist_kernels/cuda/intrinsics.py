# SPDX-License-Identifier: Apache-2.0
"""The functions that a kernel calls, for the compiler: each writes its instructions where it is called.

They carry a fold's accumulator from one to the next as a tuple of numbers, which the compiler keeps in registers.
"""

from typing import Any

from aiodist_kernels.cuda import provider
from aiodist_kernels.cuda.emit import Emitter
from aiodist_kernels.cuda.folds import fold_all, reduce_all
from aiodist_kernels.cuda.forms import Form
from aiodist_kernels.llvm import ir

_types: Any = provider.types()
_extending: Any = provider.extending()
_WORD = ir.IntType(64)


class Compiled:
    """Makes the functions that the kernel of one form calls."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def reduce_direct(self, *, vector: bool) -> Any:
        """Make `f(out, addresses, index)`: reduce one vector, or one element, of all buffers."""

        def direct(_typing: Any, out: Any, addresses: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
                out, addresses, index = given
                places = [builder.extract_value(addresses, i) for i in range(self.form.recipe.count)]
                reduce_all(self._machine(builder, vector), out, places, index, _integer(len(places)))
                return context.get_dummy_value()

            return _types.void(out, addresses, index), generate

        return _extending.intrinsic(direct)

    def reduce_row(self, *, vector: bool) -> Any:
        """Make `f(out, table, index)`: the same, with the addresses of as many buffers as the form has in a table."""

        def row(_typing: Any, out: Any, table: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
                out, table, index = given
                places = _read(builder, table, self.form.recipe.count)
                reduce_all(self._machine(builder, vector), out, places, index, _integer(len(places)))
                return context.get_dummy_value()

            return _types.void(out, table, index), generate

        return _extending.intrinsic(row)

    def begin(self, *, vector: bool) -> Any:
        """Make `f(table, index)`: load lanes of the first buffer of a table into an accumulator."""

        def begin(_typing: Any, table: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
                table, index = given
                total = fold_all(self._machine(builder, vector), _read(builder, table, 1), index)
                return _as_tuple(context, builder, signature.return_type, total)

            return self._accumulator(vector=vector)(table, index), generate

        return _extending.intrinsic(begin)

    def fold(self, many: int, *, vector: bool) -> Any:
        """Make `f(total, table, index)`: fold lanes of the next `many` buffers of a table into an accumulator."""

        def fold(_typing: Any, total: Any, table: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
                total, table, index = given
                before = _as_vector(builder, total)
                places = _read(builder, table, many)
                after = fold_all(self._machine(builder, vector), places, index, before)
                return _as_tuple(context, builder, signature.return_type, after)

            return total(total, table, index), generate

        return _extending.intrinsic(fold)

    def end(self, *, vector: bool) -> Any:
        """Make `f(out, total, index, count)`: finish an accumulator and store the result."""

        def end(_typing: Any, out: Any, total: Any, index: Any, count: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
                out, total, index, count = given
                machine = self._machine(builder, vector)
                machine.store(out, index, machine.finish(_as_vector(builder, total), count))
                return context.get_dummy_value()

            return _types.void(out, total, index, count), generate

        return _extending.intrinsic(end)

    def word(self) -> Any:
        """Make `f(table, place)`: read one word of a table."""

        def word(_typing: Any, table: Any, place: Any) -> Any:
            def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
                table, place = given
                return _read(builder, builder.add(table, builder.mul(place, _integer(8))), 1)[0]

            return _types.int64(table, place), generate

        return _extending.intrinsic(word)

    def _machine(self, builder: Any, vector: bool) -> Emitter:
        width = self.form.width if vector else self.form.grain
        return Emitter(builder, self.form.recipe, width, vector=vector)

    def _accumulator(self, *, vector: bool) -> Any:
        lane = self.form.recipe.accumulator
        number = getattr(_types, "uint8" if lane.value == "bool" else lane.value)
        return _types.UniTuple(number, self.form.width if vector else self.form.grain)


def argument_types(form: Form) -> tuple[Any, ...]:
    """Return the types of a kernel's arguments; see `kernels`."""
    word = _types.int64
    if form.tabled:
        return (word,) * 4
    return word, _types.UniTuple(word, form.recipe.count), word, word


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
