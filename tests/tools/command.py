"""The command line as a person starts it: in this process, or in one of its own behind a pipe or in a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from aiodist._tools.cli import main
from tests.project.paths import SOURCES

ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")

Action: TypeAlias = Callable[[subprocess.Popen[bytes]], None]


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it had printed, standard error too."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        """The last line with anything on it, without what moves a cursor or colours."""
        return ESCAPES.sub("", self.output).rstrip().splitlines()[-1]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's variables with ours on the path, a plain terminal, and the given ones."""
    own = {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    return inherited | {"PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "TERM": "xterm-256color", **variables}


def exit_code(*arguments: str) -> Any:
    """Run `aiodist` in this process; return its exit code."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def behind_pipe(arguments: Sequence[str], *, when: str = "", act: Action | None = None) -> Ended:
    """Run `aiodist` with its output in a pipe; `act` on the process once `when` has been printed."""
    ours, its = os.pipe()
    return _follow(arguments, ours, when, act, stdout=its, stderr=its)


def in_terminal(arguments: Sequence[str], *, when: str = "", act: Action | None = None) -> Ended:
    """Do the same in a terminal."""
    import pty

    ours, its = pty.openpty()
    return _follow(arguments, ours, when, act, stdin=its, stdout=its, stderr=its)


def _follow(arguments: Sequence[str], ours: int, when: str, act: Action | None, **streams: int) -> Ended:
    command, output = [sys.executable, "-m", "aiodist", *arguments], b""
    with subprocess.Popen(command, env=environment(), start_new_session=True, **streams) as process:  # type: ignore[call-overload]
        os.close(streams["stdout"])
        while chunk := _read(ours):
            output += chunk
            if act and when.encode() in output:
                act(process)
                act = None
    os.close(ours)
    return Ended(process.returncode, output.decode())


def _read(source: int) -> bytes:
    try:
        return os.read(source, 4096)
    except OSError:  # so Linux says that the last process has closed its side of a terminal
        return b""
