"""What jobs leave on this machine beside processes, and its removal: folders of notes, and MPI's shared memory.

An MPI removes its shared memory when it is finalised, which a killed worker never does; in a container, where there is
little of it, some failed jobs use up all. What workers have mapped is seen while they run.

A launcher that is itself killed removes nothing. It holds a lock on its folder: the next launcher finds the folders
whose lock nobody holds.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from aiodist._tools.usage import UsageError

_PREFIX: Final = "aiodist-run-"
MARK: Final = "folder of aiodist run"
_MEMORY: Final = "memory"
_OF_MPI: Final = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")  # noqa: S108  (MPICH's, and Open MPI's)
_YOUNG_SECONDS: Final = 60.0
_FIRST_LOOK_SECONDS: Final = 0.2
_PATIENCE: Final = 0.5


@contextmanager
def folder_of_notes() -> Iterator[Path]:
    """Make a job's folder, and remove it in the end; remove what killed launchers have left before.

    Raises:
        UsageError: there is no place for it.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(
            f"a folder for the job's notes cannot be made ({error}); set TMPDIR to one with room"
        ) from None
    with made as name, _locked(Path(name)):
        with suppress(OSError):
            (Path(name) / MARK).touch()
        _remove_abandoned(Path(name).parent)
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder while this process lives, or less; tell whether nobody else has."""
    try:
        import fcntl

        opened = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows has no such locks
        yield False
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(opened)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or gone meanwhile
            told = folder.lstat()
            if not stat.S_ISDIR(told.st_mode) or not (folder / MARK).is_file():
                continue  # it is named as ours are, by somebody else
            if told.st_uid != os.geteuid() or time.time() - told.st_mtime < _YOUNG_SECONDS:
                continue
            with _locked(folder) as abandoned:
                if abandoned:
                    remove_memory(folder)
                    shutil.rmtree(folder, ignore_errors=True)


class Looks:
    """When to look at what workers have mapped: often at first, when they map it, and then ever more seldom."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._next = self._begun + _FIRST_LOOK_SECONDS

    def due(self) -> bool:
        """Return whether it is time to look again."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _PATIENCE * (now - self._begun)
        return True


def note_memory(notes: Path, workers: list[int]) -> None:
    """Note which of MPI's shared memory these processes have mapped."""
    found = {path for worker in workers for path in _mapped(worker)}
    if found:
        with suppress(OSError):
            known = _noted(notes)
            if not found <= known:
                (notes / _MEMORY).write_text("\n".join(sorted(found | known)))


def _mapped(worker: int) -> set[str]:
    """Return the paths of MPI's shared memory in a process, as Linux shows them."""
    if sys.platform != "linux":
        return set()
    try:
        lines = Path(f"/proc/{worker}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}  # noqa: S108
    return {path for path in paths if path.startswith(_OF_MPI)}


def _noted(notes: Path) -> set[str]:
    path = notes / _MEMORY
    return set(path.read_text().splitlines()) if path.exists() else set()


def remove_memory(notes: Path) -> None:
    """Remove the shared memory that has been noted: all that have used it have ended."""
    with suppress(OSError):
        for path in _noted(notes):
            if path.startswith(_OF_MPI):
                with suppress(OSError):
                    os.unlink(path)  # noqa: PTH108
