"""Workers on several machines, over TCP: network namespaces, where these are permitted, and an `ssh` that enters."""

from __future__ import annotations

import importlib.util
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.tools.jobs import Job, Jobs
from tests.workers.namespaces import Machines, machines, why_not

PROGRAM = str(Path(__file__).with_name("job.py"))
BOUND_SECONDS = 12
NOT_HERE = why_not()
pytestmark = [
    pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE)),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
]


class Lab:
    """Starts jobs, each on machines of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def start(self, count: int, *program: str) -> tuple[Machines, Job]:
        folder = self._folder / f"a folder {len(list(self._folder.iterdir()))}"
        folder.mkdir()
        mark = uuid.uuid4().hex
        made = self._stack.enter_context(machines(count, folder, f"AIODIST_MARK={mark}"))
        return made, self.again(made, mark, "-n", str(count), "--hosts", ",".join(made.numbers), *program)

    def again(self, made: Machines, mark: str, *arguments: str) -> Job:
        """Start a job on machines that there are."""
        jobs = Jobs()
        self._stack.callback(jobs.close)
        return jobs.start(arguments, before=made.enter, AIODIST_MARK=mark, **made.variables)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(tmp_path_factory.mktemp("machines"), stack)


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> Mapping[str, Job]:
    """All faults at once, since most of their time is waiting."""
    found = {kind: lab.start(2, PROGRAM, "fault", kind)[1] for kind in ("killed", "stopped", "holds the lock")}
    two, found["cut"] = lab.start(2, PROGRAM, "fault", "cut")
    three, found["cut between others"] = lab.start(3, PROGRAM, "fault", "cut between others")
    found["cut"].read_until("running", 2)
    two.cut(0, 1)
    found["cut between others"].read_until("running", 3)
    three.cut(1, 2)
    return found


def check_that_it_ends(job: Job, code: int) -> None:
    ended, seconds = job.end()
    assert ended == code, job.output
    assert seconds < BOUND_SECONDS
    assert job.left() == []


def check_what_is_told(job: Job, worker: int, what: str, seconds: float) -> None:
    told = re.search(rf"worker {worker} ([\d.]+) (.*)", job.output)
    assert told, job.output
    assert what in told[2]
    assert float(told[1]) < seconds


FAULTS = {
    "killed": (137, "WorkerLostError 'worker 1 of 2 has died", 5.0),
    "stopped": (1, "WorkerLostError 'worker 1 of 2 is stopped: the system has halted its process", 8.0),
    "cut": (1, "WorkerLostError 'worker 1 of 2 is cut off: its machine has not answered for 2 s", 12.0),
}
"""What befalls the second of two workers: the job's exit code, what the first worker tells, and within what seconds."""


def check_fault(jobs: Mapping[str, Job], fault: str) -> None:
    code, told, seconds = FAULTS[fault]
    check_that_it_ends(jobs[fault], code)
    check_what_is_told(jobs[fault], 0, told, seconds)


def test_arguments_variables_and_exit_codes_reach_all_machines(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "7.5")
    program = tmp_path / "a program.py"
    program.write_text(
        "import os, platform, sys; print(f\"{sys.argv[1:]} {os.environ['AIODIST_STALL_SECONDS']} {platform.node()}\")"
    )
    made, job = lab.start(2, str(program), "two words", "it's", "$HOME")
    check_that_it_ends(job, 0)
    words = str(["two words", "it's", "$HOME"])
    for k in (1, 2):
        assert f"{words} 7.5 {made.prefix}{k}" in job.output


@pytest.mark.parametrize("fault", FAULTS)
def test_worker_of_another_machine_that_is_lost(jobs: Mapping[str, Job], fault: str) -> None:
    check_fault(jobs, fault)


def test_worker_that_holds_the_interpreter_lock_is_not_taken_for_stopped(jobs: Mapping[str, Job]) -> None:
    check_that_it_ends(jobs["holds the lock"], 0)


def test_link_that_the_first_worker_has_no_part_in_is_cut(jobs: Mapping[str, Job]) -> None:
    check_that_it_ends(jobs["cut between others"], 1)
    told = "WorkerLostError 'workers 1 and 2 of 3 are cut off from each other, though the first worker reaches both"
    for worker in range(3):
        check_what_is_told(jobs["cut between others"], worker, told, 12)
