# SPDX-License-Identifier: Apache-2.0
"""The table deals every lane of every leaf out to exactly one chunk, and vectors only where addresses allow them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiodist_kernels.cuda.forms import FIRST, THREADS, VECTOR_BYTES, Leaf, blocks, form_for
from aiodist_kernels.rules import components
from tests.kernels.cuda.cases import CASES, Case
from tests.kernels.cuda.memory import pack

leaves = st.lists(
    st.tuples(st.integers(0, 40_000), st.lists(st.integers(1, 1 << 40), min_size=5, max_size=5)), min_size=1, max_size=6
)


@given(case=st.sampled_from(CASES), fields=leaves)
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
