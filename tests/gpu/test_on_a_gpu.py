"""On a GPU, where there is one: bits of the CPU tier, streams, memory, replicas that use PyTorch. Skipped elsewhere."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist import MirroredStrategy, PerReplica, ReduceOp, get_replica_context
from aiodist._arrays import gpus
from aiodist._gpu.enqueue import Queue
from aiodist._gpu.schedule import Batch
from aiodist._gpu.steps import Job, Place
from aiodist_kernels import reduce
from tests.benchmarks.cuda_reductions import Gpu
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits
from tests.kernels.cuda.cases import CASES, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not gpus.find().gpus, reason=f"no GPU: {gpus.find().missing}")


@pytest.fixture(scope="module")
def lab() -> Gpu:
    try:
        return Gpu()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two logical devices on the first GPU."""
    monkeypatch.setattr(gpus, "logical", gpus.LogicalGpus())
    gpus.logical.split[0] = 2
    return iter([["GPU:0", "GPU:1"]])


def reduced(lab: Gpu, case: Case, buffers: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Reduce leaves on the first GPU, into poisoned memory for each replica; return each leaf's results."""
    keeps: list[Any] = []
    jobs = []
    result = case.rule.result
    outs = [[lab.put(np.full(leaf[0].size * result.itemsize, 0xA5, np.uint8)) for _ in leaf] for leaf in buffers]
    for leaf, own in zip(buffers, outs, strict=True):
        memory = [lab.put(values.reshape(-1)) for values in leaf]
        keeps += memory
        places = [tuple(Place(0, m.address) for m in some) for some in (memory, own)]
        jobs.append(Job(places[0], places[1], leaf[0].size, leaf[0].itemsize, result.itemsize))
    queue = Queue(lab.driver)
    schedule = queue.schedule([Batch(case.rule, jobs)])
    queue.load(schedule)
    queue.run(schedule, [lab.driver.stream(0)], keeps).wait()
    return [
        [lab.get(out, leaf[0].size * result.itemsize).view(result) for out in own]
        for own, leaf in zip(outs, buffers, strict=True)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_cpu(lab: Gpu, case: Case) -> None:
    for count, sizes in ((2, [100_003]), (3, [5]), (4, [4097, 1, 70_000]), (8, [33]), (16, [1000]), (21, [5000, 3])):
        buffers = [arrays.buffers(leaf, count, (size,), case.dtype) for leaf, size in enumerate(sizes)]
        for results, leaf in zip(reduced(lab, case, buffers), buffers, strict=True):
            wanted = reduce(case.op, leaf, accumulate=case.accumulate)
            for got in results:
                assert_same_bits(got, wanted)


@pytest.mark.anyio
async def test_cross_replica_values_with_pytorch(two_devices: Iterator[list[str]]) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    values = arrays.buffers(1, 2, (50, 70), np.dtype(np.float32))
    value = PerReplica([torch.from_numpy(part).cuda() for part in values])
    strategy = MirroredStrategy(next(two_devices))
    for axis in (None, 0, (0, 1)):
        got = await strategy.reduce("MEAN", value, axis)
        assert_same_bits(got.cpu().numpy(), await strategy.reduce("MEAN", PerReplica(values), axis))
    assert_same_bits((await strategy.gather(value, 1)).cpu().numpy(), np.concatenate(values, 1))


@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
async def test_replicas_with_pytorch(two_devices: Iterator[list[str]], dtype: np.dtype) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    kind = getattr(torch, dtype.name)

    def made(replica_id: int) -> Any:
        torch.manual_seed(replica_id)
        return torch.randn(1000, device="cuda").to(kind)

    async def step() -> Any:
        ctx = get_replica_context()
        value = await ctx.run_sync(made, ctx.replica_id_in_sync_group)
        result = await ctx.all_reduce(ReduceOp.SUM, {"value": value, "loss": 1.0})
        assert result["loss"] == 2.0
        return value.float().cpu().numpy(), result["value"].float().cpu().numpy()

    strategy = MirroredStrategy(next(two_devices))
    (one, sum_of_one), (other, sum_of_other) = strategy.experimental_local_results(await strategy.run(step))
    wanted = reduce(ReduceOp.SUM, [one.astype(dtype), other.astype(dtype)]).astype(np.float32)
    assert_same_bits(sum_of_one, wanted)
    assert_same_bits(sum_of_other, wanted)


@pytest.mark.anyio
async def test_replicas_with_numba(two_devices: Iterator[list[str]], lab: Gpu) -> None:
    cuda: Any = importlib.import_module("numba.cuda")

    async def step() -> Any:
        me = get_replica_context().replica_id_in_sync_group
        value = cuda.to_device(np.arange(100, dtype=np.float32) * (me + 1))
        return (await get_replica_context().all_reduce(ReduceOp.MEAN, value)).copy_to_host()

    strategy = MirroredStrategy(next(two_devices))
    for result in strategy.experimental_local_results(await strategy.run(step)):
        np.testing.assert_array_equal(result, np.arange(100, dtype=np.float32) * 1.5)


@pytest.mark.anyio
async def test_exchanges_with_numba(two_devices: Iterator[list[str]], lab: Gpu) -> None:
    cuda: Any = importlib.import_module("numba.cuda")
    values = [np.arange(1000, dtype=np.int16).reshape(10, 20, 5) + 1000 * k for k in range(2)]

    async def step() -> Any:
        ctx = get_replica_context()
        value = cuda.to_device(values[ctx.replica_id_in_sync_group])
        results = [
            await ctx.all_gather(value, 0),
            await ctx.all_gather(value, 1),
            await ctx.broadcast(value, source=1),
            await ctx.reduce_scatter(ReduceOp.SUM, value, 1),
            await ctx.all_to_all(value, 1, 0),
        ]
        return [result.copy_to_host() for result in results]

    strategy = MirroredStrategy(next(two_devices))
    for me, got in enumerate(strategy.experimental_local_results(await strategy.run(step))):
        wanted = [
            np.concatenate(values, 0),
            np.concatenate(values, 1),
            values[1],
            np.split(values[0] + values[1], 2, axis=1)[me],
            np.concatenate([np.split(value, 2, axis=1)[me] for value in values], 0),
        ]
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
