"""Packs by TensorFlow's rule, and that they are units of reducing which never change a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import CommunicationOptions, IndexedSlices, MirroredStrategy, PerReplica, ReduceOp, ReplicaContext
from aiodist._arrays.leaves import LeafType
from aiodist.collective.all_reduce import Reduction
from aiodist.collective.packs import packs
from aiodist.strategy import extended, off_loop
from tests.collective.runs import mirrored, run


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 120))
def test_pack_closes_when_it_has_more_than_was_asked_for(sizes: list[int], bytes_per_pack: int) -> None:
    found = packs(sizes, bytes_per_pack)
    assert [place for pack in found for place in pack] == list(range(len(sizes)))
    for pack in found:
        assert sum(sizes[place] for place in pack[:-1]) <= bytes_per_pack
    for pack in found[:-1]:
        assert sum(sizes[place] for place in pack) > bytes_per_pack


def test_pack_that_is_exactly_full_stays_open() -> None:
    assert [len(pack) for pack in packs([5, 5, 5, 5, 5], 10)] == [3, 2]


@pytest.mark.parametrize(("sizes", "bytes_per_pack"), [([4, 4, 4], 0), ([4, None, 4], 1), ([], 1), ([], 0)])
def test_no_size_or_an_unknown_one_means_one_pack(sizes: list[int | None], bytes_per_pack: int) -> None:
    assert packs(sizes, bytes_per_pack) == [range(len(sizes))]


@pytest.mark.parametrize(("bytes_per_pack", "units"), [(1, 5), (400, 3), (10_000, 1)])
def test_pack_is_one_unit_of_reducing(bytes_per_pack: int, units: int) -> None:
    columns = [[np.full(100, replica + leaf, np.float32) for replica in range(2)] for leaf in range(5)]
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    work = Reduction(ReduceOp.SUM, columns, [None] * 5, options).work(list)
    assert len(work.phases[0]) == units
    assert [leaf.tolist() for leaf in work.carry_out()] == [[2 * leaf + 1] * 100 for leaf in range(5)]


def test_rows_of_unknown_number_make_one_unit() -> None:
    rows = [IndexedSlices(np.ones((1, 2)), [replica], (2, 2)) for replica in range(2)]
    columns: list[list[Any]] = [[np.ones(3), np.ones(3)], [*rows]]
    types = [LeafType.NUMPY_ARRAY, LeafType.INDEXED_SLICES]
    work = Reduction(ReduceOp.SUM, columns, types, CommunicationOptions(bytes_per_pack=1)).work(list)
    assert len(work.phases[0]) == 1


@pytest.mark.anyio
async def test_bits_do_not_depend_on_packs() -> None:
    rng = np.random.default_rng(0)
    grads = [[rng.standard_normal(200_000).astype(np.float32) for _ in range(4)] for _ in range(3)]

    async def program(ctx: ReplicaContext) -> list[bytes]:
        mine = grads[ctx.replica_id_in_sync_group]
        sizes = (0, 1, 900_000, 1 << 40)
        results = [await ctx.all_reduce("MEAN", mine, CommunicationOptions(bytes_per_pack=size)) for size in sizes]
        return [b"".join(leaf.tobytes() for leaf in result) for result in results]

    for bits in await run(mirrored(3), program):
        assert len(set(bits)) == 1


@pytest.mark.anyio
async def test_batch_reduce_to_goes_pack_by_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    async def spy(values: list[object], fn: Any) -> Any:
        seen.append(len(values))
        return await off_loop.call_off_loop(values, fn)

    monkeypatch.setattr(extended, "call_off_loop", spy)
    value = PerReplica([np.ones(10, np.float32)] * 2)  # 80 bytes with both components
    options = CommunicationOptions(bytes_per_pack=100)
    results = await mirrored(2).extended.batch_reduce_to("SUM", [(value, "CPU:0")] * 5, options)
    assert [result.tolist() for result in results] == [[2] * 10] * 5
    assert seen == [2, 2, 1]


@pytest.mark.anyio
async def test_accumulator_holds_in_cross_replica_context_too() -> None:
    wide = CommunicationOptions(accumulate="float64")
    parts = PerReplica([np.array([x], np.float32) for x in (1e8, 1, -1e8)])
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    native, widened = MirroredStrategy(devices), MirroredStrategy(devices, communication_options=wide)
    assert (await native.reduce("SUM", parts, None)).tolist() == [0]
    assert (await widened.reduce("SUM", parts, None)).tolist() == [1]
    assert (await widened.reduce("SUM", parts, 0)).tolist() == 1
    assert (await native.extended.reduce_to("SUM", parts, "CPU:0", wide)).tolist() == [1]
