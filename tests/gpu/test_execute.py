"""Reductions on one or several devices: right bits in any order of streams, without blocking the host."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist._gpu import steps
from aiodist._gpu.enqueue import Queue
from aiodist._gpu.steps import Copy, Job, Launch, Place, StreamBarrier
from aiodist_kernels import ReduceOp
from aiodist_kernels.cuda.forms import Leaf, copying
from aiodist_kernels.rules import rule_for
from tests.gpu.fake_driver import FakeDriver, placed
from tests.gpu.problem import POISON, Problem
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits

DTYPES = [np.dtype(np.float32), BFLOAT16, np.dtype(np.int16), np.dtype(np.complex64)]


def contributed(driver: FakeDriver, problem: Problem, streams: list[Any]) -> None:
    """Let the replicas' streams write their inputs, which are poisoned before."""
    for i, (memory, values) in enumerate(problem.inputs):
        memory.array[...] = POISON
        driver.enqueue(streams[i % len(streams)], partial(np.copyto, memory.array, np.frombuffer(values, np.uint8)))


def used(driver: FakeDriver, problem: Problem, streams: list[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Let the replicas' streams read their results, and then overwrite their inputs; return what they read."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def see(memory: Any, wanted: np.ndarray) -> None:
        seen.append((memory.array.copy().view(wanted.dtype), wanted))

    for i, (memory, wanted) in enumerate(problem.results):
        driver.enqueue(streams[i % len(streams)], partial(see, memory, wanted))
    for i, (memory, _) in enumerate(problem.inputs):
        driver.enqueue(streams[i % len(streams)], partial(memory.array.fill, POISON))
    return seen


def made(driver: FakeDriver, devices: list[int], sizes: list[int]) -> Problem:
    return Problem(partial(placed, driver), ReduceOp.SUM, DTYPES[0], devices, sizes)


@settings(max_examples=150)
@given(
    seed=arrays.seeds,
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN]),
    dtype=st.sampled_from(DTYPES),
    devices=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    sizes=st.lists(st.sampled_from([0, 1, 7, 1024, 5000]), min_size=1, max_size=4),
    walls=st.sets(st.sampled_from([frozenset({0, 1}), frozenset({1, 2})])),
    shards=st.booleans(),
    times=st.integers(1, 2),
)
def test_bits_in_any_order_of_streams(
    seed: int,
    op: ReduceOp,
    dtype: np.dtype,
    devices: list[int],
    sizes: list[int],
    walls: set[frozenset[int]],
    *,
    shards: bool,
    times: int,
) -> None:
    driver = FakeDriver(seed, walls)
    problem, queue = Problem(partial(placed, driver), op, dtype, devices, sizes), Queue(driver)
    streams = [driver.stream(device, f"GPU:{i}") for i, device in enumerate(devices)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "SHARD_FROM", 0 if shards else 1 << 60)
        for _ in range(times):
            contributed(driver, problem, streams)
            completion = problem.run(queue, streams)
            assert driver.host_waits == 0
            assert not completion.is_done()
            assert not driver.entered
            seen = used(driver, problem, streams)
            driver.drain()
            assert completion.is_done()
            assert len(seen) == len(problem.results)
            for got, wanted in seen:
                assert_same_bits(got, wanted)


def test_memory_lives_until_the_work_is_done() -> None:
    driver = FakeDriver(3, {frozenset({0, 1})})
    problem = made(driver, [0, 1, 1], [500, 20])
    results = problem.results
    completion = problem.run(Queue(driver), [("s", 0)])
    del problem
    gc.collect()
    completion.wait()
    for output, wanted in results:
        assert_same_bits(output.array.view(wanted.dtype), wanted)


@pytest.mark.parametrize("walls", [set(), {frozenset({0, 1})}], ids=["peers", "no peers"])
def test_schedule_without_scratch_memory_is_cached_with_addresses(walls: set[frozenset[int]]) -> None:
    driver = FakeDriver(5, walls)
    problem, queue = made(driver, [0, 0, 0, 0, 1], [10, 20]), Queue(driver)
    for _ in range(3):
        problem.run(queue, [("s", 0)]).wait()
    assert len(queue._bound) == (0 if walls else 1)
    uploads = [entry[0] for entry in driver.log].count("upload")
    assert uploads == (2 * (1 + 3) if walls else 3 * 2), "heads and rows, of sums and of copies"


# Plans: kernels and copies by device, scratch memory, and the bytes that are copied.

LAUNCHES, FETCHES = [(Launch, k) for k in range(4)], [(Copy, k) for k in range(4) for _ in range(3)]


@pytest.mark.parametrize(
    ("devices", "results", "walls", "elements", "wanted", "scratch"),
    [
        ([0, 0, 0], None, [], 100, [(Launch, 0), (Copy, 0), (Copy, 0)], []),
        ([0] * 6, None, [], 100, [(Launch, 0), (Launch, 0)], []),
        ([0, 1, 1], None, [], 100, [(Launch, 0), (Launch, 1), (Copy, 1)], []),
        ([0, 1, 1], [2, 0], [], 100, [(Launch, 2), (Copy, 2)], []),
        ([1, 0, 2], None, [{0, 2}], 100, [(Launch, 1), (Copy, 1), (Copy, 1)], []),
        (
            [1, 0, 2],
            None,
            [{0, 1}, {1, 2}],
            100,
            [(Copy, 1), (Copy, 1), (Launch, 1), (Copy, 1), (Copy, 1)],
            [(1, 400), (1, 400)],
        ),
        ([0, 1, 2, 3], None, [], 1 << 20, [*LAUNCHES, (StreamBarrier, None), *FETCHES], []),
    ],
    ids=["one device", "many copies", "peers", "results elsewhere", "no peers, but of the first", "no peers", "large"],
)
def test_steps_of_a_reduction(
    devices: list[int],
    results: list[int] | None,
    walls: list[set[int]],
    elements: int,
    wanted: list[tuple[type, int | None]],
    scratch: list[tuple[int, int]],
) -> None:
    allocated: list[tuple[int, int]] = []

    def allocate(device: int, nbytes: int) -> int:
        allocated.append((device, nbytes))
        return len(allocated) << 50

    inputs = tuple(Place(device, 1 << 40 | i << 30) for i, device in enumerate(devices))
    outputs = tuple(Place(device, 1 << 41 | i << 30) for i, device in enumerate(results or devices))
    rule = rule_for(ReduceOp.SUM, DTYPES[0])
    job = Job(inputs, outputs, elements)
    found = steps.reduce_steps(rule, [job], lambda one, other: {one, other} not in walls, allocate)
    assert [(type(step), getattr(step, "device", None)) for step in found] == wanted
    assert allocated == scratch
    launches = [step for step in found if isinstance(step, Launch)]
    share = elements // 4 if elements > 100 else elements
    assert {leaf.elements for step in launches for leaf in step.leaves} == {share}
    assert {step.nbytes for step in found if isinstance(step, Copy)} <= {4 * share}
    if len(devices) == 6:
        copies = tuple([Leaf(place.address, (outputs[0].address,), elements) for place in outputs[1:]])
        assert launches[1] == Launch(0, copying(4), copies, 1)
