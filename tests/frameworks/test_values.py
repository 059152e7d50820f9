"""Collectives and cross-replica reductions of other frameworks' arrays, and the memory that results share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from aiodist import CollectiveMismatchError, IndexedSlices, PerReplica
from aiodist._arrays.host import host_type_of
from tests.collectives.kinds_of_values import Pair
from tests.frameworks import toy
from tests.runtime.programs import here, mirrored, on_each, replica

pytestmark = pytest.mark.anyio


class Framework(NamedTuple):
    name: str  # in reports
    make: Callable[[Any], Any]  # a copy of a NumPy array
    type: type  # of the framework's arrays
    mutable: bool = True


def seen(value: Any) -> np.ndarray[Any, Any]:
    return np.from_dlpack(value)


@pytest.fixture(params=["toy", "torch", "jax"])
def framework(request: pytest.FixtureRequest) -> Framework:
    """Each framework that is installed, and one that is always there."""
    if request.param == "toy":
        return Framework("tests", lambda array: toy.Tensor(np.array(array)), toy.Tensor)
    module = pytest.importorskip(request.param)
    if request.param == "torch":
        return Framework("torch", lambda array: module.from_dlpack(np.array(array)), module.Tensor)
    return Framework("jax", lambda array: module.numpy.array(np.array(array)), module.Array, mutable=False)


def numbers(replica_id: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return (np.arange(int(np.prod(shape))).reshape(shape) + 10 * replica_id).astype(dtype)


def to_list(framework: Framework, value: Any) -> Any:
    assert isinstance(value, framework.type)
    return seen(value).tolist()


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX", "PRODUCT"])
async def test_all_reduce_gives_what_it_gives_for_numpy(framework: Framework, op: str) -> None:
    async def program() -> None:
        for dtype in ("float32", "float16", "int32", "uint8"):
            mine = numbers(replica(), 2, 3, dtype=dtype)
            wanted = await here().all_reduce(op, mine)
            got = await here().all_reduce(op, framework.make(mine))
            assert to_list(framework, got) == wanted.astype(seen(got).dtype).tolist()

    await on_each(3, program)


async def test_collectives_return_the_framework_s_arrays(framework: Framework) -> None:
    async def program() -> tuple[Any, ...]:
        ctx, mine = here(), framework.make(numbers(replica(), 2))
        nest: Any = {"a": Pair(framework.make(np.ones(2, np.float32)), np.ones(1)), "b": [2.0, None]}
        summed: Any = await ctx.all_reduce("SUM", nest)
        assert type(summed["a"].right) is np.ndarray
        assert summed["b"] == [4.0, None]
        empty = await ctx.all_reduce("SUM", framework.make(np.zeros((0, 2), np.float32)))
        assert seen(empty).shape == (0, 2)
        got = (
            await ctx.all_gather(mine, 0),
            await ctx.broadcast(mine, 1),
            await ctx.reduce_scatter("SUM", mine),
            await ctx.all_to_all(mine),
            summed["a"].left,
            await ctx.all_reduce("SUM", framework.make(np.float32(replica()))),
            await ctx.all_reduce("SUM", framework.make(numbers(replica(), 4, 4))[::2, 1:3]),
        )
        return tuple(to_list(framework, value) for value in got)

    alike = [2, 2], 1.0, [[12, 14], [28, 30]]
    assert await on_each(2, program) == (
        ([0, 1, 10, 11], [10, 11], [10], [0, 10], *alike),
        ([0, 1, 10, 11], [10, 11], [12], [1, 11], *alike),
    )


async def test_another_array_type_on_one_replica_is_a_mismatch(framework: Framework) -> None:
    async def program() -> None:
        mine = np.ones(3, np.float32)
        await here().all_reduce("SUM", {"w": mine if replica() == 1 else framework.make(mine)})

    with pytest.raises(CollectiveMismatchError) as caught:
        await on_each(3, program)
    report = caught.value.report
    assert report.reason == "device"
    assert report.suspects == (1,)
    assert f"all_reduce(SUM, {{'w': {framework.name}.float32[3]}})" in str(report)
    assert f"value['w']: {framework.name}.float32[3] on replicas 0 and 2, float32[3] on replica 1" in str(report)


async def test_values_of_a_run_are_reduced_and_gathered_outside_of_it(framework: Framework) -> None:
    strategy = mirrored(2)

    value = (await strategy.run(lambda: {"x": framework.make(numbers(replica(), 2))}))["x"]
    assert isinstance(value, PerReplica)
    read = await strategy.run(lambda x: to_list(framework, x), (value,))
    assert strategy.experimental_local_results(read) == ([0, 1], [10, 11])
    assert to_list(framework, await strategy.reduce("SUM", value, None)) == [10, 12]
    ragged = PerReplica([framework.make(numbers(0, 2)), framework.make(numbers(1, 1))])
    assert to_list(framework, await strategy.reduce("MEAN", ragged, 0)) == pytest.approx(11 / 3)
    assert to_list(framework, await strategy.gather(ragged, 0)) == [0, 1, 10]
    mixed = PerReplica([np.ones(2, np.float32), framework.make(np.ones(2, np.float32))])
    with pytest.raises(ValueError, match=rf"replica 0's is float32\[2\], replica 1's is {framework.name}.float32"):
        await strategy.reduce("SUM", mixed, None)
    with pytest.raises(ValueError, match="the same type"):
        await strategy.gather(mixed, 0)


async def test_extended_puts_copies_on_each_destination(framework: Framework) -> None:
    strategy = mirrored(2)
    value = PerReplica([framework.make(numbers(k, 2)) for k in range(2)])
    reduced = await strategy.extended.reduce_to("SUM", value, ["CPU:0", "CPU:1"])
    copies = await strategy.extended.broadcast_to(value.values[1], ["CPU:0", "CPU:1"])
    for found, wanted in ((reduced, [10, 12]), (copies, [10, 11])):
        assert [to_list(framework, component) for component in found.values] == [wanted, wanted]
        first, second = map(seen, found.values)
        assert not framework.mutable or not np.shares_memory(first, second)


async def test_pytorch_s_own_types_are_returned_and_its_parameters_refused() -> None:
    torch = pytest.importorskip("torch")

    class Special(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    async def program() -> Any:
        ctx = here()
        half = await ctx.all_reduce("MEAN", torch.tensor([1.5, 3.0], dtype=torch.bfloat16) * (1 + 2 * replica()))
        special = await ctx.all_reduce("SUM", torch.ones(2).as_subclass(Special))
        largest = await ctx.all_reduce("SUM", torch.max(torch.arange(6.0).reshape(2, 3), dim=0))
        with pytest.raises(TypeError, match=r"torch\.Parameter that requires grad"):
            ctx.all_reduce("SUM", torch.nn.Parameter(torch.ones(2)))
        return half, special, largest

    for half, special, largest in await on_each(2, program):
        assert (half.dtype, half.tolist()) == (torch.bfloat16, [3.0, 6.0])
        assert (type(special), special.tolist()) == (torch.Tensor, [2, 2])
        assert type(largest) is torch.return_types.max
        assert (largest.values.tolist(), largest.indices.tolist()) == ([6, 8, 10], [2, 2, 2])


async def test_batches_of_a_data_loader_are_split_and_reduced() -> None:
    torch = pytest.importorskip("torch")
    inputs, targets = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4)
    strategy = mirrored(3)

    async def step(batch: list[Any]) -> Any:
        x, y = batch
        assert isinstance(x, torch.Tensor)
        total = await here().all_reduce("SUM", x.sum(dim=0))
        assert isinstance(total, torch.Tensor)
        return y.to(torch.float32)

    means, sizes = [], []
    async for batch in strategy.experimental_distribute_dataset(loader):
        labels = await strategy.run(step, args=(batch,))
        sizes.append([len(part) for part in labels.values])
        means.append(float(await strategy.reduce("MEAN", labels, axis=0)))
    assert sizes == [[2, 2, 0], [2, 2, 0], [1, 1, 0]]
    assert means == [1.5, 5.5, 8.5]


class Alone(toy.Tensor):
    __array_namespace__ = None  # type: ignore[assignment]


class Trained(toy.Tensor):
    requires_grad = True


class Elsewhere(toy.Tensor):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 99, 0


class Opaque(toy.Tensor):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("can't export this layout")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Alone, "expected a nest of arrays.*Alone"),
        (Trained, r"requires grad.*value\.detach\(\).*parameter\.grad"),
        (Elsewhere, "expected an array in host memory, got a tests.Elsewhere elsewhere; copy it first"),
        (Opaque, "NumPy cannot look at this .*Opaque: can't export this layout"),
    ],
)
async def test_unsupported_array_is_refused_with_advice(kind: Any, text: str) -> None:
    async def program() -> None:
        here().all_reduce("SUM", {"x": kind(np.ones(2))})

    with pytest.raises(TypeError, match=rf"value\['x'\]: .*{text}"):
        await on_each(1, program)


def test_indexed_slices_are_over_the_framework_s_memory(framework: Framework) -> None:
    rows = framework.make(np.ones((1, 2), np.float32))
    slices = IndexedSlices(rows, framework.make(np.array([3], np.int32)))
    assert np.shares_memory(slices.values, seen(rows))
    assert slices.indices.tolist() == [3]
    with pytest.raises(TypeError, match="requires grad"):
        IndexedSlices(Trained(np.ones((1, 2))), [3])


def test_neither_input_nor_result_is_copied(framework: Framework) -> None:
    array = np.arange(6, dtype=np.float32)
    given = framework.make(array)
    mark = host_type_of(given)
    assert mark is not None
    assert np.shares_memory(mark.view(given), seen(given))
    array.flags.writeable = False
    result = mark.give(array)
    assert isinstance(result, framework.type)
    assert seen(result).tolist() == [0, 1, 2, 3, 4, 5]
    if framework.mutable:  # JAX shares only memory that is aligned to 64 bytes
        assert np.shares_memory(seen(result), array)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all"])
async def test_change_of_one_replicas_result_leaves_the_others_alone(framework: Framework, collective: str) -> None:
    if not framework.mutable:
        pytest.skip("its arrays cannot be changed")

    async def program() -> Any:
        ctx, mine = here(), framework.make(np.arange(6, dtype=np.float32))
        arguments = ["SUM", mine] if "reduce" in collective else [mine, 0]
        result = seen(await getattr(ctx, collective)(*arguments))
        before = result.tolist()
        result[:] = [value + 100 * (replica() + 1) for value in before]
        await ctx.barrier()
        assert result.tolist() == [value + 100 * (replica() + 1) for value in before]
        return to_list(framework, mine)

    assert await on_each(3, program) == ([0, 1, 2, 3, 4, 5],) * 3


async def test_out_is_the_framework_s_own_memory(framework: Framework) -> None:
    async def program() -> Any:
        out = framework.make(np.zeros(2, np.float32))
        result = await here().all_reduce("SUM", framework.make(np.ones(2, np.float32)), out=out)
        assert result is out
        return to_list(framework, out)

    if framework.mutable:
        assert await on_each(2, program) == ([2, 2],) * 2
    else:
        with pytest.raises(ValueError, match="writeable"):
            await on_each(1, program)
