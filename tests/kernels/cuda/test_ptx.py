# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for two generations of GPUs: their PTX is checked, and their code is run on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist_kernels import ReduceOp, reduce
from aiodist_kernels.cuda.forms import (
    FIRST,
    THREADS,
    VECTOR_BYTES,
    Form,
    Layout,
    allow_vectors,
    blocks,
    copying,
    form_for,
)
from aiodist_kernels.rules import Rule, components, lane, product_is_fused
from tests.kernels import arrays
from tests.kernels.arrays import assert_same_bits
from tests.kernels.cuda.cases import CASES, ONE_OF_EACH_LAYOUT, SOME_CASES, Case

compiling: Any = pytest.importorskip("aiodist_kernels.cuda.compiled", exc_type=ImportError)  # where numba-cuda is
on_cpu: Any = importlib.import_module("tests.kernels.cuda.on_cpu")

CAPABILITIES = [(8, 0), (9, 0)]
GRID = 2, 3  # blocks, threads of each
POISON = 0xA5


# Checks of PTX.


def blocks_of(ptx: str) -> list[list[str]]:
    """Cut a program's text into basic blocks."""
    found: list[list[str]] = [[]]
    for line in map(str.strip, ptx.splitlines()):
        if line.startswith("$") or re.match(r"(@!?%p\d+ )?bra", line):
            found.append([])
        found[-1].append(line)
    return found


def check_text(form: Form, ptx: str, capability: tuple[int, int]) -> None:
    """Check that vectors move 128 bits at a time; and that there is no local memory, call or wrong fusion."""
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert "ftz" not in ptx
    assert "approx" not in ptx
    assert not re.search(r"\.local|depot|\bcall\b", ptx)
    in_vectors = [block for block in blocks_of(ptx) if any(_is_whole(line, form) for line in block)]
    assert in_vectors
    stores = [line for block in in_vectors for line in block if line.startswith("st.global")]
    assert stores
    for line in itertools.chain.from_iterable(in_vectors):
        if re.match(r"(ld|st)\.global", line) and not line.startswith("ld.global.nc.u64"):  # words of the table
            assert _is_whole(line, form), line
    assert not may_be_fused(ptx)
    assert ("fma" in ptx) is (form.rule.grain > 1 and product_is_fused(form.rule.accumulator))


def _is_whole(line: str, form: Form) -> bool:
    """Whether an access moves a whole vector; results narrower than the buffers have vectors of fewer bits."""
    if re.match(r"(ld|st)\.global\.(v4\.[bfus]32|v2\.[bfus]64)\s", line):
        return True
    narrow = form.width * lane(form.rule.result).itemsize
    found = re.match(r"st\.global(?:\.v(\d))?\.[bfus](\d+)\s", line)
    return found is not None and narrow < 16 and int(found[1] or 1) * int(found[2]) == 8 * narrow


def may_be_fused(ptx: str) -> bool:
    """Whether an assembler may fuse a sum with a product, because neither has explicit rounding."""
    products = set(re.findall(r"mul\.f\d+x?2?\s+(%\w+)", ptx))
    sums = re.findall(r"(?:add|sub)\.f\d+x?2?\s+%\w+, (%\w+), (%\w+)", ptx)
    return any(products & set(operands) for operands in sums)


def assemble(ptx: str, capability: tuple[int, int]) -> None:
    """Assemble a program as a driver would, if there is an assembler, and check that it spills no registers."""
    if not importlib.util.find_spec("cuda"):
        return
    nvjitlink = importlib.import_module("cuda.bindings.nvjitlink")
    code = ptx.encode()
    linker = nvjitlink.create(3, [f"-arch=sm_{capability[0]}{capability[1]}", "-verbose", "-Xptxas=-v"])
    nvjitlink.add_data(linker, nvjitlink.InputType.PTX, code, len(code), "kernel")
    nvjitlink.complete(linker)
    buffer = bytearray(nvjitlink.get_info_log_size(linker))
    nvjitlink.get_info_log(linker, buffer)
    nvjitlink.destroy(linker)
    log = buffer.decode()
    newer, older = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", ", 0 stack, "  # CUDA 13.0's
    assert newer in log or (older in log and ", 0 bytes lmem" in log), log


def some_kernels() -> list[tuple[Case, Form, int, tuple[int, int]]]:
    """Return one kernel for each rule, with alternating forms and capabilities; and two tabled ones per layout."""
    turns = itertools.cycle([(turn, CAPABILITIES[turn % 2]) for turn in range(11)])
    found: dict[Rule, tuple[Case, Form, int, tuple[int, int]]] = {}
    for case, (turn, capability) in zip(SOME_CASES, turns, strict=False):
        forms = case.forms()
        found.setdefault(case.rule, (case, *forms[turn % len(forms)], capability))
    tabled = [(case, form_for(case.rule, count, leaves=2), count) for case in ONE_OF_EACH_LAYOUT for count in (4, 17)]
    return [*found.values(), *[(*kernel, (9, 0)) for kernel in tabled]]


def name(kernel: tuple[Case, Form, int, tuple[int, int]]) -> str:
    case, form, count, (major, minor) = kernel
    return f"{case}-{'table' if form.tabled else 'direct'}-{count}-sm_{major}{minor}"


def compiled(form: Form, capability: tuple[int, int] = (9, 0)) -> Any:
    """Compile a kernel, check its PTX, and assemble it."""
    try:
        kernel = on_cpu.compiled(form, capability)
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])
    check_text(form, kernel.ptx, capability)
    assemble(kernel.ptx, capability)
    return kernel


# Memory: leaves with poisoned guards around each buffer and result.


def placed(values: np.ndarray, offset: int = 0) -> np.ndarray:
    """Return a copy of `values` at an address that is `offset` beyond a multiple of 16."""
    raw = np.full(values.nbytes + 128, POISON, np.uint8)
    start = 64 - raw.ctypes.data % 16 + offset
    memory = raw[start : start + values.nbytes].view(values.dtype)
    memory[...] = values
    return memory


def guard_of(memory: np.ndarray) -> np.ndarray:
    """Return the bytes around memory that was `placed`."""
    assert isinstance(memory.base, np.ndarray)
    start = memory.ctypes.data - memory.base.ctypes.data
    return np.delete(memory.base, slice(start, start + memory.nbytes))


def tables(form: Form, addresses: list[list[int]], lanes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return heads and rows, from each leaf's addresses (result first) and number of lanes."""
    layout = Layout(form, lanes, len(addresses[0]) - 1)
    return layout.heads, layout.rows(np.array(addresses, np.int64))


def check(
    form: Form,
    capability: tuple[int, int],
    leaves: list[tuple[list[np.ndarray], np.ndarray]],
    wanted: list[np.ndarray],
    far: int = 0,
) -> None:
    """Run a kernel on leaves, each with its buffers and its result, and compare results bit by bit.

    `far` is the number of the first lane; every address is lowered accordingly.
    """
    kernel, lane_size = compiled(form, capability), lane(form.rule.dtype).itemsize
    addresses = [[array.ctypes.data for array in (out, *buffers)] for buffers, out in leaves]
    lanes = [buffers[0].nbytes // lane_size for buffers, _ in leaves]
    if form.tabled:
        heads, rows = tables(form, addresses, lanes)
        heads[:, 1:] += far
        rows[:, 1:] -= far * lane_size
        arguments = [heads.ctypes.data, rows.ctypes.data, len(heads), len(leaves[0][0])]
    else:
        arguments = [*addresses[0], lanes[0] // form.width if allow_vectors(addresses[0]) else 0, lanes[0]]
    on_cpu.run(kernel, arguments, *GRID)
    for (_, out), expected in zip(leaves, wanted, strict=True):
        assert_same_bits(out, expected)
        assert (guard_of(out) == POISON).all(), "written beyond the result"


def check_reduction(
    form: Form,
    case: Case,
    count: int,
    sizes: list[tuple[int, int]],
    *,
    capability: tuple[int, int] = (9, 0),
    in_place: int | None = None,
    far: int = 0,
) -> None:
    """Check a kernel on leaves of random values with these sizes and offsets; `in_place` is the result's buffer."""
    leaves, wanted = [], []
    for size, offset in sizes:
        values = arrays.buffers(size, count, (size,), case.dtype)
        wanted.append(reduce(case.op, values, accumulate=case.accumulate))
        buffers = [placed(each, offset) for each in values]
        poison = np.frombuffer(bytes([POISON]) * wanted[-1].nbytes, wanted[-1].dtype)
        out = placed(poison, offset if poison.dtype == case.dtype else 0) if in_place is None else buffers[in_place]
        leaves.append((buffers, out))
    check(form, capability, leaves, wanted, far)


@pytest.mark.parametrize("kernel", some_kernels(), ids=name)
def test_compiled_kernel_gives_the_bits_of_numpy(kernel: tuple[Case, Form, int, tuple[int, int]]) -> None:
    case, form, count, capability = kernel
    size = 4 + 2 * math.prod(GRID) * form.width // form.rule.grain
    sizes = [(size, 0), (5, case.dtype.itemsize % 16)] if form.tabled else [(size, 0)]
    check_reduction(form, case, count, sizes, capability=capability)


@pytest.mark.parametrize("case", [case for case in ONE_OF_EACH_LAYOUT if case.rule.result == case.dtype], ids=str)
def test_result_may_take_the_place_of_a_buffer(case: Case) -> None:
    for count, leaves in ((3, 1), (3, 2), (9, 1)):
        form = form_for(case.rule, count, leaves=leaves)
        for place in (0, count - 1):
            check_reduction(form, case, count, [(5 + 6 * form.width, 0)], in_place=place)


def test_one_launch_for_leaves_of_many_sizes() -> None:
    form = form_for(SUM.rule, 3, leaves=2)
    check_reduction(form, SUM, 3, [(size, 0) for size in (5, 0, 1, form.chunk + 7, 0, 64)])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["i1", "f2", "f4", "f8", "c16"])
def test_compiled_copy_keeps_all_bits(dtype: str, capability: tuple[int, int]) -> None:
    kind, leaves = np.dtype(dtype), []
    for size, offset in ((70, 0), (5, min(kind.itemsize, 4))):
        bits = np.random.default_rng(size).integers(0, 256, size * kind.itemsize, np.uint8)
        leaves.append(([placed(bits, offset)], placed(np.full_like(bits, POISON), offset)))
    check(copying(kind.itemsize), capability, leaves, [buffers[0].copy() for buffers, _ in leaves])


@pytest.mark.parametrize("count", [4, 5])
def test_lanes_are_counted_in_64_bits(count: int) -> None:
    check_reduction(form_for(SUM.rule, count, leaves=2), SUM, count, [(30, 0)], far=1 << 33)


def test_ptx_version_is_the_oldest_needed() -> None:
    text = compiled(form_for(SUM.rule, 2)).ptx
    assert re.findall(r"^\.version.*", text, re.MULTILINE) == [f".version {compiling.PTX_VERSION}"]


SUM = Case(ReduceOp.SUM, np.dtype(np.float32), "native")


@pytest.mark.parametrize(
    ("pattern", "other"),
    [
        (r"ld\.global\.v4\.f32", "ld.global.f32"),
        (r"add\.f32", "add.ftz.f32"),
        (r"%tid\.x", "%tid.x;\n.local"),
        (r"add\.f32(\s+)(%\w+), (%\w+),", r"mul.f32 \3, \3, \3;\nadd.f32\1\2, \3,"),  # which may be fused
    ],
)
def test_text_check_finds_planted_mistakes(pattern: str, other: str) -> None:
    form = form_for(SUM.rule, 3)
    wrong = re.sub(pattern, other, compiled(form).ptx)
    with pytest.raises(AssertionError):
        check_text(form, wrong, (9, 0))


def test_missing_library_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("libNVVM cannot be found\n  listdir('/somewhere')")

    monkeypatch.setattr(compiling.cuda, "compile_ptx", refuse)
    with pytest.raises(
        ImportError, match=r"CUDA_HOME to the folder of a CUDA toolkit \(libNVVM cannot be found\)$"
    ) as e:
        compiling.compile_form(form_for(SUM.rule, 2), (8, 9))
    assert compiling.INSTALL in str(e.value)


# Tables assign every lane of every leaf to exactly one chunk, and vectors only if addresses allow them.

fields = st.lists(
    st.tuples(st.integers(0, 40_000), st.lists(st.integers(1, 1 << 40), min_size=5, max_size=5)), min_size=1, max_size=6
)


@given(case=st.sampled_from(CASES), fields=fields)
def test_every_lane_is_in_one_chunk(case: Case, fields: list[tuple[int, list[int]]]) -> None:
    form = form_for(case.rule, 4, leaves=2)
    size = case.rule.dtype.itemsize
    addresses = [[place * size for place in places] for _, places in fields]
    lanes = [n * components(case.dtype) for n, _ in fields]
    heads, table = tables(form, addresses, lanes)
    rows = table.reshape(-1).tolist()
    covered: dict[int, int] = {}
    for row, low, middle, high in heads.tolist():
        vectors, *places = rows[row : row + FIRST + 4]
        assert low == covered.get(row, 0)
        assert low <= middle <= high
        assert (middle - low) % form.width == 0
        assert vectors == all(place % VECTOR_BYTES == 0 for place in places)
        assert high - low <= form.chunk
        covered[row] = high
    assert [row[1:] for row in table.tolist()] == addresses
    assert list(covered.values()) == [each for each in lanes if each]


@given(work=st.integers(0, 1 << 50))
def test_grid_has_a_thread_per_item_up_to_its_limit(work: int) -> None:
    count = blocks(work)
    assert 1 <= count < 1 << 31
    assert count == (1 << 31) - 1 or (count - 1) * THREADS < max(work, 1) <= count * THREADS
