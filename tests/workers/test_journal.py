"""What a launcher concludes from the journal of a job, and how workers write it."""

from __future__ import annotations

import mmap
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiodist._workers.journal import Journal, note, noted_rendezvous, shared_memory


def journal(folder: Path, *lines: str) -> Journal:
    (folder / "journal").write_text("".join(f"{line}\n" for line in lines))
    return Journal(str(folder))


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], 0),
        (["ended 7 0"], 0),
        (["ended 7 0", "echo 8", "ended 8 1"], 1),
        (["ended 7 0", "echo 8", "ended 8 1", "ended 10 5", "ended 9 6"], 5),
    ],
)
def test_exit_code_is_that_of_the_first_that_has_failed_by_itself(tmp_path: Path, lines: list[str], code: int) -> None:
    assert journal(tmp_path, *lines).first_failure() == code


ONE = ["started 7 70 2", "ended 7 0"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["waits 8", "waits 9"], None),
        (ONE, None),
        ([*ONE, "met 7", "met 8"], None),
        ([*ONE, "met 7", "met 7", "met 8", "waits 8"], None),
        ([*ONE, "waits 8", "failed 8"], None),
        ([*ONE, "waits 8"], (0, "worker 2 has ended without making a MultiWorkerMirroredStrategy, and 1 other ")),
        (
            ["started 7 70 2", "leaving 7", "met 7", "met 8", "waits 8", "met 9", "waits 9", "met 9", "waits 9"],
            (1, "worker 2 has ended after making 1 MultiWorkerMirroredStrategy, and 2 others wait for it to make the "),
        ),
    ],
)
def test_wait_for_a_worker_that_has_ended_is_reported(
    tmp_path: Path, lines: Sequence[str], found: tuple[int, str] | None
) -> None:
    waiting = journal(tmp_path, *lines).waiting_in_vain()
    assert (waiting and waiting[0]) == (found and found[0])
    assert waiting is None or found is None or waiting[1].startswith(found[1])


def test_workers_run_until_their_agents_say_that_they_have_ended(tmp_path: Path) -> None:
    found = journal(tmp_path, "started 7 70 0", "started 8 80 1", "waits 7", "waits 8", "met 8", "ended 7 0")
    assert found.running() == [(8, 80)]
    assert found.missing().startswith("; worker 1 (process 8 on ")
    assert journal(tmp_path, "started 7 70 0", "waits 7").missing() == ""


def test_workers_note_their_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note("waits")  # where there is no launcher, nobody is to know
    monkeypatch.setenv("AIODIST_NOTES", str(tmp_path))
    for count in (1, 2):
        with noted_rendezvous():
            assert Journal(str(tmp_path)).waiting == {os.getpid()}
        assert Journal(str(tmp_path)).waiting == set()
        assert Journal(str(tmp_path)).met == {os.getpid(): count}
    with pytest.raises(TimeoutError), noted_rendezvous():
        raise TimeoutError
    assert Journal(str(tmp_path)).waiting == set()
    assert Journal(str(tmp_path)).met == {os.getpid(): 2}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is looked at as Linux shows it")
def test_shared_memory_of_mpi_and_no_other_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(f"/dev/shm/{name}{uuid.uuid4().hex}") for name in ("mpich_shm_", "sm_segment.", "of_others_")]
    maps = []
    try:
        for path in paths:
            path.write_bytes(bytes(4096))
            with path.open("r+b") as file:
                maps.append(mmap.mmap(file.fileno(), 4096))
        monkeypatch.setenv("AIODIST_NOTES", str(tmp_path))
        with noted_rendezvous():
            pass
        of_mpi = {str(path) for path in paths[:2]}
        assert Journal(str(tmp_path)).maps >= of_mpi
        assert of_mpi <= shared_memory(os.getpid()) <= Journal(str(tmp_path)).maps
        assert str(paths[2]) not in Journal(str(tmp_path)).maps
    finally:
        for mapped in maps:
            mapped.close()
        for path in paths:
            path.unlink()
