"""gloo's workers on several machines, started over ssh; see `namespaces`."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.tools.jobs import Job
from tests.workers.namespaces import why_not
from tests.workers.test_machines import FAULTS, PROGRAM, Lab, check_fault, check_that_it_ends

NOT_HERE = why_not()
pytestmark = [
    pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE)),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]
GLOO = ("--engine", "gloo")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(tmp_path_factory.mktemp("machines of gloo"), stack)


@pytest.fixture(scope="module")
def jobs(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Job]:
    """All at once, since most of their time is waiting."""
    program = tmp_path_factory.mktemp("programs") / "a program.py"
    program.write_text(
        "import os, platform, sys\n"
        "if os.environ['AIODIST_RANK'] == '0': print('read', sys.stdin.read(), flush=True)\n"
        "print(sys.argv[1:], os.environ['AIODIST_STALL_SECONDS'], platform.node(), os.getcwd(), flush=True)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIODIST_STALL_SECONDS", "7.5")
        found = {"words": lab.start(2, *GLOO, str(program), "two words", "it's", "$HOME")[1]}
    found |= {kind: lab.start(2, *GLOO, PROGRAM, "fault", kind)[1] for kind in ("killed", "stopped")}
    two, found["cut"] = lab.start(2, *GLOO, PROGRAM, "fault", "cut")
    found["cut"].read_until("running", 2)
    two.cut(0, 1)
    return found


def test_arguments_variables_and_folder_reach_all_machines(jobs: Mapping[str, Job]) -> None:
    check_that_it_ends(jobs["words"], 0)
    words = str(["two words", "it's", "$HOME"])
    lines = [line for line in jobs["words"].output.splitlines() if line.startswith(f"{words} 7.5 ad")]
    assert len(lines) == 2
    assert {line.removeprefix(words).split()[2] for line in lines} == {str(Path.cwd())}


@pytest.mark.parametrize("fault", FAULTS)
def test_worker_of_another_machine_that_is_lost(jobs: Mapping[str, Job], fault: str) -> None:
    check_fault(jobs, fault)


def test_machine_that_ssh_does_not_reach(lab: Lab) -> None:
    made, job = lab.start(1, *GLOO, "--hosts", "10.213.0.254", PROGRAM, "values")
    check_that_it_ends(job, 2)
    assert "the first worker cannot start on 10.213.0.254: " in job.output
    mark = uuid.uuid4().hex
    job = lab.again(made, mark, "-n", "2", "--hosts", f"{made.numbers[0]},10.213.0.254", *GLOO, PROGRAM, "values")
    check_that_it_ends(job, 255)
    assert "Error: worker 1 has not started on 10.213.0.254, or is lost: ssh has failed" in job.output
