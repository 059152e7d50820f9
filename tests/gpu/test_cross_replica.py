"""strategy.reduce and gather, reduce_to, batch_reduce_to and broadcast_to of arrays on planted GPUs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiodist import Mirrored, MirroredStrategy, PerReplica, ReduceOp, set_logical_devices
from aiodist._gpu.steps import HOST
from aiodist_kernels import reduce
from tests.gpu.conftest import Machine, Plant, PlantedArray, cancelled_while_devices_work
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, SINGLE, assert_same_bits

pytestmark = pytest.mark.anyio

INTEGER = np.dtype(np.int32)
ORDINALS = [0, 0, 1]


def planted(plant: Plant, **options: Any) -> tuple[Machine, MirroredStrategy]:
    """Three replicas on two GPUs."""
    machine = plant(2, **options)
    set_logical_devices("GPU:0", 2)
    return machine, MirroredStrategy()


def per_replica(machine: Machine, values: list[np.ndarray]) -> PerReplica[Any]:
    return PerReplica([machine.put(value, ordinal) for value, ordinal in zip(values, ORDINALS, strict=True)])


CALLS: dict[str, tuple[Callable[[MirroredStrategy, ReduceOp, Any], Awaitable[Any]], list[int]]] = {
    "reduce": (lambda s, op, value: s.reduce(op, value, None), [0]),
    **{
        f"reduce along {axis}": (lambda s, op, value, axis=axis: s.reduce(op, value, axis), [0])  # type: ignore[misc]
        for axis in (0, -1, (0, 1))
    },
    "reduce_to one": (lambda s, op, value: s.extended.reduce_to(op, value, "GPU:2"), [1]),
    "reduce_to several": (lambda s, op, value: s.extended.reduce_to(op, value, ["GPU:1", "GPU:2"]), [0, 1]),
    **{
        f"gather along {axis}": (lambda s, _, value, axis=axis: s.gather(value, axis), [0])  # type: ignore[misc]
        for axis in (0, 1)
    },
}
"""The calls, and the GPUs of their results."""


@pytest.mark.parametrize(
    ("op", "dtype", "walls", "unloaded"),
    [("SUM", SINGLE, set(), False), ("MEAN", BFLOAT16, {frozenset({0, 1})}, True), ("MEAN", INTEGER, set(), True)],
)
@pytest.mark.parametrize("name", CALLS)
async def test_results_have_the_bits_of_the_host(
    plant: Plant, name: str, op: str, dtype: np.dtype, walls: set[frozenset[int]], *, unloaded: bool
) -> None:
    machine, strategy = planted(plant, walls=walls, unloaded=unloaded)
    call, ordinals = CALLS[name]
    shapes: list[list[tuple[int, ...]]] = [[(3, 5)] * 3, [(3, 5)] * 3]
    if name.endswith("along 0"):
        shapes[0] = [(2, 40), (0, 40), (5, 40)]
    elif name == "gather along 1":
        shapes[0] = [(3, 2, 4), (3, 0, 4), (3, 5, 4)]
    values = [[arrays.values(3 * k + i, s, dtype) for i, s in enumerate(column)] for k, column in enumerate(shapes)]
    first, second = map(PerReplica, values)
    nest = {"a": per_replica(machine, values[0]), "host": first, "b": [per_replica(machine, values[1]), None]}
    with np.errstate(all="ignore"):
        wanted = await call(MirroredStrategy(3), ReduceOp(op), [first, second])
        found = await call(strategy, ReduceOp(op), nest)
    assert found["b"][1] is None
    for got, same, kind in zip(
        [found["a"], found["b"][0], found["host"]], [*wanted, wanted[0]], [PlantedArray] * 2 + [np.ndarray], strict=True
    ):
        parts, others = ([x] if len(ordinals) == 1 else list(x.values) for x in (got, same))
        assert {type(part) for part in parts} == {kind}
        for part, other in zip(parts, others, strict=True):
            assert_same_bits(part.numpy() if kind is PlantedArray else part, other)
        if kind is PlantedArray:
            assert [part.ordinal for part in parts] == ordinals


async def test_reduce_plain_and_mirrored_values(plant: Plant) -> None:
    machine, strategy = planted(plant)
    values = arrays.values(1, (7,), SINGLE)
    plain = machine.put(values, 1)
    mirrored = Mirrored([machine.put(values, ordinal) for ordinal in ORDINALS])
    for value, ordinal in ((plain, 1), (mirrored, 0)):
        got = await strategy.reduce("MEAN", value, axis=None)
        assert got.ordinal == ordinal
        assert got.memory is not plain.memory
        assert_same_bits(got.numpy(), values)
    with pytest.raises(ValueError, match="SUM expects a per-replica value"):
        await strategy.reduce("SUM", plain, axis=None)


async def test_reduce_is_ordered_after_replica_streams(plant: Plant) -> None:
    machine, strategy = planted(plant)
    value = per_replica(machine, [np.zeros(4, SINGLE)] * 3)
    for k, part in enumerate(value.values):
        stream = machine.driver.stream(ORDINALS[k], f"GPU:{k}")
        machine.driver.enqueue(stream, partial(part.memory.array.view(SINGLE).fill, 2))
    assert (await strategy.reduce("SUM", value, axis=None)).numpy().tolist() == [6.0] * 4


async def test_gather_of_a_plain_value_is_that_value(plant: Plant) -> None:
    machine, strategy = planted(plant)
    value = machine.put(np.ones((2, 3), SINGLE), 1)
    gathered = await strategy.gather({"x": value, "host": np.ones(2)}, 0)
    assert gathered["x"] is value


async def test_batch_reduce_to(plant: Plant) -> None:
    machine, strategy = planted(plant)
    values, host = arrays.buffers(3, 3, (50,), SINGLE), PerReplica([np.ones(2)] * 3)
    value, wanted = per_replica(machine, values), reduce(ReduceOp.SUM, values)
    pairs = [({"x": value, "h": host}, ["GPU:1", "GPU:2"]), (value, value), (host, "CPU:0")]
    nest, everywhere, plain = await strategy.extended.batch_reduce_to("SUM", pairs)
    assert isinstance(nest["h"], Mirrored)
    assert plain.tolist() == [3.0, 3.0]
    for mirrored, ordinals in ((nest["x"], [0, 1]), (everywhere, ORDINALS)):
        assert isinstance(mirrored, Mirrored)
        assert [part.ordinal for part in mirrored.values] == ordinals
        assert len({id(part.memory) for part in mirrored.values}) == len(ordinals)
        for part in mirrored.values:
            assert_same_bits(part.numpy(), wanted)


async def test_broadcast_to(plant: Plant) -> None:
    machine, strategy = planted(plant, walls={frozenset({0, 1})})
    values = arrays.values(1, (2, 3), BFLOAT16)
    value = machine.put(values, 1)
    sent = await strategy.extended.broadcast_to({"x": value, "n": 5}, ["GPU:0", "GPU:2"])
    assert [part.ordinal for part in sent["x"].values] == [0, 1]
    assert sent["n"].values == (5, 5)
    for part in sent["x"].values:
        assert part.memory is not value.memory
        assert_same_bits(part.numpy(), values)
    assert_same_bits((await strategy.extended.broadcast_to(value, "GPU:1")).numpy(), values)


async def test_invalid_calls_are_refused(plant: Plant) -> None:
    machine, strategy = planted(plant)
    value = per_replica(machine, [np.ones(4, SINGLE)] * 3)
    mixed = PerReplica([value.values[0], np.ones(4, SINGLE), np.ones(4, SINGLE)])
    ragged = per_replica(machine, [np.ones(k + 1, SINGLE) for k in range(3)])
    for error, match, call in (
        (ValueError, "axis must be from -1 to 0", strategy.reduce("SUM", value, axis=1)),
        (TypeError, "can only go to GPUs, got", strategy.extended.reduce_to("SUM", value, "CPU:0")),
        (ValueError, "axis must be from -1 to 0", strategy.gather(value, 1)),
        (ValueError, "must have the same", strategy.reduce("SUM", mixed, axis=None)),
        (ValueError, "must have the same", strategy.reduce("SUM", ragged, axis=None)),
    ):
        with pytest.raises(error, match=match):
            await call


@pytest.mark.parametrize("axis", [None, 0])
async def test_cancelled_reduce_waits_for_the_device(plant: Plant, axis: int | None) -> None:
    machine, strategy = planted(plant)
    value = per_replica(machine, [np.ones(4, SINGLE)] * 3)
    await cancelled_while_devices_work(machine, lambda: strategy.reduce("SUM", value, axis))


async def test_abandoned_work_keeps_its_memory_until_it_is_done(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio may cancel a task before a thread waits for its work, and no shield prevents that."""
    machine, strategy = planted(plant)
    value = per_replica(machine, [np.ones(4, SINGLE)] * 3)

    async def cancelled(_: Any) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr("anyio.to_thread.run_sync", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await strategy.reduce("SUM", value, axis=0)
    gc.collect()
    assert machine.driver.host_waits == 2, "one for each device"
    assert not any(device == HOST for _, device in machine.driver.regions.values())
    assert (await strategy.reduce("SUM", value, axis=0)).numpy() == 12
