"""The command line as a person starts it: in this process, or in one of its own, and there in a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Any

from aiodist._tools.cli import main
from tests.project.paths import SOURCES


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


def run_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `aiodist` in a process of its own, with these environment variables; all that it prints is its output."""
    command = [sys.executable, "-m", "aiodist", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, env=environment(**variables), text=True, check=False, **streams)  # type: ignore[call-overload, no-any-return]


def interrupt_command(*arguments: str, when: str) -> tuple[int, str, str]:
    """Run `aiodist` in a terminal, with Ctrl-C once `when` has been printed.

    Returns:
        The exit code, all that it printed, and the last line without what moves a cursor or colours.
    """
    import pty

    ours, its = pty.openpty()
    output = b""
    command = [sys.executable, "-m", "aiodist", *arguments]
    with subprocess.Popen(command, env=environment(), stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        try:
            while chunk := os.read(ours, 4096):
                if when.encode() not in output and when.encode() in output + chunk:
                    process.send_signal(signal.SIGINT)
                output += chunk
        except OSError:  # so Linux says that the last process has closed its side of a terminal
            pass
    os.close(ours)
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", output.decode())
    return process.returncode, output.decode(), plain.rstrip().splitlines()[-1]
