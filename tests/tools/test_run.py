"""`aiodist run` ends in every case, with the right exit code, and leaves no process."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiodist._arrays.environment import with_workers
from aiodist._tools.launch import mpi_launcher, worker_agent
from aiodist._tools.usage import UsageError
from tests.tools.command import environment, exit_code
from tests.tools.jobs import LIMIT_SECONDS, Job, Jobs

PROGRAM = str(Path(__file__).with_name("endings.py"))
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at as Linux shows them"),
]


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    started = Jobs()
    yield started
    started.close()


def check_that_it_ends(job: Job, code: int) -> None:
    ended, _ = job.end()
    assert ended == code, job.output
    assert job.left() == []


@pytest.mark.parametrize(
    ("workers", "program", "code"),
    [("1", [PROGRAM], 3), ("2", [PROGRAM], 0), ("2", ["-m", "tests.tools.endings"], 3)],
)
def test_exit_code_and_arguments_are_passed_on(jobs: Jobs, workers: str, program: list[str], code: int) -> None:
    words = ["-m", "two words", "it's", '"', "$HOME", "*"]
    job = jobs.start(["-n", workers, *program, "exit", str(code), *words])
    check_that_it_ends(job, code)
    assert job.output.count(str((str(code), *words))) == int(workers)


def test_child_that_was_there_before_the_job_outlives_it(tmp_path: Path) -> None:
    script = 'sleep 60 >/dev/null 2>&1 & echo "older $!"; exec "$0" -m aiodist run -n 1 "$1" exit 0'
    run = ["/bin/sh", "-c", script, sys.executable, PROGRAM]
    output = subprocess.check_output(run, env=environment(), text=True, timeout=LIMIT_SECONDS, cwd=tmp_path)
    older = int(output.split()[1])
    assert worker_agent.state_of(older) == "S"
    os.kill(older, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGKILL", -signal.SIGKILL)]
)
def test_launcher_that_is_told_to_end(jobs: Jobs, name: str, code: int) -> None:
    job = jobs.start(["-n", "2", PROGRAM, "orderly"])
    job.workers(2)
    job.process.send_signal(signal.Signals[name])
    check_that_it_ends(job, code)
    assert job.output.count("tidied up") == (0 if name == "SIGKILL" else 2)
    assert "Traceback" not in job.output


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGKILL", 137)])
def test_agent_or_worker_that_is_told_to_end(jobs: Jobs, name: str, code: int) -> None:
    started = [jobs.start(["-n", "1", PROGRAM, "sleep"]) for _ in range(2)]
    for job, whom in zip(started, (0, 1), strict=True):
        os.kill(job.workers(1)[0][whom], signal.Signals[name])
    for job in started:
        check_that_it_ends(job, code)


def test_workers_that_do_not_end_by_themselves(jobs: Jobs, tmp_path: Path) -> None:
    """Jobs that take some seconds each, all at once: one fails, one ignores signals, one has its agent stopped."""
    failing = jobs.start(["-n", "2", PROGRAM, "one exits", "3", str(tmp_path / "first")])
    stubborn = jobs.start(["-n", "2", PROGRAM, "stubborn"])
    stopped = jobs.start(["-n", "2", PROGRAM, "sleep"])
    stubborn.workers(2)
    stubborn.process.send_signal(signal.SIGTERM)
    agent, worker = stopped.workers(2)[0]
    os.kill(agent, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    check_that_it_ends(failing, 3)
    check_that_it_ends(stubborn, 143)
    check_that_it_ends(stopped, 137)


def test_second_interruption_ends_it_at_once(jobs: Jobs) -> None:
    job = jobs.start(["-n", "1", PROGRAM, "stubborn"])
    job.workers(1)
    job.process.send_signal(signal.SIGINT)
    job.read_until("no end")
    job.process.send_signal(signal.SIGINT)
    check_that_it_ends(job, 130)


@pytest.mark.parametrize(
    ("where", "what", "told"),
    [
        ([], "one has no strategy", "without making a MultiWorkerMirroredStrategy, and 1 other waits for it there"),
        (
            ["--hosts", "localhost"],
            "one has no second strategy",
            "after making 1 MultiWorkerMirroredStrategy, and 1 other waits for it to make the next",
        ),
    ],
)
def test_worker_that_ends_before_it_has_met_the_others(
    jobs: Jobs, tmp_path: Path, where: list[str], what: str, told: str
) -> None:
    job = jobs.start(["-n", "2", *where, PROGRAM, what, str(tmp_path / "first")])
    check_that_it_ends(job, 1)
    assert f"has ended {told}" in job.output


def test_killed_workers_leave_no_file(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(["-n", "2", PROGRAM, "has memory"], TMPDIR=str(tmp_path))
    job.read_until("all told", 2)
    memory = {Path(path) for path in re.findall(r"memory (\S+)", job.output)}
    assert any(path.exists() for path in memory)
    job.process.send_signal(signal.SIGTERM)
    check_that_it_ends(job, 143)
    assert [path for path in memory if path.exists()] == []
    assert list(tmp_path.iterdir()) == []


def test_children_of_workers_are_no_workers(jobs: Jobs) -> None:
    job = jobs.start(["-n", "2", PROGRAM, "has children"])
    check_that_it_ends(job, 0)
    assert len(re.findall(r"child: .*was started by a worker of the job .*, and is none itself", job.output)) == 2


def test_closed_output_hinders_nobody_and_processes_that_a_worker_leaves_are_ended(jobs: Jobs) -> None:
    closed = ["sh", "-c", 'exec "$@" <&- >&-', "sh"]
    check_that_it_ends(jobs.start(["-n", "2", PROGRAM, "child", "0"], before=closed), 0)


def test_reader_that_goes_away_ends_the_job(jobs: Jobs) -> None:
    job = jobs.start(["-n", "2", PROGRAM, "flood"])
    job.workers(2)
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(LIMIT_SECONDS) != 0
    assert job.left() == []


def test_launcher_of_another_mpi_is_told_apart_by_the_size(jobs: Jobs, tmp_path: Path) -> None:
    launcher = tmp_path / "mpi exec"
    launcher.write_text("""#!/bin/sh
        if [ "$1" = --version ]; then echo HYDRA; exit; fi
        shift 2
        "$@" & "$@" & wait""")
    launcher.chmod(0o755)
    program = tmp_path / "a program.py"
    program.write_text("from aiodist import MultiWorkerMirroredStrategy\nMultiWorkerMirroredStrategy()")
    job = jobs.start(["-n", "2", "--launcher", str(launcher), str(program)])
    check_that_it_ends(job, 1)
    assert "the launcher has started 2 workers, and MPI" in job.output
    assert "knows of 1: they belong to different MPIs" in job.output


@pytest.mark.parametrize("terminal", [True, False])
def test_workers_whose_output_goes_to_a_file_are_given_no_colours(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Open MPI gives them a terminal all the same."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(closed=False, isatty=lambda: terminal))
    assert with_workers(notes="")["TERM"] == ("xterm" if terminal else "dumb")


@pytest.mark.parametrize("text", ["exit 0", "echo something else", "exec sleep"])
def test_launcher_that_is_none(tmp_path: Path, text: str) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text(f"#!/bin/sh\n{text}")
    launcher.chmod(0o755)
    with pytest.raises(UsageError, match="is neither MPICH's nor Open MPI's"):
        mpi_launcher.flavour_of(str(launcher))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-n", "2", "--launcher", "nonesuch", PROGRAM], "there is no launcher 'nonesuch'; install an MPI"),
        (["-n", "2", "nonesuch.py"], "there is no file 'nonesuch.py'; -m takes the name of a module"),
        (["-n", "2", "-m", "nonesuch.train"], "there is no module 'nonesuch.train'; a file is run without -m"),
        (["-n", "2", "-"], "a program from standard input would reach the first worker alone; write it to a file"),
        (
            ["-n", "2", "--hosts", "a:2,fd00::1", PROGRAM],
            "no numbers of IPv6 for machines, got fd00::1: give",
        ),
        (["-n", "2", "-m", PROGRAM], "a file is run without -m"),
        (["-n", "0", PROGRAM], "expected a whole number from 1 on, got '0'"),
        (["-n", "2", "--hosts", "a,,b", PROGRAM], "expected names separated by commas, got 'a,,b'"),
    ],
)
def test_bad_usage_says_what_to_do(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("run", *arguments) == 2
    assert told in capsys.readouterr().err
