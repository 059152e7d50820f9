"""A trace file is complete or absent: whatever happens to the program, or to the disk, while it is made."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import aiodist
from aiodist._tools.trace.writer import AtomicFile
from tests.project.paths import environment
from tests.tools.trace.traced import collectives, events_of

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


def run_traced(folder: Path, act: str, path: str = "run.json") -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, under AIODIST_TRACE."""
    command, variables = [sys.executable, "-c", PROGRAM, act], environment() | {"AIODIST_TRACE": path}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("act", "codes", "said"),
    [
        # A process that it starts runs no replicas, and writes nothing.
        ("import subprocess as s; s.run([sys.executable, '-c', 'import aiodist']); sys.exit(3)", {3}, ""),
        ("signal.raise_signal(signal.SIGINT)", {1, -signal.SIGINT}, "KeyboardInterrupt"),
    ],
)
def test_trace_of_a_process_is_complete_however_python_ends(
    tmp_path: Path, act: str, codes: set[int], said: str
) -> None:
    done = run_traced(tmp_path, act)
    assert done.returncode in codes
    assert said in done.stderr
    assert len(collectives(events_of(tmp_path / "run.json"))) >= 2
    assert names(tmp_path) == ["run.json"]


def test_trace_of_a_process_is_absent_where_it_was_killed_or_cannot_be_written(tmp_path: Path) -> None:
    run_traced(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert not (tmp_path / "run.json").exists()
    done = run_traced(tmp_path, "pass", "missing/run.json")
    expected = f"FileNotFoundError: [Errno 2] AIODIST_TRACE: cannot write {tmp_path}/missing/run.json"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(expected)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing/run.json", r"cannot write .*run\.json: No such file or directory"),
        (".", "it is not a regular file"),
        (os.devnull, "it is not a regular file"),
    ],
)
def test_path_that_cannot_be_written_is_reported_before_the_block_begins(tmp_path: Path, path: str, said: str) -> None:
    with pytest.raises(OSError, match=said), aiodist.trace(tmp_path / path):
        pytest.fail("the block has begun")


def test_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run.json")
    with AtomicFile(tmp_path / "link") as file:
        file.write("text")
        assert not (tmp_path / "run.json").exists()
    assert (tmp_path / "run.json").read_text() == "text"
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "other").touch()
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


FULL = OSError(28, "No space left on device")


def fail(monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException = FULL) -> None:
    """Let a function fail."""

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(call, failing)


@pytest.mark.parametrize(
    ("call", "error"), [("os.fsync", FULL), ("pathlib.Path.replace", FULL), ("os.fsync", KeyboardInterrupt())]
)
def test_failure_at_the_end_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    (tmp_path / "run.json").write_text("before")
    fail(monkeypatch, call, error)
    with pytest.raises(type(error)), aiodist.trace(tmp_path / "run.json"):
        pass
    assert (tmp_path / "run.json").read_text() == "before"
    assert names(tmp_path) == ["run.json"]


def test_failure_to_write_does_not_hide_the_programs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "os.fsync")
    with pytest.raises(ValueError, match="mine") as caught, aiodist.trace(tmp_path / "run.json"):
        raise ValueError("mine")
    assert caught.value.__notes__ == ["its trace was not written: [Errno 28] No space left on device"]
    assert names(tmp_path) == []


def test_disk_that_fills_up_on_the_way_is_reported_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def step() -> None:
        for _ in range(3):
            await aiodist.get_replica_context().barrier()

    ended = []
    monkeypatch.setattr("aiodist._tools.trace.writer.KEPT_ARRIVALS", 2)
    fail(monkeypatch, "aiodist._tools.trace.writer.EventWriter.lines")
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012, SIM117
        with aiodist.trace(tmp_path / "run.json"):
            asyncio.run(aiodist.MirroredStrategy(["CPU:0", "CPU:1"]).run(step))
            ended.append("run")
    assert ended == ["run"]
    assert names(tmp_path) == []
