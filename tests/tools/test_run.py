"""`aiodist run` ends in every case, with the right exit code, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodist._tools import agent, launch
from tests.tools.command import environment, exit_code
from tests.tools.jobs import LIMIT_SECONDS, Jobs

PROGRAM = str(Path(__file__).with_name("endings.py"))
NEEDS_MPI = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    started = Jobs()
    yield started
    started.close()


@NEEDS_MPI
@pytest.mark.parametrize(("workers", "program"), [(1, [PROGRAM]), (2, ["-m", "tests.tools.endings"])])
def test_exit_code_arguments_and_whole_lines_of_output_are_forwarded(
    jobs: Jobs, workers: int, program: list[str]
) -> None:
    words = ["3", "-m", "--", "two words", "it's", '"', "$HOME", "*"]
    job = jobs.start(["-n", str(workers), *program, "ends", *words])
    assert job.end() == 3, job.output
    lines = [rf"worker \d+ of agent \d+ {re.escape(str(tuple(words)))}", "no newline"]
    if workers > 1:
        lines = [rf"\[{rank}\] {line}" for rank in range(workers) for line in lines]
    for line in lines:
        assert len(re.findall(f"^{line}$", job.output, re.MULTILINE)) == 1, job.output


def test_worker_has_ended_only_once_its_output_is_forwarded(tmp_path: Path) -> None:
    """Agents of failed workers end when all workers have ended, and then Open MPI kills the other agents."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=2).pid, 'x' * 200_000)"
    command = [sys.executable, agent.__file__, str(tmp_path), "2", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(PMI_RANK="1")) as process:
        assert process.stdout is not None
        child = process.stdout.read(100).split()[1].decode()
        while Path("/proc", child).exists():  # until the agent has seen the worker's end, and killed what it left
            continue
        journal = tmp_path / "journal"
        assert "ended" not in journal.read_text()  # as a pipe does not hold the line
        assert process.stdout.read().endswith(b"xx\n")
    assert "ended" in journal.read_text()


def test_child_process_older_than_the_job_outlives_it() -> None:
    script = 'sleep 60 >/dev/null 2>&1 & echo "older $!"; exec "$0" -m aiodist run -n 1 "$1" ends 0'
    run = ["/bin/sh", "-c", script, sys.executable, PROGRAM]
    output = subprocess.check_output(run, env=environment(), text=True, timeout=LIMIT_SECONDS)
    os.kill(int(output.split()[1]), signal.SIGKILL)  # which fails if it is gone


@NEEDS_MPI
@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), ("SIGHUP", 129), ("SIGQUIT", 131), ("SIGKILL", -signal.SIGKILL)]
)
def test_launcher_that_receives_a_signal_ends_the_job(jobs: Jobs, tmp_path: Path, name: str, code: int) -> None:
    job = jobs.start(["-n", "2", PROGRAM, "tidies_up"], TMPDIR=str(tmp_path))  # a killed one leaves a folder there
    job.workers(2)
    job.process.send_signal(signal.Signals[name])
    assert job.end() == code, job.output
    assert job.output.count("tidied up") == (0 if name == "SIGKILL" else 2)
    assert len(list(tmp_path.glob("aiodist-run-*"))) == len(list(tmp_path.iterdir())) == (name == "SIGKILL")
    assert "Traceback" not in job.output


def test_signal_to_an_agent_or_worker_and_a_second_ctrl_c_end_the_job_at_once(jobs: Jobs) -> None:
    agent, worker, launcher = (jobs.start(["-n", "1", PROGRAM, "is_stubborn"]) for _ in range(3))
    os.kill(worker.workers(1)[0][1], signal.SIGKILL)
    os.kill(agent.workers(1)[0][0], signal.SIGHUP)
    launcher.workers(1)
    launcher.process.send_signal(signal.SIGINT)
    launcher.read_until("no end")
    launcher.process.send_signal(signal.SIGINT)
    assert [job.end() for job in (worker, agent, launcher)] == [137, 137, 130]


@NEEDS_MPI
def test_workers_that_do_not_end_by_themselves_are_killed(jobs: Jobs, tmp_path: Path) -> None:
    """Three jobs that take some seconds each, at the same time."""
    failing = jobs.start(["-n", "2", PROGRAM, "one_ends", "3", str(tmp_path / "ends")])
    raising = jobs.start(["-n", "2", PROGRAM, "one_raises_while_another_spins", str(tmp_path / "raises")])
    stubborn = jobs.start(["-n", "2", PROGRAM, "is_stubborn"])
    stubborn.workers(2)
    stubborn.process.send_signal(signal.SIGTERM)
    assert [job.end() for job in (failing, raising, stubborn)] == [3, 1, 143]


@NEEDS_MPI
def test_killed_workers_leave_no_file(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(["-n", "2", PROGRAM, "has_memory"], TMPDIR=str(tmp_path))
    job.read_until("all printed", 2)
    memory = {Path(path) for path in re.findall(r"memory (\S+)", job.output)}
    assert any(path.exists() for path in memory)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 143, job.output
    assert [path for path in memory if path.exists()] == []
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_of_a_job_that_is_just_beginning_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers would wait forever for a file that is gone before all have mapped it."""
    begun = time.time()
    path, later = (Path(f"/dev/shm/mpich_shm_of_a_test_{uuid.uuid4().hex}") for _ in range(2))
    glob = Path.glob

    def glob_late(folder: Path, pattern: str) -> Iterator[Path]:
        if folder == Path("/proc"):
            later.write_bytes(bytes(1))  # while processes are examined
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", glob_late)
    try:
        with path.open("wb+") as file:
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            assert launch._leaked_memory(begun).isdisjoint({path, later})
            later.unlink()
            mapped = mmap.mmap(file.fileno(), 0)
        assert launch._leaked_memory(begun).isdisjoint({path, later})
        later.unlink()
        mapped.close()
        found = launch._leaked_memory(begun)
        assert path in found
        assert later not in found
    finally:
        path.unlink()
        later.unlink(missing_ok=True)


@NEEDS_MPI
def test_processes_left_by_a_worker_are_killed(jobs: Jobs) -> None:
    assert jobs.start(["-n", "2", PROGRAM, "leaves_a_process", "0"]).end() == 0


@NEEDS_MPI
def test_mpiexec_of_another_mpi_is_an_error(jobs: Jobs, tmp_path: Path) -> None:
    launcher = tmp_path / "mpi exec"
    launcher.write_text("""#!/bin/sh
        shift 2
        "$@" & "$@" & wait""")
    launcher.chmod(0o755)
    program = tmp_path / "a program.py"
    program.write_text("from aiodist import MultiWorkerMirroredStrategy\nMultiWorkerMirroredStrategy()")
    job = jobs.start(["-n", "2", "--launcher", str(launcher), str(program)])
    assert job.end() == 1, job.output
    error = r"aiodist run has started 2 workers \(AIODIST_WORKERS\), and (MPICH|Open MPI) \S+ knows of 1: launcher and"
    assert re.search(error, job.output), job.output


@pytest.mark.parametrize("text", ["exit 0", "echo something else", "exec sleep"])
def test_launcher_that_starts_no_worker_is_an_error(jobs: Jobs, tmp_path: Path, text: str) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text(f"#!/bin/sh\n{text}")
    launcher.chmod(0o755)
    job = jobs.start(["-n", "2", "--launcher", str(launcher), PROGRAM])
    assert job.end() == 2
    assert f"{launcher} -n 2 has started no worker; name the mpiexec of mpi4py's MPI by --launcher" in job.output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-n", "2", "--launcher", "nonesuch", PROGRAM], "there is no launcher 'nonesuch'; install an MPI"),
        (["-n", "2", "nonesuch.py"], "there is no file 'nonesuch.py'; -m takes the name of a module"),
        (["-n", "0", PROGRAM], "expected a whole number of at least 1, got '0'"),
    ],
)
def test_bad_usage_is_explained(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("run", *arguments) == 2
    assert error in capsys.readouterr().err
