"""Reductions on one device and several: right bits in any order that streams and events allow, and no host waits."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist._gpu import steps
from aiodist._gpu.enqueue import Completion, Queue
from aiodist._gpu.schedule import Batch, Schedule, symbol
from aiodist._gpu.steps import Copy, Job, Launch, Meet, Move, Place, Together, whole
from aiodist_kernels import ReduceOp, reduce
from aiodist_kernels.cuda.forms import Leaf
from aiodist_kernels.rules import rule_for
from tests.gpu.fake_driver import POISON, FakeDriver, placed
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits

DTYPES = [np.dtype(np.float32), BFLOAT16, np.dtype(np.int16), np.dtype(np.complex64)]


class Problem:
    """Leaves of one dtype on devices, with a result for each replica, and what they must be."""

    def __init__(self, driver: FakeDriver, op: ReduceOp, dtype: np.dtype, devices: list[int], sizes: list[int]) -> None:
        self.rule = rule_for(op, dtype)
        self.jobs: list[Job] = []
        self.keeps: list[Any] = []
        self.results: list[tuple[Any, np.ndarray]] = []
        self.brought: list[tuple[Any, np.ndarray]] = []
        for leaf, size in enumerate(sizes):
            buffers = arrays.buffers(leaf, len(devices), (size,), dtype)
            wanted = reduce(op, buffers)
            inputs = [placed(driver, device, values) for device, values in zip(devices, buffers, strict=True)]
            outputs = [driver.allocate(device, wanted.nbytes) for device in devices]
            self.jobs.append(
                Job(
                    tuple(Place(d, m.address) for d, m in zip(devices, inputs, strict=True)),
                    tuple(Place(d, m.address) for d, m in zip(devices, outputs, strict=True)),
                    size,
                    dtype.itemsize,
                    wanted.itemsize,
                )
            )
            self.keeps += [*inputs, *outputs]
            self.results += [(output, wanted) for output in outputs]
            self.brought += [(memory, memory.array.copy()) for memory in inputs]
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []
        self.schedule: Schedule | None = None

    def bring(self, driver: FakeDriver, streams: list[Any]) -> None:
        """Let the replicas' streams write what they bring, which is not there before."""
        for i, (memory, values) in enumerate(self.brought):
            memory.array[...] = POISON
            driver.enqueue(streams[i % len(streams)], partial(np.copyto, memory.array, values))

    def use(self, driver: FakeDriver, streams: list[Any]) -> None:
        """Let the replicas' streams look at their results, and write to what they brought."""
        replicas = len(streams)
        for i, (output, wanted) in enumerate(self.results):
            driver.enqueue(streams[i % replicas], partial(self._see, output, wanted))
        for i, (memory, _) in enumerate(self.brought):
            driver.enqueue(streams[i % replicas], partial(memory.array.fill, POISON))

    def _see(self, output: Any, wanted: np.ndarray) -> None:
        self.seen.append((output.array.copy().view(wanted.dtype), wanted))

    def run(self, queue: Queue, streams: list[Any], keeps: list[Any]) -> Completion:
        """Enqueue it: the arrays by number, and where they begin."""
        if self.schedule is None:
            places = {place: symbol(i) for i, place in enumerate(self.places())}
            jobs = [
                job._replace(
                    inputs=tuple(Place(p.device, places[p]) for p in job.inputs),
                    outputs=tuple(Place(p.device, places[p]) for p in job.outputs),
                )
                for job in self.jobs
            ]
            self.schedule = queue.schedule([Batch(self.rule, jobs)], arrays=len(places))
        return queue.run(self.schedule, streams, keeps, tuple([place.address for place in self.places()]))

    def places(self) -> list[Place]:
        return [place for job in self.jobs for place in (*job.inputs, *job.outputs)]

    def check(self) -> None:
        for output, wanted in self.results:
            assert_same_bits(output.array.view(wanted.dtype), wanted)


@settings(max_examples=150)
@given(
    seed=arrays.seeds,
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN]),
    dtype=st.sampled_from(DTYPES),
    devices=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    sizes=st.lists(st.sampled_from([0, 1, 7, 1024, 5000]), min_size=1, max_size=4),
    walls=st.sets(st.sampled_from([frozenset({0, 1}), frozenset({1, 2})])),
    shards=st.booleans(),
)
def test_bits_in_any_order(
    seed: int,
    op: ReduceOp,
    dtype: np.dtype,
    devices: list[int],
    sizes: list[int],
    walls: set[frozenset[int]],
    *,
    shards: bool,
) -> None:
    driver = FakeDriver(seed, walls)
    problem = Problem(driver, op, dtype, devices, sizes)
    streams = [driver.replica_stream(f"GPU:{i}", device) for i, device in enumerate(devices)]
    problem.bring(driver, streams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "SHARD_FROM", 0 if shards else 1 << 60)
        completion = problem.run(Queue(driver), streams, list(problem.keeps))
    assert driver.host_waits == 0
    assert not completion.is_done()
    assert driver.entered == 0
    problem.use(driver, streams)
    driver.drain()
    assert completion.is_done()
    assert len(problem.seen) == len(problem.results)
    for got, wanted in problem.seen:
        assert_same_bits(got, wanted)


def test_replicas_streams_come_before_and_after() -> None:
    driver = FakeDriver()
    problem = Problem(driver, ReduceOp.SUM, DTYPES[0], [0, 1], [100])
    streams = [("replica", "GPU:0", 0), ("replica", "GPU:1", 1)]
    problem.run(Queue(driver), streams, [])
    names = [entry[:2] for entry in driver.log]
    first, last = names.index(("launch", 0)), max(i for i, name in enumerate(names) if name[0] == "launch")
    for stream in streams:
        assert names.index(("record", stream)) < first
        waits = [i for i, name in enumerate(names) if name == ("wait", stream)]
        assert len(waits) == 2, "one for each device, as each reads what every replica brought"
        assert min(waits) > last


def test_what_the_work_uses_lives_until_it_is_done() -> None:
    driver = FakeDriver(3, {frozenset({0, 1})})
    problem = Problem(driver, ReduceOp.SUM, DTYPES[0], [0, 1, 1], [500, 20])
    results = problem.results
    completion = problem.run(Queue(driver), [("s", 0)], problem.keeps)
    del problem
    gc.collect()
    completion.wait()
    for output, wanted in results:
        assert_same_bits(output.array.view(wanted.dtype), wanted)


def test_table_is_uploaded_once_for_the_same_leaves() -> None:
    driver = FakeDriver()
    problem = Problem(driver, ReduceOp.SUM, DTYPES[0], [0] * 5, [10, 20])
    queue = Queue(driver)
    for _ in range(3):
        problem.run(queue, [("s", 0)], problem.keeps).wait()
    assert [entry[0] for entry in driver.log].count("upload") == 2 * 2, "heads and rows, of sums and of copies"
    problem.check()


@pytest.mark.parametrize("walls", [set(), {frozenset({0, 1})}], ids=["peers", "no peers"])
def test_bits_of_the_second_time(walls: set[frozenset[int]]) -> None:
    driver = FakeDriver(5, walls)
    queue = Queue(driver)
    streams = [("replica", f"GPU:{i}", device) for i, device in enumerate([0, 1, 1])]
    problem = Problem(driver, ReduceOp.SUM, DTYPES[0], [0, 1, 1], [100, 20])
    for _ in range(3):
        problem.bring(driver, streams)
        completion = problem.run(queue, streams, list(problem.keeps))
        problem.use(driver, streams)
        driver.drain()
        assert completion.is_done()
    assert len(queue._bound) == (0 if walls else 1)
    assert len(problem.seen) == 18
    for got, wanted in problem.seen:
        assert_same_bits(got, wanted)


def test_other_rule_or_other_moves_of_the_same_memory_are_other_work() -> None:
    driver = FakeDriver()
    queue = Queue(driver)
    problem = Problem(driver, ReduceOp.SUM, DTYPES[0], [0, 0], [8])
    job = problem.jobs[0]
    out, other = (whole(place, (8,), 4) for place in job.outputs)
    ones = rule_for(ReduceOp.MAX, DTYPES[0])
    for rule, then in ((problem.rule, []), (ones, []), (ones, [Move(other, out)])):
        before = len(queue._bound)
        queue.run(queue.schedule([Batch(rule, [job])], then), [driver.stream(0)], problem.keeps).wait()
        assert len(queue._bound) == before + 1


def jobs_of(devices: list[int], elements: int, results: list[int] | None = None) -> list[Job]:
    inputs = tuple(Place(device, 1 << 40 | i << 30) for i, device in enumerate(devices))
    outputs = tuple(Place(device, 1 << 41 | i << 30) for i, device in enumerate(results or devices))
    return [Job(inputs, outputs, elements, 4, 4)]


def planned(jobs: list[Job], walls: list[set[int]] | None = None) -> tuple[list[steps.Step], list[tuple[int, int]]]:
    """Return the steps, and the scratch memory that they need."""
    allocated: list[tuple[int, int]] = []

    def allocate(device: int, nbytes: int) -> int:
        allocated.append((device, nbytes))
        return len(allocated) << 50

    return steps.reduce_steps(jobs, lambda one, other: {one, other} not in (walls or []), allocate), allocated


@pytest.mark.parametrize(
    ("devices", "results", "walls", "wanted", "scratch"),
    [
        ([0, 0, 0], None, [], [(Launch, 0), (Copy, 0), (Copy, 0)], []),
        ([0, 1, 1], None, [], [(Launch, 0), (Launch, 1), (Copy, 1)], []),
        ([0, 1, 1], [2, 0], [], [(Launch, 2), (Copy, 2)], []),
        ([1, 0, 2], None, [{0, 2}], [(Launch, 1), (Copy, 1), (Copy, 1)], []),
        (
            [1, 0, 2],
            None,
            [{0, 1}, {1, 2}],
            [(Copy, 1), (Copy, 1), (Launch, 1), (Copy, 1), (Copy, 1)],
            [(1, 400), (1, 400)],
        ),
    ],
    ids=["one device", "peers", "results elsewhere", "no peers, but of the first", "no peers"],
)
def test_plan_for_small_values(
    devices: list[int],
    results: list[int] | None,
    walls: list[set[int]],
    wanted: list[tuple[type, int]],
    scratch: list[tuple[int, int]],
) -> None:
    made, allocated = planned(jobs_of(devices, 100, results), walls)
    assert [(type(step), step.device) for step in made if not isinstance(step, Meet)] == wanted
    assert allocated == scratch


def test_plan_makes_one_launch_of_many_copies() -> None:
    jobs = jobs_of([0, 0, 0], 100) * 3
    (launch, together), _ = planned(jobs)
    assert isinstance(launch, Launch)
    assert isinstance(together, Together)
    out = jobs[0].outputs
    assert len(together.leaves) == 6
    assert together.leaves[:2] == tuple(Leaf(out[i].address, (out[0].address,), 100) for i in (1, 2))


def test_plan_for_large_values_shares_the_work() -> None:
    made, _ = planned(jobs_of([0, 1, 2, 3], 1 << 20))
    launches = [step for step in made if isinstance(step, Launch)]
    assert [leaf.elements for launch in launches for leaf in launch.leaves] == [1 << 18] * 4
    assert isinstance(made[4], Meet)
    copies = [step for step in made if isinstance(step, Copy)]
    assert len(copies) == 12
    assert sum(copy.nbytes for copy in copies) == 3 * 4 << 20
    assert all(copy.device == copy.target.device for copy in copies)
