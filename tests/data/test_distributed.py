"""Distributed datasets: plain and asynchronous sources, cut or grouped, and where they may be iterated."""

from __future__ import annotations

import math
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

import aiodist
from aiodist import DistributedDataset, IndexedSlices, InputContext, PerReplica, ReplicaContextError, ValueContext
from tests.runtime.programs import mirrored

pytestmark = pytest.mark.anyio

BATCHES = [np.arange(4), np.arange(4, 7)]
PARTS = [[[0, 1], [2, 3]], [[4, 5], [6]]]


class Plain:
    """An iterable that can be iterated again."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class Asynchronous:
    """An async iterable that can be iterated again, and waits before each batch. Its iterators are no generators."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)
        self.left = iter(self.batches)

    def __aiter__(self) -> Asynchronous:
        return Asynchronous(self.batches)

    async def __anext__(self) -> Any:
        await checkpoint()
        for batch in self.left:
            return batch
        raise StopAsyncIteration


async def collected(dataset: Any) -> list[Any]:
    return [element async for element in dataset]


def lists(value: Any) -> list[Any]:
    """Return the components of a per-replica value as lists."""
    return [component.tolist() for component in value.values]


# What a batch becomes.


class Pair(NamedTuple):
    x: Any
    y: Any


class Rows:
    """As much of another library's array as a dataset needs: a shape, and slices along the first axis."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.shape = rows, (len(rows),)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.rows[rows])


@given(st.integers(0, 40), st.integers(2, 12))
def test_parts_are_consecutive_and_full_until_the_rows_run_out(m: int, n: int) -> None:
    batch = {"x": [np.arange(2 * m).reshape(m, 2)], "y": Pair(np.arange(m), None), "z": Rows([*range(m)])}
    (parts,), full = mirrored(n).experimental_distribute_dataset([batch]), math.ceil(m / n)
    assert parts["y"].y is None
    y = lists(parts["y"].x)
    assert [len(part) for part in y] == [max(0, min(full, m - k * full)) for k in range(n)]
    assert [number for part in y for number in part] == [*range(m)]
    for rows, numbers, foreign in zip(parts["x"][0].values, y, parts["z"].values, strict=True):
        assert (rows[:, 0].tolist(), foreign.rows) == ([2 * number for number in numbers], numbers)
        assert rows.base is batch["x"][0].base, "parts are views"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"x": np.zeros(4), "y": np.zeros(3)}, ValueError, r"batch\['x'\] has 4, batch\['y'\] has 3"),
        ((np.zeros(4), np.zeros(())), ValueError, r"batch\[1\] must have a first axis.*batched"),
        (np.float32(1), ValueError, "batch must have a first axis"),
        ([1, 2, 3], TypeError, r"batch\[0\] must be an array.* int; .*np\.asarray"),
        (PerReplica([np.zeros(2)] * 2), TypeError, r"batch must be an array.*PerReplica"),
        (None, ValueError, "batch must hold arrays.* there are none"),
        (IndexedSlices(np.zeros((1, 2)), [0]), TypeError, "batch must be an array.*IndexedSlices"),
    ],
)
def test_what_cannot_be_cut_is_named(n: int, batch: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        list(mirrored(n).experimental_distribute_dataset([batch]))


def test_batches_of_a_step_must_be_alike_and_only_arrays_are_filled_up() -> None:
    def steps(*batches: Any) -> list[Any]:
        return list(mirrored(2).distribute_datasets_from_function(lambda _: batches))

    assert steps("a", "a")[0].values == ("a", "a")
    with pytest.raises(TypeError, match=r"batch must be an array.* str"):
        steps("a")
    with pytest.raises(ValueError, match=r"batches must have the same structure: value\['x'\] is on replica 0"):
        steps({"x": np.arange(2)}, {"y": np.arange(2)})


# Iterating.


@pytest.mark.parametrize("source", [Plain, Asynchronous, list, iter])
async def test_batches_are_cut_at_each_iteration(source: Callable[[Any], Any]) -> None:
    dataset = mirrored(2).experimental_distribute_dataset(source(BATCHES))
    assert isinstance(dataset, DistributedDataset)
    assert [lists(batch) for batch in await collected(dataset)] == PARTS
    assert [lists(batch) for batch in await collected(dataset)] == ([] if source is iter else PARTS)


async def test_only_a_plain_source_is_iterated_plainly_too() -> None:
    plain, waiting = (mirrored(2).experimental_distribute_dataset(source(BATCHES)) for source in (Plain, Asynchronous))
    assert [lists(batch) for batch in plain] == PARTS
    iterator = iter(plain)
    assert [lists(await anext(iterator)), lists(next(iterator))] == PARTS
    assert next(iterator, None) is None
    with pytest.raises(TypeError, match="async for batch in dataset"):
        iter(waiting)
    with pytest.raises(TypeError, match=r"await anext\(iterator\)"):
        next(aiter(waiting))


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
