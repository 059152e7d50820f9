# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs: how threads go over leaves and buffers; their PTX.

    direct(out, addresses, vectors, lanes)
        out         address of the result
        addresses   of the buffers, a tuple: they travel in the launch, with no upload
        vectors     vectors that the leaf has; 0 where an address is no multiple of 16
        lanes       lanes that it has

    tabled(heads, rows, chunks, count)
        heads, rows addresses of 64-bit words in device memory, see `forms`
        chunks      entries of the heads, each for one block
        count       buffers of each leaf

Loops are written with `while`: a `range` with a step costs a 64-bit division in every thread. A thread
loads its lanes of all buffers before it stores any, and no other thread touches them: so the result may be one of
the buffers. Nothing here calls a function that would have to be compiled apart, as Numba's own target does that for
a device only: not even `min`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, Final

from aiodist_kernels.cuda.forms import UNROLLED, Form
from aiodist_kernels.cuda.instructions import Functions, cuda, needing_cuda, types

Kernel = Callable[..., None]


def make(form: Form, functions: Any) -> Kernel:
    """Return the kernel of a form as a Python function, to be compiled; it calls those of `instructions.Functions`."""
    if not form.tabled:
        return _direct(form, functions)
    return _tabled(form, functions) if form.count else _tabled_any(form, functions)


def _direct(form: Form, functions: Any) -> Kernel:
    width, grain = form.width, form.rule.grain
    whole, single = functions.reduce(vector=True), functions.reduce(vector=False)

    def direct(out: Any, addresses: Any, vectors: Any, lanes: Any) -> None:
        thread = cuda.grid(1)
        threads = cuda.gridsize(1)
        index = thread
        while index < vectors:
            whole(out, addresses, index * width)
            index += threads
        index = vectors * width + thread * grain
        while index < lanes:
            single(out, addresses, index)
            index += threads * grain

    return direct


def _tabled(form: Form, functions: Any) -> Kernel:
    """Make the kernel for many leaves of a fixed number of buffers each."""
    width, grain = form.width, form.rule.grain
    word = functions.word()
    whole, single = functions.reduce(vector=True), functions.reduce(vector=False)

    def tabled(heads: Any, rows: Any, chunks: Any, _count: Any) -> None:
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
                whole(out, addresses, index)
                index += cuda.blockDim.x * width
            index = middle + thread * grain
            while index < high:
                single(out, addresses, index)
                index += cuda.blockDim.x * grain
            chunk += cuda.gridDim.x

    return tabled


def _tabled_any(form: Form, functions: Any) -> Kernel:
    """Make the kernel for any number of buffers: the fold goes on in steps of many, then of one.

    What it does to a vector and to an element stands in it twice: their accumulators are of different types.
    """
    width, grain, many = form.width, form.rule.grain, UNROLLED
    word = functions.word()
    begin, end = functions.begin(vector=True), functions.end(vector=True)
    fold_many, fold_one = functions.fold(many, vector=True), functions.fold(1, vector=True)
    begin_single, end_single = functions.begin(vector=False), functions.end(vector=False)
    fold_single = functions.fold(1, vector=False)

    def tabled_any(heads: Any, rows: Any, chunks: Any, count: Any) -> None:
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
                total = begin(addresses, index)
                done = 1
                while done + many <= count:
                    total = fold_many(total, addresses + 8 * done, index)
                    done += many
                while done < count:
                    total = fold_one(total, addresses + 8 * done, index)
                    done += 1
                end(out, total, index, count)
                index += cuda.blockDim.x * width
            index = middle + thread * grain
            while index < high:
                single = begin_single(addresses, index)
                done = 1
                while done < count:
                    single = fold_single(single, addresses + 8 * done, index)
                    done += 1
                end_single(out, single, index, count)
                index += cuda.blockDim.x * grain
            chunk += cuda.gridDim.x

    return tabled_any


# The text.

PTX_VERSION: Final = "7.8"
"""The oldest that knows compute capability 9.0. Compilers write their own, which older linkers and drivers refuse."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One compiled kernel, for devices of the compute capability that it was compiled for, and later ones."""

    name: str
    ptx: str


@functools.lru_cache(maxsize=1024)
def compile_form(form: Form, capability: tuple[int, int]) -> Program:
    """Compile a kernel; it takes a few tenths of a second, and as much again for the first.

    Raises:
        ImportError: no compiler for CUDA is installed.
    """
    arguments = (types.int64,) * 4
    if not form.tabled:
        arguments = (types.int64, types.UniTuple(types.int64, form.count), types.int64, types.int64)
    with needing_cuda():
        ptx, _ = cuda.compile_ptx(make(form, Functions(form)), types.void(*arguments), cc=capability)
    found = re.search(r"\.visible\s+\.entry\s+(\w+)", ptx)
    assert found is not None, "a kernel has an entry"
    return Program(
        found[1], re.sub(r"^\.version\s+[\d.]+", f".version {PTX_VERSION}", ptx, count=1, flags=re.MULTILINE)
    )
