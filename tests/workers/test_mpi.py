"""Real workers over the installed MPI, started by `aiodist run`: few jobs, each with a wall-clock limit."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.workers.launched import LIMIT_SECONDS, job, workers_left

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")


def test_one_worker_needs_no_mpi_and_runs_the_same_program() -> None:
    code, output, _ = job(1, "values")
    assert code == 0, output
    assert "digest" in output


@pytest.mark.parametrize(
    ("kind", "expected", "seconds"),
    [
        ("killed", "WorkerLostError 'worker 2 of 3 has died", 5),
        ("stopped", "WorkerLostError 'worker 2 of 3 is stopped", 8),
        ("raises", "IncompleteCollectiveError 'replica 2 ended without collective #1", 5),
        ("shape", "CollectiveMismatchError 'replicas disagree at collective #1", 5),
        ("blocked", "CollectiveTimeoutError 'collective #1 timed out after 0.5 s: replica 2 has not arrived", 6),
    ],
)
def test_fault_of_one_worker_is_told_by_all_others_and_the_job_ends(kind: str, expected: str, seconds: float) -> None:
    code, output, took = job(3, "fault", kind)
    assert code != 0
    for worker in (0, 1):
        told = re.search(rf"worker {worker} ([\d.]+) (.*)", output)
        assert told, output
        assert expected in told[2], output
        assert float(told[1]) < seconds
        if kind == "blocked":
            assert re.search(r"Worker 2: its event loop has been silent for [\d.]+ s: something blocks it", told[2])
            assert re.search(r"job\.py:\d+ in go_wrong    time\.sleep\(3\)", told[2])
    assert took < LIMIT_SECONDS
    assert workers_left() == []
