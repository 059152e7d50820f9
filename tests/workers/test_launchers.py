"""What workers read from launchers' variables, and the journal from which `aiodist run` learns of its workers."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist import MultiWorkerMirroredStrategy
from aiodist._arrays import environment
from aiodist._arrays.environment import Launched
from aiodist._workers import bootstrap
from aiodist._workers.bootstrap import check
from aiodist._workers.journal import Journal, noted_rendezvous

VARIABLES = ("AIODIST_WORKERS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE", "TF_CONFIG")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the launcher of the tests, if any."""
    for name in (*VARIABLES, "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "by", "workers", "rank"),
    [
        ("AIODIST_WORKERS=3 PMI_SIZE=3 PMI_RANK=2", "aiodist run", 3, 2),
        ("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1", "mpiexec", 4, 1),
        ("PMI_SIZE=4 PMI_RANK=3 SLURM_STEP_NUM_TASKS=1", "mpiexec", 4, 3),
        ("SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=5", "srun", 8, 5),
        ("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 WORLD_SIZE=8 RANK=6 TORCHELASTIC_RUN_ID=none", "torchrun", 8, 6),
        ("WORLD_SIZE=8 RANK=6 MASTER_ADDR=here", "torchrun", 8, 6),
    ],
)
def test_launcher_is_recognised_by_its_variables(
    variables: str, by: str, workers: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    found = environment.launched()
    assert found is not None
    assert (found.by, found.workers, found.rank) == (by, workers, rank)


@pytest.mark.parametrize("variables", ["", "WORLD_SIZE=4", "SLURM_NTASKS=4 SLURM_PROCID=0", "PMI_SIZE=many"])
def test_incomplete_variables_are_no_launcher(variables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert environment.launched() is None


def cluster(workers: int, index: int, task: str = "worker", **jobs: Any) -> str:
    """Return a value of TF_CONFIG."""
    spec = {"worker": [f"host{i}:80" for i in range(workers)], **jobs}
    return json.dumps({"cluster": spec, "task": {"type": task, "index": index}})


@pytest.mark.parametrize(
    ("by", "seen", "config", "expected"),
    [
        ("mpiexec", (0, 1), "", r"mpiexec has started 2 workers .* Type `aiodist run -n 2 program\.py`, which finds"),
        ("torchrun", (0, 1), "", r"torchrun has started 2 .*torchrun --nproc-per-node=2 program\.py"),
        (
            "srun",
            (0, 1),
            "",
            r"srun has .* Type srun --mpi=pmi2 for MPICH and srun --mpi=pmix for Open MPI .*`mpiexec -n 2",
        ),
        ("mpiexec", (0, 2), "", ""),
        (None, (0, 1), cluster(1, 0), ""),
        (
            None,
            (0, 1),
            cluster(3, 1),
            r"cluster of 3 workers, and no launcher has.* type `aiodist run -n 3 program\.py`",
        ),
        ("mpiexec", (0, 2), cluster(3, 0), "cluster of 3 workers, and mpiexec has started 2"),
        ("mpiexec", (1, 2), cluster(2, 1), ""),
        ("mpiexec", (1, 2), cluster(1, 0, chief=["host:80"]), ""),
        ("mpiexec", (0, 2), cluster(1, 0, "chief", chief=["host:80"]), ""),
        ("mpiexec", (0, 2), cluster(2, 1), "this process is worker 1, worker 1, and the launcher that it is worker 0"),
        (None, (0, 1), '{"cluster": {"worker": ["host:80"]}}', r"TF_CONFIG must be like \{\"cluster\""),
        (None, (0, 1), "[", "TF_CONFIG must be like"),
        (None, (0, 1), cluster(1, 0, chief="host:80"), "TF_CONFIG must be like.*lists of addresses"),
        (None, (0, 1), "{}", ""),
    ],
)
def test_engine_that_sees_other_workers_than_were_started_is_an_error_with_the_command_to_type(
    by: str | None, seen: tuple[int, int], config: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    launched = None if by is None else Launched(by, "SIZE", 2, seen[0])
    with pytest.raises((RuntimeError, ValueError), match=expected) if expected else nullcontext():
        found: Any = SimpleNamespace(library="MPICH 5.0.2", rank=seen[0], size=seen[1])
        check(found, launched)


def test_cluster_of_tf_config_is_the_resolvers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", cluster(1, 0, evaluator=["other:80"]))
    strategy = MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    assert (resolver.spec["worker"], resolver.task_type, resolver.task_id) == (("host0:80",), "worker", 0)
    monkeypatch.setenv("TF_CONFIG", cluster(2, 0))
    assert len(strategy.cluster_resolver.spec["worker"]) == 1
    with pytest.raises(RuntimeError, match="TF_CONFIG names a cluster of 2 workers"):
        MultiWorkerMirroredStrategy()


# The journal of a job.


def journal(folder: Path, *lines: str) -> Journal:
    (folder / "journal").write_text("".join(f"{line}\n" for line in lines))
    return Journal(str(folder))


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], 0),
        (["ended 7 0"], 0),
        (["ended 7 0", "ended 8 1"], 1),
        (["ended 7 0", "ended 8 1", "ended 10 5", "ended 9 6"], 5),
    ],
)
def test_exit_code_is_that_of_the_first_worker_to_fail_by_itself(tmp_path: Path, lines: list[str], code: int) -> None:
    assert journal(tmp_path, *lines).failure() == code


def test_workers_that_do_not_wait_are_missing_from_a_rendezvous(tmp_path: Path) -> None:
    started = "started 7 0", "started 8 1", "started 9 2"
    found = journal(tmp_path, *started, "waits 7 1", "waits 8 1", "waits 8 0", "ended 7 0", "ended 9 0")
    absent = r"; worker 1 \(process 8 on .*\) has not arrived, worker 2 \(process 9 on .*\) has ended"
    assert re.fullmatch(absent, found.missing())
    assert journal(tmp_path, "started 7 0", "waits 7 1").missing() == ""


@pytest.mark.parametrize("last", ["ended 8 0", "over 8 0"])
def test_worker_that_ends_without_making_a_strategy_is_an_error_of_the_others(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_LOOK_SECONDS", 0.0)
    journal(tmp_path, "started 7 0", "started 8 1", "waits 7 1", last)
    with pytest.raises(RuntimeError, match=r"worker 0 of 2 makes .*; worker 1 \(process 8 on .*\) has ended; every"):
        bootstrap._wait_for(iter([SimpleNamespace(test=lambda: False)]), "worker 0 of 2", str(tmp_path))  # type: ignore[arg-type]


def test_rendezvous_is_noted_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with noted_rendezvous():  # without a launcher there is no journal
        pass
    monkeypatch.setenv("AIODIST_NOTES", str(tmp_path))
    with noted_rendezvous():
        assert Journal(str(tmp_path)).waiting == {os.getpid()}
    assert Journal(str(tmp_path)).waiting == set()
