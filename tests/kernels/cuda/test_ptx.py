# SPDX-License-Identifier: Apache-2.0
"""Kernels, compiled for two generations of GPUs: their text is read, and their code run on the CPU, bit by bit."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist_kernels import ReduceOp
from aiodist_kernels.cuda import compiled as compiling
from aiodist_kernels.cuda.compiled import PTX_VERSION, compile_form
from aiodist_kernels.cuda.forms import FIRST, THREADS, VECTOR_BYTES, Form, Leaf, blocks, copying, form_for
from aiodist_kernels.rules import Rule, components
from tests.kernels.cuda import on_cpu
from tests.kernels.cuda.cases import (
    CASES,
    ONE_OF_EACH_LAYOUT,
    SOME_CASES,
    Case,
    Reduction,
    copy_of,
    direct_arguments,
    pack,
    reduction,
)
from tests.kernels.cuda.ptx_text import assemble, check_text

CAPABILITIES = [(8, 0), (9, 0)]
GRID = 2, 3  # blocks, threads of each


def some_kernels() -> list[tuple[Case, Form, int, tuple[int, int]]]:
    """List one kernel for each rule, and for one rule of each layout two that read a table.

    Forms, numbers of buffers and capabilities take turns.
    """
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


def compiled(form: Form, capability: tuple[int, int] = (9, 0)) -> on_cpu.Kernel:
    """Compile a kernel, and check its text and what an assembler makes of it."""
    try:
        kernel = on_cpu.compiled(form, capability)
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])
    check_text(form, kernel.ptx, capability)
    assemble(kernel.ptx, capability)
    return kernel


def run(form: Form, kernel: on_cpu.Kernel, leaves: list[Reduction], lanes_per_element: int) -> None:
    if form.tabled:
        heads, rows = pack(form, [leaf.leaf for leaf in leaves], lanes_per_element)
        arguments = [heads.ctypes.data, rows.ctypes.data, len(heads), len(leaves[0].buffers)]
    else:
        arguments = direct_arguments(form, leaves[0].leaf, lanes_per_element)
    on_cpu.run(kernel, arguments, *GRID)
    for each in leaves:
        each.check()


@pytest.mark.parametrize("kernel", some_kernels(), ids=name)
def test_compiled_kernel_gives_the_bits_of_numpy(kernel: tuple[Case, Form, int, tuple[int, int]]) -> None:
    case, form, count, capability = kernel
    size = 4 + 2 * math.prod(GRID) * form.width // form.rule.grain
    sizes = [(size, 0), (5, case.dtype.itemsize % 16)] if form.tabled else [(size, 0)]
    leaves = [
        reduction(case.op, case.dtype, count, elements, seed=elements, accumulate=case.accumulate, offset=offset)
        for elements, offset in sizes
    ]
    run(form, compiled(form, capability), leaves, components(case.dtype))


@pytest.mark.parametrize("case", ONE_OF_EACH_LAYOUT, ids=str)
def test_result_may_take_the_place_of_a_buffer(case: Case) -> None:
    if case.rule.result != case.dtype:
        return
    for count, leaves in ((3, 1), (3, 2), (9, 1)):
        form = form_for(case.rule, count, leaves=leaves)
        for place in (0, count - 1):
            leaf = reduction(case.op, case.dtype, count, 5 + 6 * form.width, in_place=place)
            run(form, compiled(form), [leaf], components(case.dtype))


def test_one_launch_for_leaves_of_many_sizes() -> None:
    form = form_for(SUM.rule, 3, leaves=2)
    sizes = (5, 0, 1, form.chunk + 7, 0, 64)
    run(form, compiled(form), [reduction(SUM.op, SUM.dtype, 3, size, seed=size) for size in sizes], 1)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["i1", "f2", "f4", "f8", "c16"])
def test_compiled_copy_keeps_all_bits(dtype: str, capability: tuple[int, int]) -> None:
    kind = np.dtype(dtype)
    form = copying(kind.itemsize)
    leaves = [copy_of(kind, 70), copy_of(kind, 5, offset=min(kind.itemsize, 4))]
    run(form, compiled(form, capability), leaves, kind.itemsize // form.rule.dtype.itemsize)


@pytest.mark.parametrize("count", [4, 5])
def test_lanes_are_counted_in_64_bits(count: int) -> None:
    form = form_for(SUM.rule, count, leaves=2)
    leaf, far = reduction(SUM.op, SUM.dtype, count, 30), 1 << 33
    heads, rows = pack(form, [leaf.leaf], 1)
    heads[:, 1:] += far
    rows[:, 1:] -= far * SUM.dtype.itemsize
    on_cpu.run(compiled(form), [heads.ctypes.data, rows.ctypes.data, len(heads), count], *GRID)
    leaf.check()


def test_text_asks_for_no_newer_ptx_than_it_needs() -> None:
    text = compiled(form_for(SUM.rule, 2)).ptx
    assert re.findall(r"^\.version.*", text, re.MULTILINE) == [f".version {PTX_VERSION}"]


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
def test_text_with_a_planted_mistake_is_refused(pattern: str, other: str) -> None:
    form = form_for(SUM.rule, 3)
    wrong = re.sub(pattern, other, compiled(form).ptx)
    with pytest.raises(AssertionError):
        check_text(form, wrong, (9, 0))


def test_library_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("libNVVM cannot be found\n  listdir('/somewhere')")

    monkeypatch.setattr(compiling.cuda, "compile_ptx", refuse)
    with pytest.raises(
        ImportError, match=r"CUDA_HOME to the folder of a CUDA toolkit \(libNVVM cannot be found\)$"
    ) as e:
        compile_form(form_for(SUM.rule, 2), (8, 9))
    assert compiling.INSTALL in str(e.value)


# The table deals every lane of every leaf out to exactly one chunk, and vectors only where addresses allow them.

fields = st.lists(
    st.tuples(st.integers(0, 40_000), st.lists(st.integers(1, 1 << 40), min_size=5, max_size=5)), min_size=1, max_size=6
)


@given(case=st.sampled_from(CASES), fields=fields)
def test_every_lane_is_in_one_chunk(case: Case, fields: list[tuple[int, list[int]]]) -> None:
    form = form_for(case.rule, 4, leaves=2)
    size = case.rule.dtype.itemsize
    given_leaves = [Leaf(out * size, tuple(place * size for place in places), n) for n, (out, *places) in fields]
    heads, table = pack(form, given_leaves, components(case.dtype))
    rows = table.reshape(-1).tolist()
    covered: dict[int, int] = {}
    for row, low, middle, high in heads.tolist():
        vectors, *addresses = rows[row : row + FIRST + 4]
        assert low == covered.get(row, 0)
        assert low <= middle <= high
        assert (middle - low) % form.width == 0
        assert vectors == all(address % VECTOR_BYTES == 0 for address in addresses)
        assert high - low <= form.chunk
        covered[row] = high
    assert [row[1:] for row in table.tolist()] == [[leaf.out, *leaf.buffers] for leaf in given_leaves]
    wanted = [leaf.elements * components(case.dtype) for leaf in given_leaves if leaf.elements]
    assert list(covered.values()) == wanted


@given(work=st.integers(0, 1 << 50))
def test_grid_has_a_thread_for_each_as_far_as_it_reaches(work: int) -> None:
    count = blocks(work)
    assert 1 <= count < 1 << 31
    assert count == (1 << 31) - 1 or (count - 1) * THREADS < max(work, 1) <= count * THREADS
