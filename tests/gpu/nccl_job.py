"""A program for real workers, on libraries that stand in for CUDA's and NCCL's; see libcuda.c and libnccl.c.

python -m tests.gpu.nccl_job          prints a line for each thing that was right; what went wrong is raised

The bindings are the real ones: cuda.core, and nccl4py. Nothing is compiled: that is tried elsewhere, and takes long.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from aiodist import (
    CollectiveError,
    CommunicationOptions,
    MultiWorkerMirroredStrategy,
    PerReplica,
    ReduceOp,
    get_replica_context,
    set_logical_devices,
)
from aiodist.gpu import cuda_core, nccl, process
from aiodist.gpu.execute import Executor
from aiodist.gpu.nccl import Buffer
from aiodist.vocabulary import device_frameworks
from aiodist.workers import nccl_choice, nccl_plane
from aiodist.workers.engines import default_communicator
from aiodist_kernels import reduce
from aiodist_kernels.cuda import compiled
from tests.gpu.conftest import Machine, Planted, PlantedArray
from tests.gpu.stand_in import Loading, read
from tests.kernels.arrays import assert_same_bits
from tests.kernels.test_reduce import DEFINED

if TYPE_CHECKING:
    pass

SINGLE = np.dtype(np.float32)
ELF = b"\x7fELF and nothing more: the stand-in's kernels are NumPy's"


class Worker:
    """What a worker has: a driver, a framework, and the stand-in for NCCL."""

    def __init__(self) -> None:
        self.driver = Loading()
        self.stub = ctypes.CDLL("libnccl.so.2")
        machine = Machine(self.driver)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        machine.stream = 1  # the legacy default one
        device_frameworks.TYPES[PlantedArray.__module__.partition(".")[0]] = Planted(machine)
        executor = Executor(self.driver)
        mock.patch.object(process, "executor", return_value=executor).start()
        mock.patch.object(compiled, "compile_form", return_value=compiled.Program("kernel", "")).start()
        mock.patch.object(cuda_core, "machine_code", lambda core, *_: core.ObjectCode.from_cubin(ELF)).start()
        set_logical_devices("GPU:0", 2)
        self.communicator = default_communicator()

    def strategy(self, replicas: int = 1, **options: Any) -> MultiWorkerMirroredStrategy:
        devices = [f"GPU:{k}" for k in range(replicas)]
        given = CommunicationOptions(timeout_seconds=20, **options)
        return MultiWorkerMirroredStrategy(devices=devices, communication_options=given)

    def put(self, values: np.ndarray) -> PlantedArray:
        return PlantedArray(self.driver.put(0, values), values.shape, values.dtype, 0)

    def reduced(self, strategy: MultiWorkerMirroredStrategy, op: ReduceOp, values: list[np.ndarray]) -> None:
        """Reduce values of all replicas, in an event loop of its own."""
        asyncio.run(self.reducing(strategy, op, values))

    async def reducing(self, strategy: MultiWorkerMirroredStrategy, op: ReduceOp, values: list[np.ndarray]) -> None:
        """Reduce values of all replicas, and check each local result's bits."""

        async def program() -> Any:
            return await get_replica_context().all_reduce(op, self.put(values[_me()]))

        wanted = reduce(op, values)
        for result in strategy.experimental_local_results(await strategy.run(program)):
            assert not self.driver.errors, self.driver.errors[0]
            assert_same_bits(read(result.memory, wanted), wanted)


def _me() -> int:
    return get_replica_context().replica_id_in_sync_group


def small(n: int, dtype: np.dtype) -> list[np.ndarray]:
    """Return values whose sums and products are exact."""
    generator = np.random.default_rng(7)
    return [generator.choice([1, 2, 1, 1], 700).astype(dtype) for _ in range(n)]


def every_reduction(worker: Worker) -> str:
    """All ops on all dtypes, with two replicas a worker."""
    strategy = worker.strategy(2)
    through = 0
    with mock.patch.object(nccl_plane.Use, "take", autospec=True, side_effect=nccl_plane.Use.take) as calls:
        for op, dtype in DEFINED:
            if dtype.itemsize <= 8:
                worker.reduced(strategy, op, small(strategy.num_replicas_in_sync, dtype))
                through += nccl_choice.takes(op, dtype)
    assert calls.call_count == through > 20
    strategy.close()
    return f"{through} reductions"


def many_leaves(worker: Worker) -> str:
    """One step, of several dtypes and sizes."""
    strategy = worker.strategy(implementation="nccl")
    n = strategy.num_replicas_in_sync

    async def program() -> Any:
        me = _me()
        value = {f"{k}": worker.put(np.full(11 * k, me + k, SINGLE)) for k in range(1, 30)}
        return await get_replica_context().all_reduce("MEAN", {**value, "n": np.float64(me)})

    (found,) = strategy.experimental_local_results(asyncio.run(strategy.run(program)))
    assert found["n"] == (n - 1) / 2
    for k in range(1, 30):
        wanted = np.full(11 * k, (n - 1) / 2 + k, SINGLE)
        assert_same_bits(read(found[f"{k}"].memory, wanted), wanted)
    strategy.close()
    return "many leaves in one step"


def other_kinds(worker: Worker) -> str:
    """Each replica is the source of a broadcast, a mean is scattered, and what is not for NCCL goes by the host."""
    strategy = worker.strategy(2)
    n = strategy.num_replicas_in_sync
    values = small(n, SINGLE)

    async def program() -> Any:
        ctx, mine = get_replica_context(), worker.put(np.resize(values[_me()], 700 * n))
        sent = [await ctx.broadcast(mine, source) for source in range(n)]
        return sent, await ctx.reduce_scatter("MEAN", mine), await ctx.all_gather(mine, 0)

    with mock.patch.object(nccl_plane.Use, "take", autospec=True, side_effect=nccl_plane.Use.take) as calls:
        found = strategy.experimental_local_results(asyncio.run(strategy.run(program)))
    assert calls.call_count == n + 1
    mean = np.resize(reduce(ReduceOp.MEAN, values), 700 * n)
    for place, (sent, part, gathered) in enumerate(found, 2 * worker.communicator.rank):
        for source, array in enumerate(sent):
            wanted = np.resize(values[source], 700 * n)
            assert_same_bits(read(array.memory, wanted), wanted)
        wanted = mean[700 * place : 700 * (place + 1)]
        assert_same_bits(read(part.memory, wanted), wanted)
        wanted = np.concatenate([np.resize(value, 700 * n) for value in values])
        assert_same_bits(read(gathered.memory, wanted), wanted)
    local = [worker.put(values[2 * worker.communicator.rank + k]) for k in range(2)]
    total = asyncio.run(strategy.extended.reduce_to("SUM", PerReplica(local), "GPU:1"))
    assert_same_bits(read(total.memory, values[0]), reduce(ReduceOp.SUM, values))
    strategy.close()
    return "other kinds"


def fifty_strategies(worker: Worker) -> str:
    """Nothing is left of links: neither of those that were closed, nor of those that were let go."""
    values = small(worker.communicator.size, SINGLE)
    strategy = None
    for turn in range(50):
        strategy = worker.strategy()
        worker.reduced(strategy, ReduceOp.SUM, values)
        assert worker.stub.stub_nccl_live() == 1
        strategy.close()
        assert worker.stub.stub_nccl_live() == 0, turn
    del strategy
    gc.collect()
    return "50 strategies"


def failing_step(worker: Worker) -> str:
    """NCCL fails on the last worker in the second step: all raise, and the next run has another link."""
    strategy = worker.strategy()
    asyncio.run(_through_a_failing_step(worker, strategy))
    assert worker.stub.stub_nccl_live() == 1
    strategy.close()
    return "a failing step"


async def _through_a_failing_step(worker: Worker, strategy: MultiWorkerMirroredStrategy) -> None:
    rank, values = worker.communicator.rank, small(worker.communicator.size, SINGLE)
    await worker.reducing(strategy, ReduceOp.SUM, values)
    if rank == worker.communicator.size - 1:
        worker.stub.stub_nccl_fail(-1, 2)
    try:
        await worker.reducing(strategy, ReduceOp.SUM, values)
    except (CollectiveError, RuntimeError) as error:
        assert "NCCL" in str(error), error  # noqa: PT017  (every worker has an error of its own)
    else:
        raise AssertionError("no error")
    await worker.reducing(strategy, ReduceOp.SUM, values)


def failing_link(worker: Worker) -> str:
    """The last worker cannot be linked: all go through the host, or raise where NCCL is demanded."""
    last, values = worker.communicator.size - 1, small(worker.communicator.size, SINGLE)
    with mock.patch.object(nccl_plane, "LINK_SECONDS", 0.3), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker.stub.stub_nccl_fail(last, -1)
        strategy = worker.strategy()
        worker.reduced(strategy, ReduceOp.SUM, values)
        assert any(f"worker {last} of {last + 1}: NCCL cannot link" in str(each.message) for each in caught)
        strategy.close()
        worker.stub.stub_nccl_fail(last, -1)
        strategy = worker.strategy(implementation="nccl")
        try:
            worker.reduced(strategy, ReduceOp.SUM, values)
        except RuntimeError as error:
            assert str(error).startswith("implementation='nccl', and NCCL cannot link"), error  # noqa: PT017
        else:
            raise AssertionError("no error")
        strategy.close()
    worker.stub.stub_nccl_fail(-1, -1)
    assert worker.stub.stub_nccl_live() == 0
    return "a failing link"


def one_worker(worker: Worker) -> str:
    """A link of one, by the binding's room alone."""
    library = nccl.library()
    assert library.version == "2.32.3"
    memory = worker.driver.put(0, np.arange(5, dtype=SINGLE))
    with worker.driver.using():
        stream = worker.driver.handle(0)
        link = library.link(1, 0, library.new_id())
        assert link.is_ready()
        link.all_reduce(ReduceOp.SUM, [Buffer(memory.address, 5, "float32")], stream)
        while not link.is_ready():
            pass
    assert_same_bits(read(memory, np.arange(5, dtype=SINGLE)), np.arange(5, dtype=SINGLE))
    link.abort()
    link.abort()
    assert worker.stub.stub_nccl_live() == 0
    return "a link of one"


def main() -> None:
    """Try everything that so many workers can."""
    worker = Worker()
    jobs = [one_worker]
    if worker.communicator.size > 1:
        jobs += [every_reduction, other_kinds, many_leaves, failing_step, failing_link]
    if worker.communicator.size == 2:
        jobs.append(fifty_strategies)
    for job in jobs:
        found = job(worker)
        if worker.communicator.rank == 0:
            print(f"{found}, at {time.process_time():.1f} s", flush=True)


if __name__ == "__main__":
    main()
