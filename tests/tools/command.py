"""The command line as a person starts it: in this process, or in one of its own, and there in a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from aiodist._tools.cli import main
from tests.project import paths


def environment(**variables: str) -> dict[str, str]:
    """Return this process's variables with ours on the path, a plain terminal, and the given ones."""
    own = {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}
    inherited = {name: value for name, value in paths.environment().items() if name not in own}
    return inherited | {"TERM": "xterm-256color", **variables}


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


def interrupt_command(*arguments: str, when: str) -> tuple[int, str]:
    """Run `aiodist` in a terminal, with Ctrl-C once `when` has been printed; return its exit code and output."""
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
    return process.returncode, output.decode()
