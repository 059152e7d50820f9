"""Real workers over gloo, started by `aiodist run --engine gloo` without any MPI."""

from __future__ import annotations

import importlib.util
import re
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from aiodist.workers.gloo import GlooCommunicator, load_gloo
from tests.tools.command import exit_code
from tests.tools.jobs import Jobs
from tests.workers.launched import JOB, job

with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


@with_torch
def test_killed_worker_is_told_by_all_others_and_the_job_ends() -> None:
    code, output, _ = job(3, "fault", "killed", engine="gloo")
    assert code == 128 + signal.SIGKILL
    for worker in (0, 1):
        told = re.search(rf"worker {worker} ([\d.]+) (.*)", output)
        assert told, output
        assert "WorkerLostError 'worker 2 of 3 has died" in told[2]
        assert float(told[1]) < 5


@with_torch
def test_interrupted_job_leaves_no_process(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    with closing(Jobs()) as jobs:
        waiting = jobs.start(["-n", "2", "--engine", "gloo", str(program)])
        waiting.read_until("begun\n", 2)
        waiting.process.send_signal(signal.SIGINT)
        code, _ = waiting.end()
        assert waiting.left() == []
    assert code == 130
    assert "interrupted" in waiting.output


def test_missing_pytorch_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(ImportError, match=r"pip install 'aiodist\[torch\]'"):
        load_gloo()


@with_torch
def test_program_that_nobody_told_where_workers_meet() -> None:
    with pytest.raises(ValueError, match="started by `aiodist run --engine gloo`"):
        GlooCommunicator.of_job(0, 2, "")


@with_torch
@pytest.mark.parametrize("port", ["0", "65536", "x", ""])
def test_port_that_is_none(port: str) -> None:
    with pytest.raises(ValueError, match="tells them where they meet"):
        GlooCommunicator.of_job(0, 2, f"127.0.0.1:{port}")


@with_torch
def test_port_that_another_program_has() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"worker 0 of 2 cannot listen at port {port} of its machine"):
            GlooCommunicator.of_job(0, 2, f"127.0.0.1:{port}")


@with_torch
def test_first_machine_that_has_no_number() -> None:
    with pytest.raises(RuntimeError, match=r"'nonesuch\.invalid' cannot be reached .*--hosts"):
        GlooCommunicator.of_job(1, 2, "nonesuch.invalid:4000")


@with_torch
def test_two_jobs_at_once_on_a_machine() -> None:
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda _: job(2, "values", engine="gloo"), range(2)))
    assert [code for code, *_ in ended] == [0, 0], ended
    assert len({line for _, output, _ in ended for line in re.findall(r"\b[0-9a-f]{16,}\b", output)}) == 1


def test_gloo_takes_no_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("run", "-n", "2", "--engine", "gloo", "--launcher=mpiexec", str(JOB)) == 2
    assert "it takes no --launcher" in capsys.readouterr().err
