"""Real workers over the installed MPI, started by `aiodist run`: a few jobs with a time limit each."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tools.command import environment
from tests.workers.job import job

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")


def test_one_worker_needs_no_mpi_and_runs_the_same_program() -> None:
    code, output = job(1, "fault", "none")
    assert code == 0, output


Ended = Mapping[str, tuple[int, str]]
"""By kind of fault, the exit code and output of its job."""


@pytest.fixture(scope="module")
def faults() -> Ended:
    """Run the faults that end a job each in its own, the others in one; all at once, since most of it is waiting."""
    jobs: list[tuple[int, str]] = [
        (3, "fault killed"), (2, "fault stopped"), (2, "fault exits"), (3, "fault raises shape blocked"), (3, "stalls"),
    ]  # fmt: skip
    with ThreadPoolExecutor() as pool:
        ended = pool.map(lambda each: job(each[0], *each[1].split()), jobs)
        return {kind: outcome for (_, kinds), outcome in zip(jobs, ended, strict=True) for kind in kinds.split()}


@pytest.mark.parametrize(
    ("kind", "workers", "expected"),
    [
        ("killed", 3, "WorkerLostError 'worker 2 of 3 has died"),
        ("stopped", 2, "WorkerLostError 'worker 1 of 2 is stopped"),
        ("exits", 2, "IncompleteCollectiveError 'replica 1 ended without collective #1"),
        ("raises", 3, "IncompleteCollectiveError 'replica 2 ended without collective #1"),
        ("shape", 3, "CollectiveMismatchError 'replicas disagree at collective #1"),
        ("blocked", 3, "CollectiveTimeoutError 'collective #1 timed out after 0.5 s: replica 2 has not arrived"),
    ],
)
def test_fault_is_reported_by_all_and_ends_the_job(faults: Ended, kind: str, workers: int, expected: str) -> None:
    code, output = faults[kind]
    assert code != 0
    for worker in range(workers - 1):
        told = re.search(rf"{kind}: worker {worker} (.*)", output)
        assert told, output
        assert expected in told[1].replace('"', "'"), output
        if kind == "blocked":
            assert re.search(r"Worker 2: its event loop has been silent for [\d.]+ s: something blocks it", told[1])
            assert re.search(r"job\.py\", line \d+, in go_wrong\\n +time\.sleep\(3\)", told[1])


def test_late_worker_is_named_in_the_others_warnings_and_the_report_is_shown_once(faults: Ended) -> None:
    code, output = faults["stalls"]
    assert code == 1, output
    for worker in (0, 1):
        told = "\n".join(re.findall(rf"\[{worker}\] (.*)", output))
        assert re.search(  # on a busy machine another worker may be missing, too
            r"StallWarning: .* to make a strategy at .*; .*worker 2 \(process \d+ on .*\) has not arrived", told
        )
        assert re.search(r"job\.py:\d+: StallWarning: worker 2 of 3, process \d+ on .*: its event loop has been", told)
        assert re.search(r"job\.py\", line \d+, in replica\n +time\.sleep\(2\)", told)
        waits = rf"StallWarning: worker {worker} of 3 has waited 0\.5 s .* to come to strategy\.reduce\(SUM"
        assert re.search(waits, told)
    assert output.count("> replica 2") == 1
    for worker in (1, 2):
        brief = f"CollectiveMismatchError: replicas disagree at collective #0 (worker {worker}; worker 0 shows more)"
        assert f"[{worker}] {brief}" in output


def test_lost_worker_is_shown_once_and_the_launcher_of_mpi_adds_nothing(faults: Ended) -> None:
    output = faults["killed"][1]
    told = r"WorkerLostError: worker 2 of 3 has died: .*"
    assert re.findall(rf"^\[(\d)\] (?:aiodist\.)?{told}", output, re.MULTILINE) in (["0", "1"], ["1", "0"])
    assert re.search(rf"^\[1\] {told} \(worker 1; worker 0 shows more\)$", output, re.MULTILINE), output
    assert all("BAD TERMINATION" not in output for _, output in faults.values())


def test_exit_code_is_that_of_the_worker_that_made_the_others_fail(faults: Ended) -> None:
    assert faults["exits"][0] == 5
    assert faults["killed"][0] == 128 + signal.SIGKILL


def test_groups_and_joins_over_mpi_and_a_job_that_has_caught_its_errors_ends_well() -> None:
    code, output = job(3, "groups")
    assert code == 0, output
    found = dict(re.findall(r"replica (\d): (.*)", output))
    assert len(found) == 6, output
    assert found["1"].startswith("[11, 110, 1010, 10010, 100010, 13, ")
    assert found["5"].endswith(", 101010, 101000, 100000, 2, 5, 4, 3, 2, 1, 5]")
    assert len(re.findall("cycle replicas 0 and 5 wait for each other, each in another group", output)) == 3
    assert len(re.findall(r"again \[6\.\]", output)) == 3
    assert len(re.findall(r"worker \d caught it", output)) == 6


def ended(program: str) -> tuple[int, str]:
    """Run a program in a process of its own; return its exit code, and what it printed."""
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=60)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux shows which signals a process handles")
def test_crashed_worker_ends_for_mpi_does_not_handle_the_signals_of_crashes() -> None:
    """Open MPI's handlers allocate memory, and would hang after a crash in the allocator."""
    program = (
        "from aiodist._workers.engines import mpi; mpi.load_mpi()\n"
        "caught = next(line for line in open('/proc/self/status') if line.startswith('SigCgt'))\n"
        "print([number for number in (6, 7, 8, 11) if int(caught.split()[1], 16) >> (number - 1) & 1])\n"
    )
    assert ended(program) == (0, "[]\n")


OWN = """
import asyncio, mpi4py
mpi4py.rc.initialize = False
import aiodist
def told(communicator):
    try:
        strategy = aiodist.MultiWorkerMirroredStrategy(communicator=communicator)
        return asyncio.run(strategy.reduce("SUM", 3, None))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
print(told("world"))
from mpi4py import MPI
print(told(MPI.COMM_NULL))
assert MPI.Is_initialized()
freed = MPI.COMM_SELF.Dup()
freed.Free()
for communicator in (freed, MPI.COMM_SELF, MPI.COMM_SELF.Get_group()):
    print(told(communicator))
MPI.Finalize()
print(told(MPI.COMM_SELF))
"""


def test_communicators_of_the_programs_own_and_what_are_none() -> None:
    code, output = ended(OWN)
    assert code == 0, output
    text, null, freed, own, group, late = output.splitlines()
    assert text.startswith("TypeError: communicator must be an mpi4py.MPI.Intracomm, or None for all workers that")
    assert text.endswith("got builtins.str: 'world'")
    assert null == freed
    assert null.startswith("ValueError: expected an intracommunicator that this process is in, got MPI.COMM_NULL")
    assert own == "3"
    assert group.startswith("TypeError: communicator must be an mpi4py.MPI.Intracomm")
    assert late.startswith("RuntimeError: the program has called MPI.Finalize already")
