"""What goes through NCCL beside all_reduce, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from aiodist import IncompleteCollectiveError, ReduceOp, ReplicaContext
from aiodist.workers import nccl_plane
from aiodist_kernels import reduce
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits
from tests.workers.nccl_job import NcclJob
from tests.workers.test_nccl import PAIR, SINGLE, check_that_it_works, small

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("unloaded", [False, True], ids=["kernels are there", "kernels are compiled"])
@pytest.mark.parametrize("counts", [(2, 1, 2), (1, 1)], ids=str)
async def test_broadcasts_of_every_replica(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], *, unloaded: bool
) -> None:
    job, n = NcclJob(monkeypatch, counts, unloaded=unloaded), sum(counts)
    halves, longs = (arrays.buffers(5, n, (30, 20), dtype) for dtype in (BFLOAT16, np.dtype(np.complex128)))

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        for source in range(n):
            value = {"a": job.put(me, halves[me]), "h": np.full(3, me), "b": [job.put(me, longs[me]), me]}
            sent = await ctx.broadcast(value, source)
            assert sent["a"].ordinal == sent["b"][0].ordinal == job.ordinals[me]
            assert_same_bits(sent["a"].numpy(), halves[source])
            assert_same_bits(sent["b"][0].numpy(), longs[source])
            assert_same_bits(sent["h"], np.full(3, source))
            assert sent["b"][1] == source
            alone = await ctx.broadcast(job.put(me, halves[me]), source)
            assert_same_bits(alone.numpy(), halves[source])
            assert alone.memory is not sent["a"].memory

    await job.values(program)
    roots = [worker for worker, count in enumerate(counts) for _ in range(count)]
    assert [op for rank, op, _ in job.nccl.steps if rank == 0] == [root for root in roots for _ in range(2)]


@pytest.mark.parametrize("counts", [(2, 1, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype(np.int32), SINGLE, BFLOAT16], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT], ids=str)
async def test_reduce_scatter(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], op: ReduceOp, dtype: np.dtype
) -> None:
    job, n = NcclJob(monkeypatch, counts), sum(counts)
    values = [value.reshape(n, 5, 2 * n, 10) for value in small(3, n, dtype, size=100 * n * n)]
    shorts = [np.full((n, 300), me, np.int16) for me in range(n)]
    wanted = reduce(op, values)

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        nest = {"a": job.put(me, values[me]), "host": values[me], "short": job.put(me, shorts[me])}
        parts = await ctx.reduce_scatter(op, nest)
        assert_same_bits(parts["a"].numpy(), wanted[me : me + 1])
        assert_same_bits(parts["host"], wanted[me : me + 1])
        assert_same_bits(parts["short"].numpy(), reduce(op, shorts)[me : me + 1])
        part = await ctx.reduce_scatter(op, job.put(me, values[me]), -2)
        assert part.ordinal == job.ordinals[me]
        assert_same_bits(part.numpy(), wanted[:, :, 2 * me : 2 * me + 2])

    await job.values(program)
    assert len(job.nccl.steps) == 2 * len(counts)


async def test_what_depends_on_sizes_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    job = NcclJob(monkeypatch, (2, 1))

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        whole = await ctx.all_gather(job.put(me, np.full((me, 300), me, SINGLE)), 0)
        assert whole.numpy()[:, 0].tolist() == [1, 2, 2]
        got = await ctx.all_to_all(job.put(me, np.full((3, 300), me, SINGLE)))
        assert got.numpy()[:, 0].tolist() == [0, 1, 2]

    await job.values(program)
    assert not job.nccl.steps


@pytest.mark.parametrize("kind", ["broadcast", "reduce_scatter"])
async def test_failure_of_another_kind_is_told_to_all(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(nccl_plane, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("aiodist.replica.carrying._ENGINE_GRACE_SECONDS", 0.1)
    job = NcclJob(monkeypatch, PAIR)
    job.nccl.refuse = 1

    async def program(ctx: ReplicaContext) -> None:
        value = job.put(ctx.replica_id_in_sync_group, np.ones(300, SINGLE))
        await (ctx.broadcast(value) if kind == "broadcast" else ctx.reduce_scatter("SUM", value))

    first, second = await job.run(program)
    assert isinstance(second, RuntimeError)
    assert isinstance(first, IncompleteCollectiveError)
    assert "planted" in str(first)
    job.nccl.refuse = None
    await check_that_it_works(job)
