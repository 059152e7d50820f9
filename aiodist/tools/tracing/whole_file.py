"""A file that is complete or absent: written beside its place under another name, and moved there when it is whole."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO


class WholeFile:
    """A text file in the making. Nothing stands at its path, or what stood there before, until `keep`.

    Args:
        path: where it will be; a symbolic link is followed.

    Raises:
        OSError: its folder does not exist or cannot be written to, or something other than a file is in its place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        if self.path.exists() and not self.path.is_file():
            raise OSError(f"cannot write {self.path}: it is not a regular file")
        self._unfinished = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.unfinished")
        try:
            descriptor = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise type(error)(error.errno, f"cannot write {self.path}: {error.strerror}") from None
        self._file: IO[str] = open(descriptor, "w", encoding="utf-8", buffering=1 << 20, newline="\n")  # noqa: PTH123, SIM115
        self.write = self._file.write
        self.flush = self._file.flush

    def keep(self) -> None:
        """Put the file in its place, whole, and on the disk.

        Raises:
            OSError: it cannot be written; then it is as `discard` leaves it.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._unfinished.replace(self.path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Leave nothing behind."""
        with suppress(OSError):  # what is in the buffer may still not fit on the disk
            self._file.close()
        with suppress(OSError):
            self._unfinished.unlink(missing_ok=True)
