"""A trace file is complete or absent, whatever happens to the program or to the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import aiodist
from aiodist._tools.trace.file import replacing
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
    """List a folder."""
    return sorted(path.name for path in folder.iterdir())


def run_traced(folder: Path, act: str, path: str = "run.json") -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, under AIODIST_TRACE."""
    command, variables = [sys.executable, "-c", PROGRAM, act], environment() | {"AIODIST_TRACE": path}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("act", "codes", "text"),
    [
        ("sys.exit(3)", {3}, ""),
        ("signal.raise_signal(signal.SIGINT)", {1, -signal.SIGINT}, "KeyboardInterrupt"),
    ],
)
def test_trace_of_a_process_is_complete_however_it_ends(tmp_path: Path, act: str, codes: set[int], text: str) -> None:
    done = run_traced(tmp_path, act)
    assert done.returncode in codes
    assert text in done.stderr
    assert len(collectives(events_of(tmp_path / "run.json"))) >= 2
    assert names(tmp_path) == ["run.json"]


def test_unwritable_trace_of_a_process_is_reported_at_its_first_run(tmp_path: Path) -> None:
    done = run_traced(tmp_path, "pass", "missing/run.json")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"OSError: cannot write {tmp_path}/missing/run.json: its folder")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("missing/run.json", r"cannot write .*run\.json: its folder does not exist"),
        (".", "it is not a regular file"),
        (os.devnull, "it is not a regular file"),
    ],
)
def test_unwritable_path_is_reported_before_the_block_begins(tmp_path: Path, path: str, text: str) -> None:
    with pytest.raises(OSError, match=text), aiodist.trace(tmp_path / path):
        pytest.fail("the block has begun")


def test_file_appears_once_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run.json")
    with replacing(tmp_path / "link") as file:
        file.write("text")
        assert not (tmp_path / "run.json").exists()
    assert (tmp_path / "run.json").read_text() == "text"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_at_the_end_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    (tmp_path / "run.json").write_text("before")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(type(error)) as caught, aiodist.trace(tmp_path / "run.json"):
        raise ValueError("the program's own")
    assert isinstance(caught.value.__context__, ValueError)
    assert (tmp_path / "run.json").read_text() == "before"
    assert names(tmp_path) == ["run.json"]
