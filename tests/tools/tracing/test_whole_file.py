"""A trace is complete or absent: whatever happens to the program, or to the disk, while it is made."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import aiodist
from aiodist._tools.trace.writer import AtomicFile
from tests.project.paths import environment
from tests.tools.tracing.traced import collectives, events_of

PROGRAM = """
import asyncio, os, signal, sys
import aiodist

async def step():
    ctx = aiodist.get_replica_context()
    await ctx.barrier()
    if ctx.replica_id_in_sync_group == 1:
        exec(sys.argv[1])
    await ctx.barrier()

asyncio.run(aiodist.MirroredStrategy(["CPU:0", "CPU:1"]).run(step))
"""


def names(folder: Path) -> list[str]:
    """List what is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def run_traced(tmp_path: Path, act: str, path: str = "run.json") -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, under AIODIST_TRACE."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, act],
        cwd=tmp_path,
        env=environment() | {"AIODIST_TRACE": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        ("pass", 0, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("sys.exit(3)", 3, ""),
        ("signal.raise_signal(signal.SIGINT)", 1, "KeyboardInterrupt"),
        ("import subprocess as s; s.run([sys.executable, '-c', 'import aiodist'])", 0, ""),
    ],
)
def test_trace_of_a_process_is_complete_however_python_ends(tmp_path: Path, act: str, code: int, said: str) -> None:
    done = run_traced(tmp_path, act)
    assert done.returncode in {code, -signal.SIGINT if "SIGINT" in act else code}
    assert said in done.stderr
    assert len(collectives(events_of(tmp_path / "run.json"))) >= 2
    assert names(tmp_path) == ["run.json"]


def test_trace_of_a_killed_process_is_absent(tmp_path: Path) -> None:
    run_traced(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert not (tmp_path / "run.json").exists()


def test_trace_that_cannot_be_written_says_so_before_any_replica_runs(tmp_path: Path) -> None:
    done = run_traced(tmp_path, "pass", "missing/run.json")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"FileNotFoundError: [Errno 2] AIODIST_TRACE: cannot write {tmp_path}/missing/run.json")


def test_process_that_runs_no_replicas_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import aiodist"]
    subprocess.run(command, cwd=tmp_path, env=environment() | {"AIODIST_TRACE": "run.json"}, check=True)
    assert names(tmp_path) == []


def test_missing_folder_is_told_at_the_first_run(tmp_path: Path) -> None:
    done = run_traced(tmp_path, "pass", "missing/run.json")
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "missing/run.json: No such file or directory" in done.stderr


def test_missing_folder_is_told_before_the_block_begins(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot write .*run\.json: No such file or directory"):  # noqa: SIM117
        with aiodist.trace(tmp_path / "missing" / "run.json"):
            pytest.fail("the block has begun")


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is not a regular file"), aiodist.trace(tmp_path):
        pytest.fail("the block has begun")
    with pytest.raises(OSError, match="it is not a regular file"), aiodist.trace(os.devnull):
        pytest.fail("the block has begun")


def test_file_stands_nowhere_before_it_is_whole(tmp_path: Path) -> None:
    file = AtomicFile(tmp_path / "run.json")
    file.write("half")
    assert not (tmp_path / "run.json").exists()
    file.commit()
    assert (tmp_path / "run.json").read_text() == "half"
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_file_behind_a_link_is_replaced_not_the_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run.json")
    AtomicFile(tmp_path / "link").commit()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "run.json").exists()


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_failure_at_the_end_leaves_what_was_there(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text("before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(call, fail)
    with pytest.raises(OSError, match="No space left"), aiodist.trace(tmp_path / "run.json"):
        pass
    assert (tmp_path / "run.json").read_text() == "before"
    assert names(tmp_path) == ["run.json"]


def test_failure_to_write_does_not_hide_the_programs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ValueError, match="mine") as caught, aiodist.trace(tmp_path / "run.json"):
        raise ValueError("mine")
    assert caught.value.__notes__ == ["its trace was not written: [Errno 28] No space left on device"]
    assert names(tmp_path) == []


def test_interruption_at_the_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt), aiodist.trace(tmp_path / "run.json"):
        pass
    assert names(tmp_path) == []


def test_disk_that_fills_up_on_the_way_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def step() -> None:
        for _ in range(3):
            await aiodist.get_replica_context().barrier()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    ended = []
    monkeypatch.setattr("aiodist._tools.trace.writer.KEPT_ARRIVALS", 2)
    monkeypatch.setattr("aiodist._tools.trace.writer.EventWriter.lines", fail)
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012, SIM117
        with aiodist.trace(tmp_path / "run.json"):
            asyncio.run(aiodist.MirroredStrategy(["CPU:0", "CPU:1"]).run(step))
            ended.append("run")
    assert ended == ["run"]
    assert names(tmp_path) == []
