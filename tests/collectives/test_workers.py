"""Collectives over workers have one machine's results for any layout of replicas, in segments of any size."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import ReplicaContext
from aiodist._collectives import kinds
from aiodist._collectives.kinds import Collective
from aiodist._collectives.workers import Members, Transfer, WorkerPlan
from aiodist._workers import exchange
from aiodist_kernels import ReduceOp, reduce
from tests.collectives.reference import CASES, Case, spec_of
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, SINGLE, assert_same_bits
from tests.workers.simulated import Job

EXACT: list[np.dtype] = [np.dtype(np.int16), np.dtype(np.uint8)]  # folds in any order give the same bits
homes = st.lists(st.integers(0, 2), min_size=1, max_size=6)
segments = st.sampled_from([64, 1 << 20])


def in_a_group(call: Any, rows: list[Any], workers: list[int], segment: int, **options: Any) -> list[Any]:
    """Return each group member's result of a call with its row; ``workers`` are the members' workers."""
    counts = [1 + workers.count(worker) for worker in range(3)]  # the first replica of each worker is no member
    order = [sum(counts[:worker]) + 1 + workers[:i].count(worker) for i, worker in enumerate(workers)]

    found: dict[int, Any] = {}

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group in order:
            group = ctx.new_group(order)
            me = group.replica_id_in_sync_group
            found[me] = await call(group, rows[me])

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(exchange, "SEGMENT", segment)
        anyio.run(Job(*counts, **options).values, program)
    return [found[me] for me in range(len(order))]


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=15)
@given(workers=homes, layout=st.sampled_from(["C", "F", "big-endian", "mixed"]), segment=segments, single=st.booleans())
def test_every_kind(case: Case, workers: list[int], layout: str, segment: int, *, single: bool) -> None:
    columns = [case.inputs(len(workers), dtype, layout, k) for k, dtype in enumerate(EXACT)]
    rows: list[Any] = columns[0] if single else [list(row) for row in zip(*columns, strict=True)]
    case.check(columns, in_a_group(case.call, rows, workers, segment), single=single)


@pytest.mark.parametrize("accumulate", ["native", "float64"])
@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT16, np.dtype(np.complex64)], ids=str)
@settings(max_examples=15)
@given(
    workers=homes | st.just([0, 1, 2]),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN]),
    size=st.sampled_from([5, 500]),
    segment=segments,
)
def test_bits_of_one_machine_when_ordered_or_with_one_replica_per_worker(
    dtype: np.dtype, accumulate: Any, workers: list[int], op: ReduceOp, size: int, segment: int
) -> None:
    columns = [arrays.buffers(k, len(workers), (size, 4), dtype) for k in range(2)]
    values = [list(row) for row in zip(*columns, strict=True)]
    reduction = "fast" if workers == [0, 1, 2] else "ordered"
    with np.errstate(all="ignore"):
        wanted = [reduce(op, column, accumulate=accumulate) for column in columns]
    options = {"reduction": reduction, "accumulate": accumulate}
    for results in in_a_group(lambda group, row: group.all_reduce(op, row), values, workers, segment, **options):
        for result, expected in zip(results, wanted, strict=True):
            assert_same_bits(np.asarray(result), expected)


def test_reduction_is_sent_without_a_copy() -> None:
    array = np.arange(40_000.0).reshape(4, 10_000)
    spec = spec_of(array)
    members = Members(0, ((0,), (1,)))
    reduced = Transfer(WorkerPlan(Collective(kinds.ALL_REDUCE, ReduceOp.SUM, None, spec), members), [array])
    own = reduced.rows[0].own(3, 7)
    assert own is not None
    assert np.shares_memory(own, array)


def test_all_gather_result_stays_where_it_was_received() -> None:
    array = np.arange(40_000.0).reshape(4, 10_000)
    come = np.stack([array, array])
    plan = WorkerPlan(
        Collective(kinds.ALL_GATHER, None, (0,), kinds.ragged(spec_of(array), (0,))), Members(0, ((0,), (1,)))
    )
    transfer = Transfer(plan, [array])
    transfer.take_gathered(transfer.joined_in_place(transfer.all_values([[[come[0]]], [[come[1]]]])))
    assert np.shares_memory(transfer.result(), come)
    np.testing.assert_array_equal(transfer.result(), np.concatenate([array, array]))
