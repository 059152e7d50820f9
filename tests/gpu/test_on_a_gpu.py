"""On a real GPU: kernels have the bits of the CPU, and programs with PyTorch, CuPy, Numba and JAX run."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import anyio
import ml_dtypes
import numpy as np
import pytest

from aiodist import MirroredStrategy, PerReplica, ReduceOp, ReplicaContext, get_replica_context
from aiodist._arrays import devices
from aiodist._arrays.device import device_type_of
from aiodist._gpu.enqueue import Queue
from tests.benchmarks.cuda_reductions import Gpu
from tests.gpu.problem import Problem
from tests.kernels import arrays
from tests.kernels.arrays import assert_same_bits
from tests.kernels.cuda.cases import CASES, Case

pytestmark = [pytest.mark.skipif(not devices.find_gpus().gpus, reason=f"no GPU: {devices.find_gpus().missing}")]


@pytest.fixture(scope="module")
def lab() -> Gpu:
    try:
        return Gpu()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_have_the_bits_of_the_cpu(lab: Gpu, case: Case) -> None:
    for count, sizes in ((2, [100_003]), (3, [5]), (4, [4097, 1, 70_000]), (8, [33]), (16, [1000]), (21, [5000, 3])):
        problem = Problem(lambda _, values: lab.put(values), case.op, case.dtype, [0] * count, sizes, case.accumulate)
        problem.run(Queue(lab.driver), [lab.driver.stream(0)]).wait()
        for out, wanted in problem.results:
            assert_same_bits(lab.get(out, wanted.nbytes).view(wanted.dtype), wanted)


# Programs.

CYCLES = 100_000_000
"""The length of a kernel that only takes time, some 50 ms: whatever is not ordered after it overtakes it."""


DTYPES = ("float32", "float64", "float16", "int32", "uint8", "bool", "complex64")


class Framework(NamedTuple):
    """A framework, and functions that make and read its arrays."""

    module: Any
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    dtypes: Sequence[str] = DTYPES


def torch_arrays(module: Any) -> Framework:
    def put(values: np.ndarray) -> Any:
        if values.dtype == ml_dtypes.bfloat16:
            return module.from_numpy(values.view(np.int16)).cuda().view(module.bfloat16)
        return module.from_numpy(values).cuda()

    def get(array: Any) -> np.ndarray:
        if array.dtype == module.bfloat16:
            found: np.ndarray = array.view(module.int16).cpu().numpy().view(ml_dtypes.bfloat16)
            return found
        return array.cpu().numpy()  # type: ignore[no-any-return]

    return Framework(module, put, get, (*DTYPES, "bfloat16"))


def framework_of(name: str) -> Framework:
    """Import a framework; JAX holds 64-bit numbers as 32-bit ones."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # frameworks' own modules warn
        module: Any = importlib.import_module({"numba": "numba.cuda"}.get(name, name))
    if name == "cupy":
        return Framework(module, module.asarray, module.asnumpy)
    if name == "numba":
        return Framework(module, module.to_device, lambda array: array.copy_to_host())
    if name == "jax":
        if module.default_backend() != "gpu":
            pytest.skip("JAX sees no GPU")
        dtypes = [*(dtype for dtype in DTYPES if dtype != "float64"), "bfloat16"]
        return Framework(module, module.numpy.asarray, np.asarray, dtypes)
    if not module.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return torch_arrays(module)


FRAMEWORKS = ("torch", "cupy", "numba", "jax")


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Any:
    return framework_of(request.param)


@pytest.fixture
def torch() -> Any:
    return framework_of("torch").module


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> MirroredStrategy:
    """Two logical devices on the first GPU."""
    monkeypatch.setattr(devices, "logical", devices.LogicalGpus())
    devices.logical.split[0] = 2
    return MirroredStrategy(["GPU:0", "GPU:1"])


async def results_of(strategy: MirroredStrategy, step: Callable[..., Any], *args: Any) -> Any:
    """Return what each replica returned."""
    return strategy.experimental_local_results(await strategy.run(step, args))


async def all_kinds(ctx: ReplicaContext, value: Any, out: Any) -> list[Any]:
    """Return every kind of collective's result for a value with two even axes; ``out`` is a buffer or None."""
    ops = [ReduceOp.MAX] if "bool" in str(value.dtype) else [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT]
    found = [await ctx.all_reduce(op, value) for op in ops]
    found += await ctx.all_gather([value, value], 1)
    found += [await ctx.all_gather(value, 0), await ctx.broadcast(value, 1), await ctx.reduce_scatter(ops[0], value, 1)]
    found += [await ctx.all_to_all(value, 1, 0), await ctx.all_to_all(value, 0, 0)]
    host: Any
    *many, host, loss = await ctx.all_reduce(ops[0], [*[value] * 160, np.ones(3), 0.5])
    assert host.tolist() == [2.0 if ops[0] is ReduceOp.SUM else 1.0] * 3
    assert isinstance(loss, float)
    if out is not None:
        assert (await ctx.all_reduce(ops[0], [value], out=[out]))[0] is out
        assert await ctx.all_reduce(ops[0], value, out=value) is value
        found += [out, value]
    return [*found, many[0], many[-1]]


@pytest.mark.anyio
async def test_every_kind_has_the_bits_of_the_host(framework: Any, strategy: MirroredStrategy) -> None:
    has_buffers = framework.module.__name__ != "jax"
    for dtype in map(np.dtype, framework.dtypes):
        values = arrays.buffers(1, 2, (34, 50), dtype)

        async def on_host() -> list[np.ndarray]:
            value = values[get_replica_context().replica_id_in_sync_group].copy()  # noqa: B023
            return await all_kinds(get_replica_context(), value, np.zeros_like(value) if has_buffers else None)

        async def on_device() -> list[np.ndarray]:
            value = values[get_replica_context().replica_id_in_sync_group]  # noqa: B023
            mine, out = framework.put(value.copy()), framework.put(np.zeros_like(value)) if has_buffers else None
            found = await all_kinds(get_replica_context(), mine, out)
            assert {type(one) for one in found} == {type(mine)}
            assert all(device_type_of(one) is not None for one in found)
            return list(map(framework.get, found))

        wanted = await results_of(MirroredStrategy(["CPU:0", "CPU:1"]), on_host)
        for got, expected in zip(await results_of(strategy, on_device), wanted, strict=True):
            for one, other in zip(got, expected, strict=True):
                assert_same_bits(one, other.astype(one.dtype))  # JAX has means of integers in float32


@pytest.mark.anyio
async def test_collective_waits_for_the_streams_of_its_values(torch: Any, strategy: MirroredStrategy) -> None:
    def slow(replica_id: int) -> Any:
        torch.cuda._sleep(CYCLES)
        return torch.full((1 << 20,), replica_id + 1.0, device="cuda")

    async def step() -> list[Any]:
        ctx = get_replica_context()
        me = ctx.replica_id_in_sync_group
        on_own_stream = await ctx.run_sync(slow, me)
        found = [await ctx.all_reduce("SUM", on_own_stream), await ctx.all_reduce("SUM", slow(me))]
        with torch.cuda.stream(torch.cuda.Stream()):
            handle = ctx.all_reduce("SUM", slow(me))
        return [*found, await handle]

    for results in await results_of(strategy, step):
        assert all(bool((result == 3.0).all()) for result in results)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["torch", "cupy"])
async def test_run_sync_is_ordered_with_what_its_caller_enqueues(
    name: str, torch: Any, strategy: MirroredStrategy
) -> None:
    framework = framework_of(name)

    def slow(value: Any) -> Any:
        torch.cuda._sleep(CYCLES)  # PyTorch's current stream and CuPy's are the replica's
        return value + 1

    async def step() -> np.ndarray:
        made = framework.put(np.zeros(1 << 20, np.float32))
        torch.cuda._sleep(CYCLES)
        made += 1  # on the default stream
        two = await get_replica_context().run_sync(slow, made)  # on the replica's
        return framework.get(two + 1)

    for result in await results_of(strategy, step):
        assert (result == 3.0).all()


@pytest.mark.anyio
async def test_cancelled_replica_waits_for_the_device(torch: Any, strategy: MirroredStrategy) -> None:
    made: list[Any] = []
    value = [torch.zeros(1 << 20, device="cuda") for _ in range(2)]

    async def step() -> None:
        ctx = get_replica_context()
        me = ctx.replica_id_in_sync_group
        await ctx.all_reduce("SUM", value[me])  # compiles the kernels
        torch.cuda._sleep(4 * CYCLES)
        value[me].fill_(1.0)
        made.append(torch.cuda.Event())
        made[-1].record()
        await ctx.all_reduce("SUM", value[me])

    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            await strategy.run(step)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while len(made) < 2:
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert not all(event.query() for event in made)
        scope.cancel()
    assert scope.cancelled_caught
    assert all(event.query() for event in made)


@pytest.mark.anyio
async def test_memory_is_released(framework: Any, strategy: MirroredStrategy) -> None:
    driver: Any = importlib.import_module("cuda.bindings.driver")

    async def step(rounds: int) -> None:
        ctx = get_replica_context()
        for k in range(rounds):
            value = [framework.put(np.full(1 << 20, k, np.float32)), framework.put(np.full(1 << 10, k, np.float32))]
            await ctx.all_reduce("SUM", value)
            await ctx.run_sync(len, await ctx.all_gather(value, 0))

    async def used_after(rounds: int) -> int:
        """Return the bytes in use of the device's pool, which has aiodist's own memory."""
        await strategy.run(step, (rounds,))
        gc.collect()
        (error, pool), attribute = driver.cuDeviceGetMemPool(0), driver.CUmemPool_attribute
        assert not int(error)
        return int(driver.cuMemPoolGetAttribute(pool, attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)[1])

    before = await used_after(20)
    assert await used_after(100) - before < 1 << 20


@pytest.mark.anyio
async def test_cross_replica_values(torch: Any, strategy: MirroredStrategy) -> None:
    values = arrays.buffers(1, 2, (50, 70), np.dtype(np.float32))
    value = PerReplica([torch.from_numpy(part).cuda() for part in values])
    for axis in (None, 0, (0, 1)):
        got = await strategy.reduce("MEAN", value, axis)
        assert_same_bits(got.cpu().numpy(), await strategy.reduce("MEAN", PerReplica(values), axis))
    assert_same_bits((await strategy.gather(value, 1)).cpu().numpy(), np.concatenate(values, 1))
