"""Distributed datasets: plain and asynchronous sources, cut or grouped, and where they may be iterated."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import DistributedDataset, InputContext, PerReplica, ReplicaContextError, ValueContext
from tests.data.sources import Asynchronous, Plain, collected, lists
from tests.runtime.programs import mirrored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = pytest.mark.anyio

BATCHES = [np.arange(4), np.arange(4, 7)]
PARTS = [[[0, 1], [2, 3]], [[4, 5], [6]]]


@pytest.mark.parametrize("source", [Plain, Asynchronous, list, iter])
async def test_batches_are_cut_at_each_iteration(source: Callable[[Any], Any]) -> None:
    dataset = mirrored(2).experimental_distribute_dataset(source(BATCHES))
    assert isinstance(dataset, DistributedDataset)
    assert [lists(batch) for batch in await collected(dataset)] == PARTS
    assert [lists(batch) for batch in await collected(dataset)] == ([] if source is iter else PARTS)


async def test_plain_source_is_iterated_plainly_too() -> None:
    dataset = mirrored(2).experimental_distribute_dataset(Plain(BATCHES))
    assert [lists(batch) for batch in dataset] == PARTS
    iterator = iter(dataset)
    assert lists(await anext(iterator)) == PARTS[0]
    assert lists(next(iterator)) == PARTS[1]
    assert next(iterator, None) is None


async def test_asynchronous_source_is_not_iterated_plainly() -> None:
    dataset = mirrored(2).experimental_distribute_dataset(Asynchronous(BATCHES))
    with pytest.raises(TypeError, match="async for batch in dataset"):
        iter(dataset)
    with pytest.raises(TypeError, match=r"await anext\(iterator\)"):
        next(aiter(dataset))


async def test_one_replica_gets_everything_bare() -> None:
    for strategy in (mirrored(1), aiodist.get_strategy()):
        assert await collected(strategy.experimental_distribute_dataset(BATCHES)) == BATCHES
        assert await collected(strategy.distribute_datasets_from_function(lambda _: BATCHES)) == BATCHES
        assert strategy.experimental_distribute_values_from_function(lambda ctx: ctx) == ValueContext(0, 1)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_error_of_the_source_arrives_with_its_traceback(asynchronous: bool) -> None:
    def plain() -> Iterator[Any]:
        yield BATCHES[0]
        raise OSError("disk")

    async def waiting() -> AsyncIterator[Any]:
        for batch in plain():
            yield batch

    iterator = aiter(mirrored(2).experimental_distribute_dataset(waiting() if asynchronous else plain()))
    await anext(iterator)
    with pytest.raises(OSError, match="disk") as caught:
        await anext(iterator)
    assert "plain" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert await anext(iterator, None) is None


@pytest.mark.parametrize("step", [iter, aiter, next, anext])
async def test_iterating_inside_a_replica_is_refused_with_the_reason(step: Callable[[Any], Any]) -> None:
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(BATCHES)
    subject = dataset if step in (iter, aiter) else iter(dataset)

    async def replica() -> Any:
        made = step(subject)
        return await made if step is anext else made

    with pytest.raises(ReplicaContextError, match=r"inside replica 0; each of its batches .*iterate outside"):
        await strategy.run(replica)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("experimental_distribute_dataset", BATCHES),
        ("distribute_datasets_from_function", lambda _: BATCHES),
        ("experimental_distribute_values_from_function", lambda _: 1),
        ("experimental_make_numpy_dataset", np.zeros(2)),
    ],
)
async def test_datasets_are_made_outside_replicas(name: str, argument: Any) -> None:
    strategy = mirrored(2)
    with pytest.raises(ReplicaContextError, match=r"was called inside replica 0; it belongs outside"):
        await strategy.run(lambda: getattr(strategy, name)(argument))
    with strategy.scope():
        getattr(strategy, name)(argument)


@pytest.mark.parametrize("prefix", ["", "experimental_"])
async def test_dataset_function_is_called_once_and_n_batches_make_a_step(prefix: str) -> None:
    contexts: list[InputContext] = []

    def dataset_fn(context: InputContext) -> Plain:
        contexts.append(context)
        size = context.get_per_replica_batch_size(6)
        with pytest.raises(ValueError, match="divisible by the number of replicas, 3, got 7"):
            context.get_per_replica_batch_size(7)
        return Plain([np.full(size, k) for k in range(6)])

    dataset = getattr(mirrored(3), f"{prefix}distribute_datasets_from_function")(dataset_fn)
    expected = [[[0, 0], [1, 1], [2, 2]], [[3, 3], [4, 4], [5, 5]]]
    assert [lists(step) for step in dataset] == expected
    assert [lists(step) for step in await collected(dataset)] == expected
    assert contexts == [InputContext(1, 0, 3)]


@pytest.mark.parametrize("source", [Plain, Asynchronous])
async def test_incomplete_last_step_is_filled_with_batches_without_rows(source: Callable[[Any], Any]) -> None:
    strategy = mirrored(3)
    dataset = strategy.distribute_datasets_from_function(lambda _: source([np.full(2, k) for k in range(4)]))
    steps = await collected(dataset)
    assert [lists(step) for step in steps] == [[[0, 0], [1, 1], [2, 2]], [[3, 3], [], []]]
    assert {(part.shape[1:], part.dtype) for part in steps[-1].values} == {((), np.dtype(np.int64))}
    assert await strategy.reduce("MEAN", steps[-1], axis=0) == 3


async def test_cancellation_within_a_step_loses_no_batch() -> None:
    send, receive = anyio.create_memory_object_stream[Any](2)
    iterator = aiter(mirrored(2).distribute_datasets_from_function(lambda _: receive))
    send.send_nowait(np.full(1, 1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, iterator)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    send.send_nowait(np.full(1, 2))
    assert lists(await anext(iterator)) == [[1], [2]]
    send.close()
    assert await anext(iterator, None) is None
    receive.close()


async def test_closing_ends_the_source() -> None:
    ended = []

    def plain() -> Iterator[Any]:
        try:
            yield from BATCHES
        finally:
            ended.append("plain")

    async def asynchronous() -> AsyncIterator[Any]:
        try:
            for batch in BATCHES:
                yield batch
        finally:
            ended.append("asynchronous")

    for source in (plain(), asynchronous()):
        iterator = aiter(mirrored(2).experimental_distribute_dataset(source))
        await anext(iterator)
        await iterator.aclose()
        assert await anext(iterator, None) is None
    assert ended == ["plain", "asynchronous"]


async def test_values_from_a_function_are_per_replica() -> None:
    strategy = mirrored(3)
    made = strategy.experimental_distribute_values_from_function(lambda context: {"c": context, "s": "x", "n": None})
    assert made["c"].values == tuple(ValueContext(k, 3) for k in range(3))
    assert (type(made["s"]), made["s"].values, made["n"]) == (PerReplica, ("x",) * 3, None)
