"""Several workers agree on every collective, or all raise what one machine would: in any order of events."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aiodist._core.errors import WorkerLostError
from aiodist._workers.engines.simulated import SimulatedCluster
from aiodist._workers.record import MOST_IN_FULL, RecordBuffers
from tests.workers.plain import Op, PlainJob, Program, on_one_machine

LAYOUTS = [(1, 1), (2, 1), (1, 2, 1), (1, 1, 1, 1)]
SEEDS = range(25)
each_layout = pytest.mark.parametrize("counts", LAYOUTS, ids=str)


def outcomes(counts: tuple[int, ...], program: Program, seed: int) -> list[Any]:
    job = PlainJob(counts, program, seed)
    job.go()
    assert job.over, "a worker waits for ever"
    return [run.error if run.error is not None else run.results for run in job.runs]


def together(found: Sequence[Any]) -> dict[int, list]:
    return {i: values for each in found for i, values in each.items()}


def check(counts: tuple[int, ...], program: Program, seed: int) -> None:
    """Compare what several workers make of a program with what one machine does."""
    right = on_one_machine(sum(counts), program, seed)
    found = outcomes(counts, program, seed)
    if right.error is None:
        results = together(found)
        assert results == right.results
        return
    expected = right.error.report
    for each in found:
        assert type(each) is type(right.error), (each, right.error)
        report = each.report
        assert (report.reason, report.sequence_number, set(report.suspects)) == (
            expected.reason,
            expected.sequence_number,
            set(expected.suspects),
        ), f"{report}\n{expected}"
    assert len({str(each) for each in found}) == 1


def alike(draw: random.Random, replicas: int) -> list[list[Op]]:
    """Return a program in which all replicas make the same calls."""
    ops = [
        Op(draw.choice(["call", "call", "issue"]), line, draw.choice(["all_reduce", "barrier", "merge_call"]))
        for line in range(1, draw.randint(2, 8))
    ]
    return [list(ops) for _ in range(replicas)]


def grouped(draw: random.Random, replicas: int) -> list[list[Op]]:
    """Return a program of groups, each with calls that its members make in one order, all drawn."""
    groups = [tuple(sorted(draw.sample(range(replicas), draw.randint(1, replicas)))) for _ in range(2)]
    program: list[list[Op]] = [[] for _ in range(replicas)]
    number = [1] * replicas
    places: list[dict[int, int]] = [{}, {}]
    for index, ranks in enumerate(groups):
        for rank in ranks:
            program[rank].append(Op("group", 10 + index, ranks=ranks))
            places[index][rank] = number[rank]
            number[rank] += 1
    for line in range(20, 20 + draw.randint(1, 6)):
        index = draw.randint(-1, 1)
        for rank in range(replicas) if index < 0 else groups[index]:
            program[rank].append(Op("call", line, group=0 if index < 0 else places[index][rank]))
    return program


def with_a_fault(draw: random.Random, program: list[list[Op]]) -> list[list[Op]]:
    """Return a program in which one replica does something else once."""
    program = [[op._replace(what="call") if op.what == "issue" else op for op in ops] for ops in program]
    faulty = draw.choice([ops for ops in program if any(op.what == "call" for op in ops)])
    calls = [at for at, op in enumerate(faulty) if op.what == "call"]
    at, other = draw.choice(calls), draw.choice(calls)
    match draw.choice(["skip", "add", "swap", "other", "leave"]):
        case "skip":
            del faulty[at]
        case "add":
            faulty.insert(at, Op("call", 90))
        case "swap":
            faulty[other], faulty[at] = faulty[at], faulty[other]
        case "other":
            faulty[at] = faulty[at]._replace(kind="all_gather")
        case "leave":
            del faulty[at:]
    return program


@each_layout
@pytest.mark.parametrize("make", [alike, grouped], ids=lambda make: make.__name__)
@pytest.mark.parametrize("faulty", [False, True], ids=["alike", "faulty"])
def test_programs_have_the_results_or_the_report_of_one_machine(
    counts: tuple[int, ...], make: Callable[..., list[list[Op]]], faulty: bool
) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        program = make(draw, sum(counts))
        check(counts, with_a_fault(draw, program) if faulty else program, seed)


@each_layout
def test_uneven_loops_with_a_join(counts: tuple[int, ...]) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        program = [
            [*(Op("call", 5) for _ in range(draw.randint(0, 4))), Op("join", 6), Op("call", 7)]
            for _ in range(sum(counts))
        ]
        right, found = on_one_machine(sum(counts), program, seed), outcomes(counts, program, seed)
        assert right.error is None
        results = together(found)
        for i, values in results.items():
            assert _without_last(values) == _without_last(right.results[i])
        assert len({v for values in results.values() for v in values if isinstance(v, tuple)}) == 1


@each_layout
def test_replica_that_raises_is_the_cause_elsewhere(counts: tuple[int, ...]) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        program = alike(draw, sum(counts))
        failing = draw.randrange(sum(counts))
        program[failing][draw.randrange(len(program[failing])) :] = [Op("raise", 50)]
        job = PlainJob(counts, program, seed)
        job.go()
        for run in job.runs:
            if not run.failures:
                assert run.error is not None
                assert "ValueError: bad batch" in str(run.error.__cause__)
                assert f"Replica {failing} raised ValueError: bad batch" in str(run.error)


@each_layout
@pytest.mark.parametrize("faulty", [False, True], ids=["alike", "faulty"])
def test_worker_that_dies_at_any_moment_ends_the_others_alike(counts: tuple[int, ...], faulty: bool) -> None:
    """Every survivor has the results, or the error that all others have: that a worker is lost, or the report."""
    for seed in SEEDS:
        draw = random.Random(seed)
        program = grouped(draw, sum(counts))
        if faulty:
            program[draw.randrange(len(program))].append(Op("call", 90))
        job = PlainJob(counts, program, seed)
        victim = draw.randrange(len(counts))
        job.go(kill=(victim, draw.randrange(80)))
        assert job.over, (seed, "a worker waits for ever")
        errors = [run.error for run in job.survivors if run.error is not None]
        assert len({str(error) for error in errors}) <= 1
        assert job.dead is not None or faulty or not errors
        for error in errors:
            if isinstance(error, WorkerLostError):
                assert error.report.suspects == tuple(job.layout.ids[victim])
            else:
                assert faulty


def test_more_workers_than_exchange_whole_records() -> None:
    n, seed = MOST_IN_FULL + 1, 1
    check((1,) * n, alike(random.Random(seed), n), seed)
    program = [[op._replace(what="call") for op in ops] for ops in alike(random.Random(seed), n)]
    del program[20][-1]
    check((1,) * n, program, seed)
    uneven = [[*(Op("call", 5) for _ in range(i % 3)), Op("join", 6), Op("call", 7)] for i in range(n)]
    assert all(isinstance(each, dict) for each in outcomes((1,) * n, uneven, seed))


def _without_last(values: list[Any]) -> list[Any]:
    return [value for value in values if not isinstance(value, tuple)]


def test_long_records_take_memory_only_where_they_are_used() -> None:
    """A program may make thousands of groups of two workers, and mostly its values are small.

    What NumPy allocates may be memory that has been used before, and is then written to at once; it tells tracemalloc.
    """
    communicator: Any = SimulatedCluster(2).communicators[0]
    communicator.record_bytes = 1 << 16
    tracemalloc.start()
    try:
        records = RecordBuffers(communicator)
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert records.payload.size > 65_000
    assert allocated < 32_768
