"""What killed launchers and workers leave behind is removed, and nothing else is."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from aiodist._tools.launch import leftovers
from aiodist._tools.usage import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are looked at as Linux shows them")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let temporary files be here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def grow_old(folder: Path) -> None:
    """Let a folder be of an hour ago."""
    then = time.time() - 3600
    os.utime(folder, (then, then))


def test_folder_of_a_killed_launcher_is_removed_by_the_next(temporary: Path) -> None:
    others = {"aiodist-run-new", "aiodist-run-results", "aiodist-other"}
    for name in ("aiodist-run-killed", *others):
        folder = temporary / name
        folder.mkdir()
        (folder / "started.1").touch()
        if name != "aiodist-run-results":  # somebody else has named it so
            (folder / leftovers.MARK).touch()
        if name != "aiodist-run-new":
            grow_old(folder)
    kept = temporary / "kept"
    kept.mkdir()
    (kept / leftovers.MARK).touch()
    grow_old(kept)
    (temporary / "aiodist-run-link").symlink_to(kept)
    with leftovers.folder_of_notes() as own:
        grow_old(own)
        with leftovers.folder_of_notes() as another:
            assert own.exists()
        assert not another.exists()
    assert {path.name for path in temporary.iterdir()} == {*others, "kept", "aiodist-run-link"}
    assert list(kept.iterdir()) == [kept / leftovers.MARK]


def test_no_room_for_a_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonesuch")
    with (
        pytest.raises(UsageError, match=r"notes cannot be made .*'/nonesuch/aiodist-run-.*; set TMPDIR"),
        leftovers.folder_of_notes(),
    ):
        pass


def test_shared_memory_of_mpi_is_removed_and_no_other(temporary: Path) -> None:
    paths = [Path(f"/dev/shm/{name}{uuid.uuid4().hex}") for name in ("mpich_shm_", "sm_segment.", "of_others_")]
    maps = []
    for path in paths:
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), 4096))
    try:
        leftovers.note_memory(temporary, [os.getpid(), 0])
        leftovers.remove_memory(temporary)
        assert [path.exists() for path in paths] == [False, False, True]
    finally:
        for mapped in maps:
            mapped.close()
        paths[-1].unlink()
