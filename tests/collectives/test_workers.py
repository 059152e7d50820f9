"""Plans over workers: every kind of collective gives what one machine gives, wherever the replicas live."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist._collectives import kinds
from aiodist._collectives.kinds import Collective
from aiodist._collectives.workers import Members, Transfer, WorkerPlan
from aiodist_kernels import ReduceOp, reduce
from tests.collectives.moving import over_workers
from tests.collectives.reference import spec_of
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits

SINGLE = np.dtype(np.float32)


@pytest.mark.parametrize("accumulate", ["native", "float64"])
@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT16, np.dtype(np.complex64)], ids=str)
@given(
    homes=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN]),
    seed=st.integers(0, 9),
    ordered=st.booleans(),
)
def test_bits_are_those_of_one_machine_when_ordered_or_with_one_replica_a_worker(
    dtype: np.dtype, accumulate: Any, homes: list[int], op: ReduceOp, seed: int, *, ordered: bool
) -> None:
    size = len(homes)
    ids = [found for worker in range(4) if (found := [i for i in range(size) if homes[i] == worker])]
    if not ordered:
        ids = [[i] for i in range(size)]
    columns = [arrays.buffers(seed + k, size, (5, 4), dtype) for k in range(2)]
    values = [list(row) for row in zip(*columns, strict=True)]
    asked = Collective(kinds.ALL_REDUCE, op, None, spec_of(values[0]))
    with np.errstate(all="ignore"):
        everyone = over_workers(asked, ids, values, random.Random(seed), accumulate=accumulate, ordered=ordered)
        wanted = [reduce(op, column, accumulate=accumulate) for column in columns]
    for results in everyone:
        for result, expected in zip(results, wanted, strict=True):
            assert_same_bits(np.asarray(result), expected)


def test_nothing_is_copied_that_can_be_moved_from_where_it_lies() -> None:
    array = np.arange(40_000.0).reshape(4, 10_000)
    spec = spec_of(array)
    members = Members(0, ((0,), (1,)))
    reduced = Transfer(WorkerPlan(Collective(kinds.ALL_REDUCE, ReduceOp.SUM, None, spec), members), [array])
    own = reduced.rows[0].own(3, 7)
    assert own is not None
    assert np.shares_memory(own, array)


def test_nothing_is_copied_that_can_stay_where_it_comes_to() -> None:
    array = np.arange(40_000.0).reshape(4, 10_000)
    come = np.stack([array, array])
    plan = WorkerPlan(
        Collective(kinds.ALL_GATHER, None, (0,), kinds.ragged(spec_of(array), (0,))), Members(0, ((0,), (1,)))
    )
    transfer = Transfer(plan, [array])
    transfer.take_gathered(transfer.as_they_lie(transfer.all_values([[[come[0]]], [[come[1]]]])))
    assert np.shares_memory(transfer.result(), come)
    np.testing.assert_array_equal(transfer.result(), np.concatenate([array, array]))
