# SPDX-License-Identifier: Apache-2.0
"""A small machine that runs compiled kernels, instruction by instruction, on host memory.

It reads PTX and does what NVIDIA's "PTX ISA" says of the instructions that our kernels use, one thread after the other,
and refuses any other. So the very text that a driver would load is compared with NumPy bit by bit, without a GPU.
Every access is checked: inside the memory that the test lent, and aligned as the device demands.

Registers hold bits, as Python integers; an operation reads and writes them as its type says.
"""

from __future__ import annotations

import ctypes
import math
import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.kernels.oracle import round_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_NUMPY: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_FORMATS = {"f16": "float16", "f32": "float32", "f64": "float64"}
_LINE = re.compile(r"(?:@(?P<guard>!?%\w+)\s+)?(?P<name>[a-z][\w.]*)(?:\s+(?P<operands>.*))?;")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


@dataclass(frozen=True)
class Instruction:
    """One line: what it does, to what, under which condition."""

    name: str
    operands: tuple[str, ...]
    guard: str | None

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")


@dataclass(frozen=True)
class Kernel:
    """The body of an entry."""

    parameters: tuple[str, ...]
    body: tuple[Instruction, ...]
    labels: Mapping[str, int]


def parse(ptx: str) -> Kernel:
    """Read the one entry of a program."""
    head, _, body = ptx.partition(".visible .entry")[2].partition("{")
    parameters = tuple(re.findall(r"(\w+_param_\d+)", head))
    instructions: list[Instruction] = []
    labels = {}
    for line in map(str.strip, body.splitlines()):
        if found := re.fullmatch(r"(\$\w+):", line):
            labels[found[1]] = len(instructions)
        elif found := _LINE.fullmatch(line):
            operands = tuple(_OPERAND.findall(found["operands"] or ""))
            instructions.append(Instruction(found["name"], operands, found["guard"]))
    return Kernel(parameters, tuple(instructions), labels)


def run(kernel: Kernel, arguments: Sequence[int], blocks: int, threads: int, memory: Sequence[np.ndarray]) -> None:
    """Run every thread of a launch.

    Args:
        kernel: the kernel.
        arguments: its parameters, flattened.
        blocks: of the grid.
        threads: of a block.
        memory: all that it may touch.
    """
    allowed = [(place := array.__array_interface__["data"][0], place + array.nbytes) for array in memory]
    given = dict(zip(kernel.parameters, arguments, strict=True))
    with np.errstate(all="ignore"):
        for block in range(blocks):
            for thread in range(threads):
                special = {"%tid.x": thread, "%ntid.x": threads, "%ctaid.x": block, "%nctaid.x": blocks}
                Thread(kernel, given, special, allowed).run()


class Thread:
    """One thread: its registers, and where it stands."""

    def __init__(
        self,
        kernel: Kernel,
        parameters: Mapping[str, int],
        special: Mapping[str, int],
        allowed: Sequence[tuple[int, int]],
    ) -> None:
        self.kernel = kernel
        self.registers: dict[str, int] = dict(special)
        self.parameters = parameters
        self.allowed = allowed

    def run(self) -> None:
        place: int | None = 0
        while place is not None:
            instruction = self.kernel.body[place]
            place = self._step(instruction, place) if self._holds(instruction.guard) else place + 1

    def _holds(self, guard: str | None) -> bool:
        return guard is None or bool(self.registers[guard.lstrip("!")]) is not guard.startswith("!")

    def _step(self, instruction: Instruction, place: int) -> int | None:
        head = instruction.parts[0]
        if head == "ret":
            return None
        if head == "bra":
            return self.kernel.labels[instruction.operands[0]]
        if head in {"ld", "st"}:
            self._access(instruction)
        elif head == "mov":
            self._move(instruction)
        else:
            target, *sources = instruction.operands
            self.registers[target] = compute(instruction.parts, [self._read(source) for source in sources])
        return place + 1

    def _read(self, operand: str) -> int:
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith(("0f", "0d")):
            return int(operand[2:], 16)  # noqa: FURB166  (the f or d belongs to no base)
        return int(operand)

    def _move(self, instruction: Instruction) -> None:
        target, source = instruction.operands
        if source.startswith("{"):
            low, high = (self._read(part.strip()) for part in source[1:-1].split(","))
            self.registers[target] = low | high << 16
        elif target.startswith("{"):
            low_name, high_name = (part.strip() for part in target[1:-1].split(","))
            bits = self._read(source)
            self.registers[low_name], self.registers[high_name] = bits & 0xFFFF, bits >> 16
        else:
            self.registers[target] = self._read(source) & (1 << _size(instruction.parts[-1])) - 1

    def _access(self, instruction: Instruction) -> None:
        is_load = instruction.parts[0] == "ld"
        names, place = instruction.operands if is_load else instruction.operands[::-1]
        if instruction.parts[1] == "param":
            self.registers[names] = self.parameters[place[1:-1]] & (1 << 64) - 1
            return
        registers = [name.strip() for name in names.strip("{}").split(",")]
        base, _, offset = place[1:-1].partition("+")
        size = _size(instruction.parts[-1]) // 8
        address = self._read(base) + int(offset or 0)
        self._check(instruction, address, size * len(registers))
        for i, register in enumerate(registers):
            cell = (ctypes.c_ubyte * size).from_address(address + i * size)
            if is_load:
                bits = int.from_bytes(bytes(cell), "little")
                self.registers[register] = _signed(bits, 8 * size) if instruction.parts[-1][0] == "s" else bits
            else:
                bits = self.registers[register] & (1 << 8 * size) - 1
                ctypes.memmove(cell, bits.to_bytes(size, "little"), size)

    def _check(self, instruction: Instruction, address: int, size: int) -> None:
        if address % size:
            raise AssertionError(f"{instruction.name} of {size} bytes at {address:#x}, which is no multiple")
        if not any(low <= address and address + size <= high for low, high in self.allowed):
            raise AssertionError(f"{instruction.name} at {address:#x}, outside all memory that was lent")


def compute(parts: Sequence[str], sources: Sequence[int]) -> int:  # noqa: PLR0911  (one return an instruction)
    """Return the bits that an instruction makes of bits."""
    head, kind = parts[0], parts[-1]
    if kind == "f16x2":
        halves = [compute([head, "f16"], [bits >> shift & 0xFFFF for bits in sources]) for shift in (0, 16)]
        return halves[0] | halves[1] << 16
    if head == "cvt":
        return _convert(parts[-2], kind, sources[0])
    if head == "setp":
        return int(_compare(parts[1], kind, *sources))
    if head == "selp":
        return sources[0] if sources[2] else sources[1]
    if head == "prmt":
        return _permute(*sources)
    if kind in _NUMPY:
        return _to_bits(kind, _FLOATS[head](kind, *(_from_bits(kind, bits) for bits in sources)))
    return _integers(head, parts[1], kind, sources)


def _integers(head: str, mode: str, kind: str, sources: Sequence[int]) -> int:
    bits = 1 if kind == "pred" else _size(kind)
    numbers = [_number(kind, source) for source in sources]
    if head in {"shl", "shr"}:
        numbers[1] = min(sources[1], bits)
    wide = 2 * bits if mode == "wide" else bits
    return int(_INTEGERS[head](*numbers)) & (1 << wide) - 1


_INTEGERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.floordiv,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "min": min,
    "max": max,
}

_FLOATS: dict[str, Callable[..., Any]] = {
    "add": lambda kind, x, y: _rounded(kind, float(x) + float(y)) if kind != "f64" else x + y,
    "mul": lambda kind, x, y: _rounded(kind, float(x) * float(y)) if kind != "f64" else x * y,
    "div": lambda kind, x, y: np.divide(x, y),
    "rcp": lambda kind, x: np.divide(type(x)(1), x),
    "fma": lambda kind, x, y, z: _fused(kind, float(x), float(y), float(z)),
    "neg": lambda kind, x: -x,
}


def _fused(kind: str, x: float, y: float, z: float) -> Any:
    """Return x * y + z, rounded once."""
    if not all(map(math.isfinite, (x, y, z))) or x == 0 or y == 0:
        return _rounded(kind, x * y + z)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    return _rounded(kind, round_to(_FORMATS[kind], exact) if exact else 0.0 if z else x * y + z)


def _rounded(kind: str, value: float) -> Any:
    """Round a float64, in which a sum or product of two shorter floats is exact or rounds alike."""
    return _NUMPY[kind](value)


def _compare(how: str, kind: str, x: int, y: int) -> bool:
    a, b = (_from_bits(kind, x), _from_bits(kind, y)) if kind in _NUMPY else (_number(kind, x), _number(kind, y))
    if how == "nan":
        return math.isnan(a) or math.isnan(b)
    if how == "neu":
        return bool(a != b)
    return bool(getattr(operator, how)(a, b))


def _convert(target: str, source: str, bits: int) -> int:
    number = _from_bits(source, bits) if source in _NUMPY else _number(source, bits)
    if target not in _NUMPY:
        return int(number) & (1 << _size(target)) - 1
    if target == "f32" and source in {"s64", "u64"}:  # by way of float64 it would be rounded twice
        return _to_bits(target, _rounded(target, round_to("float32", Fraction(int(number)))))
    return _to_bits(target, _NUMPY[target](number))


def _permute(low: int, high: int, selector: int) -> int:
    """Pick four of the eight bytes of two words."""
    pool = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    return int.from_bytes(bytes(pool[selector >> 4 * i & 7] for i in range(4)), "little")


def _size(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:])


def _number(kind: str, bits: int) -> int:
    """Read bits as an integer of a type; a register may be wider than the type."""
    if kind == "pred":
        return bits & 1
    size = int(kind[1:])
    bits &= (1 << size) - 1
    return _signed(bits, size) if kind[0] == "s" else bits


def _signed(bits: int, size: int) -> int:
    return bits - (1 << size) if bits >> (size - 1) else bits


def _from_bits(kind: str, bits: int) -> Any:
    size = int(kind[1:]) // 8
    return np.frombuffer(bits.to_bytes(size, "little"), _NUMPY[kind])[0]


def _to_bits(kind: str, number: Any) -> int:
    return int.from_bytes(_NUMPY[kind](number).tobytes(), "little")
