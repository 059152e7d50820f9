"""The benchmarks, which run by hand and seldom, still work: their parts are tried in small.

The programs of `training` are tried in tests/demos.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest

from aiodist_kernels import reduce
from tests.faults.test_faults import FAULTS
from tests.project.paths import ROOT


def collectives(bench: Any) -> None:
    assert all(bench.seconds(program, 2, 3) > 0 for program in bench.PROGRAMS.values())
    assert all(bench.seconds_without(barrier, 2, 3) > 0 for barrier in (bench.BareRendezvous, asyncio.Barrier))


def cpu_reductions(bench: Any) -> None:
    buffers = bench.random_buffers(3, 4096, bench.SINGLE)
    assert bench.chain(buffers).tolist() == reduce(bench.SUM, buffers).tolist()
    assert all(took > 0 for times in asyncio.run(bench.whole_calls(4096, 2)) for took in times)


def cuda_reductions(bench: Any) -> None:
    cases = bench.cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {bench.random_values(0, (5,), case.dtype).dtype for case in cases} == {case.dtype for case in cases}


def faults(bench: Any) -> None:
    assert bench.rows_of(FAULTS[:1], with_torch=False)[2].endswith("| call_site, 2, line |")


def timing(bench: Any) -> None:
    numbers = iter([1.0, 2.0, 2.0, 8.0])
    found = bench.in_turn({"base": lambda: next(numbers), "other": lambda: next(numbers)}, 2)
    assert (found, bench.ratio(found, "other", "base")) == ({"base": [1, 2], "other": [2, 8]}, 3)
    assert bench.table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |"]
    assert [bench.in_units(n) for n in (3, 2048, 3 << 19)] == ["3 B", "2 KiB", "1.5 MiB"]
    assert bench.best({"nothing": lambda: None}, 0)["nothing"] >= 0


TRIALS = {each.__name__: each for each in (collectives, cpu_reductions, cuda_reductions, faults, timing)}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "tests" / "benchmarks").glob("*.py")))
def test_benchmark_works(name: str) -> None:
    bench = importlib.import_module(f"tests.benchmarks.{name}")
    TRIALS.get(name, bool)(bench)
