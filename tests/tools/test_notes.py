"""What a launcher concludes from the notes of a job's workers, and from the memory that they have mapped."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiodist._tools.launch.notes import Notes, SharedMemory, folder_of_notes
from aiodist._tools.usage import UsageError


def noted(folder: Path, told: Sequence[str]) -> Notes:
    """Let notes lie in a folder, left one after the other: each is its name, and what it says after an equals sign."""
    for at, (name, _, text) in enumerate(each.partition("=") for each in told):
        (folder / name).write_text(text)
        os.utime(folder / name, (at, at))
    return Notes(folder)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ([], 0),
        (["ended.7=0"], 0),
        (["ended.7=0", "echo.8", "ended.8=1"], 1),
        (["ended.7=0", "echo.8", "ended.8=1", "ended.10=5", "ended.9=6"], 5),
    ],
)
def test_exit_code_is_that_of_the_first_that_has_failed_by_itself(tmp_path: Path, told: list[str], code: int) -> None:
    assert noted(tmp_path, told).first_failure() == code


def test_workers_run_until_their_agents_say_that_they_have_ended(tmp_path: Path) -> None:
    assert noted(tmp_path, ["started.7=70 0", "started.8=80 1", "ended.7=0"]).running() == [(8, 80)]


ONE = ["started.7=70 2", "ended.7=0"]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (["rendezvous.8", "rendezvous.9"], None),
        (ONE, None),
        ([*ONE, "met.7=1", "met.8=1"], None),
        ([*ONE, "met.7=2", "met.8=1", "rendezvous.8"], None),
        (
            [*ONE, "rendezvous.8"],
            (0, "worker 2 has ended without making a MultiWorkerMirroredStrategy, and 1 other "),
        ),
        (
            ["started.7=70 2", "leaving.7", "met.7=1", "met.8=1", "rendezvous.8", "met.9=1", "rendezvous.9"],
            (1, "worker 2 has ended after making 1 MultiWorkerMirroredStrategy, and 2 others wait for it to make the "),
        ),
    ],
)
def test_wait_for_a_worker_that_has_ended_is_told(
    tmp_path: Path, told: list[str], found: tuple[int, str] | None
) -> None:
    waiting = noted(tmp_path, told).waiting_in_vain()
    assert (waiting and waiting[0]) == (found and found[0])
    assert waiting is None or found is None or waiting[1].startswith(found[1])


def test_no_room_for_a_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonesuch")
    told = r"cannot make a folder for the job's notes .*'/nonesuch/aiodist-run-.*; set TMPDIR"
    with pytest.raises(UsageError, match=told), folder_of_notes():
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="memory is looked at as Linux shows it")
def test_shared_memory_of_mpi_is_removed_and_no_other(tmp_path: Path) -> None:
    paths = [Path(f"/dev/shm/{name}{uuid.uuid4().hex}") for name in ("mpich_shm_", "sm_segment.", "of_others_")]
    maps = []
    for path in paths:
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), 4096))
    try:
        memory = SharedMemory(noted(tmp_path, [f"started.{os.getpid()}=1 0", "started.0=1 1"]))
        memory.look()
        memory.remove()
        assert [path.exists() for path in paths] == [False, False, True]
    finally:
        for mapped in maps:
            mapped.close()
        paths[-1].unlink()
