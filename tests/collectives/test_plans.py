"""Plans on the host: what comes out is what NumPy gives, in memory of its own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist._collectives import host
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import Collective, Cut, Kind, LeafPlan, Result
from aiodist._collectives.work import Work
from aiodist_kernels import ReduceOp, policy
from tests.collectives.reference import CASES, Case, spec_of
from tests.kernels import arrays
from tests.kernels.arrays import assert_same_bits

EXACT: list[np.dtype] = [np.dtype(np.int16), np.dtype(np.uint8)]
DTYPES = [np.dtype(np.float32), *EXACT]


def on_the_host(collective: Collective, values: list[Any], large: bool = False, **options: Any) -> list[Any]:
    """Return the result of each position; of large values, worker threads make it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BLOCKING_FROM_MOVED", "LEAST_MOVED_BY_A_THREAD") if large else ():
            patch.setattr(policy, name, 1)
        patch.setattr(host, "LOOK_FROM", 0 if large else host.LOOK_FROM)
        found = executor.__wrapped__(collective, len(values), **options)
        result = found.run(values)
        if isinstance(result, Work):
            result = result.carry_out()
    return [result] * len(values) if found.shared else result


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=25)
@given(
    size=st.integers(1, 5),
    layout=st.sampled_from(["C", "F", "big-endian", "mixed"]),
    seed=st.integers(0, 99),
    large=st.booleans(),
    single=st.booleans(),
)
def test_every_kind(case: Case, size: int, layout: str, seed: int, *, large: bool, single: bool) -> None:
    columns = [case.inputs(size, dtype, layout, seed + k) for k, dtype in enumerate(DTYPES)]
    rows: list[Any] = columns[0] if single else [list(row) for row in zip(*columns, strict=True)]
    with np.errstate(all="ignore"):
        case.check(columns, on_the_host(case.collective(rows[0], size), rows, large), single=single)


@st.composite
def plans(draw: st.DrawFn, size: int) -> LeafPlan:
    """Draw a plan that no kind has."""
    inputs = st.integers(0, size - 1)
    folds = draw(st.lists(st.lists(inputs, min_size=1, max_size=4), max_size=3))
    sources = st.lists(st.integers(0, size + len(folds) - 1), min_size=1, max_size=3)
    axis, count = draw(st.integers(0, 1)), draw(st.sampled_from([1, 2, 3]))
    cuts = (
        st.builds(Cut, st.just(axis), st.integers(0, count - 1), st.just(count)) if draw(st.booleans()) else st.none()
    )
    results = st.builds(Result, sources, cuts, st.integers(0, 1))
    return LeafPlan(size, tuple(folds), tuple([draw(results) for _ in range(draw(st.sampled_from([1, size])))]))


def interpreted(plan: LeafPlan, column: list[np.ndarray]) -> list[np.ndarray]:
    """Return what a plan makes of inputs."""
    arrays_of = [*column, *(functools.reduce(np.add, [column[i] for i in fold]) for fold in plan.folds)]
    found = []
    for sources, cut, axis in plan.results:
        parts = [arrays_of[source] for source in sources]
        if cut is not None:
            parts = [np.split(part, cut.parts, cut.axis)[cut.place] for part in parts]
        found.append(np.concatenate(parts, axis) if len(parts) > 1 else parts[0])
    return found


@settings(max_examples=200)
@given(data=st.data(), size=st.integers(1, 5), large=st.booleans())
def test_any_plan(data: st.DataObject, size: int, *, large: bool) -> None:
    plan = data.draw(plans(size))
    kind = Kind("made up", lambda *_: plan, shared=len(plan.results) == 1)
    columns = [arrays.buffers(k, size, (6, 6), dtype) for k, dtype in enumerate(EXACT)]
    rows = [list(row) for row in zip(*columns, strict=True)]
    collective = Collective(kind, ReduceOp.SUM, None, spec_of(rows[0]))
    wanted = [interpreted(plan, column) for column in columns]
    found = on_the_host(collective, rows, large)
    for replica in range(size):
        for leaf, result in enumerate(found[replica]):
            assert_same_bits(result, wanted[leaf][0 if kind.shared else replica])
