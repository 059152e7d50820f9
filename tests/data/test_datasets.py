"""Datasets: distributed ones, those of arrays in memory, and prefetching."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

import aiodist
from aiodist import (
    DistributedDataset,
    IndexedSlices,
    InputContext,
    NumpyDataset,
    PerReplica,
    ReplicaContext,
    ReplicaContextError,
    ValueContext,
)
from aiodist._data.prefetch import Prefetched
from tests.collectives.kinds_of_values import Pair
from tests.runtime.programs import mirrored
from tests.workers.simulated import Job

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
    """An async iterable that can be iterated again; its iterators are not generators, and wait before each batch."""

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


# Distributed datasets.


class Rows:
    """Another library's array as far as a dataset needs it: a shape, and slices along the first axis."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.shape = rows, (len(rows),)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.rows[rows])


@given(st.integers(0, 40), st.integers(2, 12))
def test_parts_of_a_batch_are_consecutive_and_full_until_the_rows_run_out(m: int, n: int) -> None:
    batch: Any = {"x": [np.arange(2 * m).reshape(m, 2)], "y": Pair(np.arange(m), None), "z": Rows([*range(m)])}
    (parts,), full = mirrored(n).experimental_distribute_dataset([batch]), math.ceil(m / n)
    assert parts["y"].right is None
    y = lists(parts["y"].left)
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
def test_batch_that_cannot_be_cut_is_refused(n: int, batch: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        list(mirrored(n).experimental_distribute_dataset([batch]))


def test_batches_of_a_step_must_be_alike_and_only_arrays_complete_one() -> None:
    def steps(*batches: Any) -> list[Any]:
        return list(mirrored(2).distribute_datasets_from_function(lambda _: batches))

    assert steps("a", "a")[0].values == ("a", "a")
    with pytest.raises(TypeError, match=r"batch must be an array.* str"):
        steps("a")
    with pytest.raises(ValueError, match=r"batches must have the same structure: value\['x'\] is on replica 0"):
        steps({"x": np.arange(2)}, {"y": np.arange(2)})


@pytest.mark.parametrize("source", [Plain, Asynchronous, list, iter])
async def test_dataset_is_iterated_again_if_its_source_can_be(source: Callable[[Any], Any]) -> None:
    dataset = mirrored(2).experimental_distribute_dataset(source(BATCHES))
    assert isinstance(dataset, DistributedDataset)
    assert [lists(batch) for batch in await collected(dataset)] == PARTS
    assert [lists(batch) for batch in await collected(dataset)] == ([] if source is iter else PARTS)


async def test_plain_iteration_needs_a_plain_source() -> None:
    plain, waiting = (mirrored(2).experimental_distribute_dataset(source(BATCHES)) for source in (Plain, Asynchronous))
    assert [lists(batch) for batch in plain] == PARTS
    iterator = iter(plain)
    assert [lists(await anext(iterator)), lists(next(iterator))] == PARTS
    assert next(iterator, None) is None
    with pytest.raises(TypeError, match="async for batch in dataset"):
        iter(waiting)
    with pytest.raises(TypeError, match=r"await anext\(iterator\)"):
        next(aiter(waiting))


async def test_single_replica_gets_batches_bare() -> None:
    for strategy in (mirrored(1), aiodist.get_strategy()):
        assert await collected(strategy.experimental_distribute_dataset(BATCHES)) == BATCHES
        assert await collected(strategy.distribute_datasets_from_function(lambda _: BATCHES)) == BATCHES
        assert strategy.experimental_distribute_values_from_function(lambda ctx: ctx) == ValueContext(0, 1)


def broken(kind: type[BaseException]) -> Iterator[Any]:
    yield BATCHES[0]
    raise kind("disk")


async def broken_later(kind: type[BaseException]) -> AsyncIterator[Any]:
    for batch in broken(kind):
        yield batch


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("source", "step"), [(broken, anext), (broken_later, anext), (Prefetched, anext), (Prefetched, next)]
)
async def test_error_of_the_source_is_raised_once_in_its_place_with_its_traceback(
    source: Any, step: Callable[..., Any], kind: type[BaseException]
) -> None:
    distribute = mirrored(2).experimental_distribute_dataset
    iterator: Any = Prefetched(broken(kind), 5) if source is Prefetched else aiter(distribute(source(kind)))

    async def take() -> Any:
        return await anext(iterator, None) if step is anext else next(iterator, None)

    assert await take() is not None
    with pytest.raises(kind, match="disk") as caught:
        await take()
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert await take() is None


@pytest.mark.parametrize("step", [iter, aiter, next, anext])
async def test_iteration_inside_a_replica_is_refused(step: Callable[[Any], Any]) -> None:
    strategy = mirrored(2)
    dataset = strategy.experimental_distribute_dataset(BATCHES)
    subject = dataset if step in (iter, aiter) else iter(dataset)

    async def replica() -> Any:
        made = step(subject)
        return await made if step is anext else made

    with pytest.raises(ReplicaContextError, match=r"inside replica 0; each of its batches .*iterate outside"):
        await strategy.run(replica)


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
async def test_incomplete_last_step_is_completed_by_batches_without_rows(source: Callable[[Any], Any]) -> None:
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


async def test_plain_step_continues_a_cancelled_one() -> None:
    def batch(k: int) -> Any:
        scope.cancel()
        return np.full(1, 6 // k)

    iterator = iter(mirrored(2).distribute_datasets_from_function(lambda _: map(batch, [6, 3, 2, 0, 1])))
    with anyio.CancelScope() as scope:
        await anext(iterator)
    assert scope.cancelled_caught
    assert lists(next(iterator)) == [[1], [2]]
    with anyio.CancelScope() as scope:
        await anext(iterator)
    with pytest.raises(ZeroDivisionError):  # the step is lost
        next(iterator)
    assert lists(next(iterator)) == [[6], []]


async def test_aclose_closes_the_source() -> None:
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


async def test_dataset_iterated_in_the_merge_function_of_a_group_is_refused() -> None:
    job = Job(2, 1)
    first, second = (s.distribute_datasets_from_function(lambda _: BATCHES) for s in job.strategies)

    async def merge(strategy: Any) -> Any:
        return await anext(aiter(first if strategy is job.strategies[0] else second))

    async def program(ctx: ReplicaContext) -> Any:
        return await ctx.new_group([0, 2]).merge_call(merge) if ctx.replica_id_in_sync_group != 1 else None

    for outcome in await job.run(program):
        assert "an operation of all workers cannot be called in the merge function of the group" in str(outcome)


async def test_values_of_a_value_function_are_per_replica() -> None:
    strategy = mirrored(3)
    with strategy.scope():
        made = strategy.experimental_distribute_values_from_function(lambda each: {"c": each, "s": "x", "n": None})
    assert made["c"].values == tuple(ValueContext(k, 3) for k in range(3))
    assert (type(made["s"]), made["s"].values, made["n"]) == (PerReplica, ("x",) * 3, None)


# Datasets of arrays.


def dataset(size: int = 10) -> NumpyDataset:
    return mirrored(2).experimental_make_numpy_dataset(np.arange(size))


def values(of: NumpyDataset) -> list[Any]:
    return [element.tolist() for element in of]


def test_prefetch_before_batch_counts_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._data.dataset.Prefetched", lambda _, ahead: repeat(ahead))
    assert [next(iter(of)) for of in (dataset().prefetch(5).batch(2), dataset().batch(2).prefetch(5))] == [3, 5]


def test_elements_are_copies() -> None:
    source = np.zeros((4, 2))
    for of in (NumpyDataset(source), NumpyDataset(source).batch(2)):
        next(iter(of))[...] = 1
    assert source.tolist() == np.zeros((4, 2)).tolist()


def batched(elements: list[Any], n: int, drop: bool) -> list[Any]:
    """Return lists of n consecutive elements, all of one size."""
    found = [elements[k : k + n] for k in range(0, len(elements), n)]
    for batch in found:
        if len({np.shape(element) for element in batch}) > 1:
            raise ValueError("cannot be stacked")
    return [batch for batch in found if len(batch) == n or not drop]


STAGES = st.one_of(
    st.tuples(st.just("batch"), st.integers(1, 5), st.booleans()), st.tuples(st.just("repeat"), st.integers(1, 3))
)


@given(st.integers(1, 20), st.lists(STAGES, max_size=4))
def test_batch_and_repeat_agree_with_a_list(size: int, stages: list[Any]) -> None:
    made, wanted, text = dataset(size), list[Any](range(size)), None
    try:
        for stage, *arguments in stages:
            wanted = wanted * arguments[0] if stage == "repeat" else batched(wanted, *arguments)
    except ValueError as error:
        text = str(error)
    for stage, *arguments in stages:
        made = getattr(made, stage)(*arguments)
    if text is None:
        assert values(made) == wanted
    else:
        with pytest.raises(ValueError, match=text):
            values(made)


def test_shuffle_has_a_new_order_at_each_iteration_determined_by_the_seed() -> None:
    one, other = dataset(50).shuffle(7), dataset(50).shuffle(7)
    next(iter(one))  # elements left unread make no difference
    next(iter(other))
    first, second = values(one), values(one)
    assert first != second
    assert [values(other), values(other)] == [first, second]
    assert values(dataset(50).shuffle(8)) != values(dataset(50).shuffle(7)) == values(one.batch(50))[0]


def test_shuffle_with_repeat_and_batch_before_and_after_it() -> None:
    twice = values(dataset(50).shuffle(7).repeat(2))
    assert sorted(twice[:50]) == sorted(twice[50:])
    assert twice[:50] != twice[50:]
    mixed = values(dataset(50).repeat(2).shuffle(0))
    assert sorted(mixed) == sorted([*range(50)] * 2)
    assert len(set(mixed[:50])) < 50
    batches = values(dataset(50).batch(4).shuffle(0))
    assert batches != sorted(batches) == values(dataset(50).batch(4))


def test_endless_repeat_ends_only_without_elements() -> None:
    elements = iter(dataset(3).repeat())
    assert [next(elements) for _ in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert values(dataset(0).repeat()) == []
    assert values(dataset(3).batch(4, drop_remainder=True).repeat()) == []


# Prefetching.

LONG = 20.0


class Source:
    """Numbers with an event for each that has been made; before ``stop_at`` it waits for ``leave``."""

    def __init__(self, size: int, stop_at: int | None = None) -> None:
        self.size, self.stop_at = size, stop_at
        self.made = [threading.Event() for _ in range(size)]
        self.leave, self.ended = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        try:
            for k in range(self.size):
                assert k != self.stop_at or self.leave.wait(LONG)
                self.made[k].set()
                yield k
        finally:
            self.ended.set()


def await_released_threads() -> None:
    """Wait until no thread makes elements: released ones are renamed."""
    while any(thread.name.startswith("aiodist prefetch") for thread in threading.enumerate()):
        threading.Event().wait(0.001)


@given(st.integers(0, 20), st.integers(1, 8), st.integers(1, 8))
def test_prefetched_elements_are_the_same(size: int, n: int, ahead: int) -> None:
    def made() -> NumpyDataset:
        return NumpyDataset(np.arange(size)).shuffle(3).batch(n).repeat(2)

    expected = [batch.tolist() for batch in made()]
    elements = iter(made().prefetch(ahead))
    assert [batch.tolist() for batch in elements] == expected
    assert next(elements, None) is None
    await_released_threads()


def test_thread_is_ahead_by_the_given_number_of_elements() -> None:
    source = Source(20)
    elements = Prefetched(iter(source), 3)
    assert source.made[2].wait(LONG)
    for k in range(5):
        assert next(elements) == k
        assert source.made[k + 3].wait(LONG)
        assert not source.made[k + 4].is_set()
    elements.close()


def test_dropped_iterator_releases_its_thread_and_closes_the_source() -> None:
    source = Source(1000)
    for element in Prefetched(iter(source), 2):
        if element == 3:
            break
    gc.collect()
    # Without the interpreter lock, a generator is closed by the thread that made it, when that runs next.
    assert any(source.ended.wait(LONG / 1000) for _ in range(1000))
    assert not source.made[6].is_set()


async def test_cancelled_wait_loses_no_element() -> None:
    source = Source(3, stop_at=1)
    elements = Prefetched(iter(source), 2)
    assert await anext(elements) == 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, elements)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    source.leave.set()
    assert await collected(elements) == [1, 2]


async def test_aclose_of_a_distributed_iterator_releases_the_thread() -> None:
    strategy = mirrored(2)
    data = strategy.experimental_make_numpy_dataset(np.arange(100)).batch(2).repeat().prefetch(2)
    iterator = aiter(strategy.experimental_distribute_dataset(data))
    assert lists(await anext(iterator)) == [[0], [1]]
    await iterator.aclose()
    await_released_threads()
    assert await anext(iterator, None) is None


def test_exit_does_not_wait_for_elements() -> None:
    """The source never makes its second element, so a process that waited for its thread would not end."""
    program = """
import threading
from aiodist._data.prefetch import Prefetched
elements = Prefetched(map(lambda k: k or threading.Event().wait(), iter([1, 0])), 2)
print(next(elements))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "1\n"
