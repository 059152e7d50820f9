"""Ways to run the command line: in this process, in one of its own, and in a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from aiodist._tools.cli import main
from tests.project import paths


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a command: this process's with a plain terminal and the given variables."""
    of_the_terminal = {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}
    inherited = {name: value for name, value in paths.environment().items() if name not in of_the_terminal}
    return inherited | {"TERM": "xterm-256color", **variables}


def exit_code(*arguments: str) -> Any:
    """Run `aiodist` in this process; return its exit code."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run `aiodist` with arguments that it must reject; return what it printed on standard error."""
    assert exit_code(*arguments) == 2
    printed = capsys.readouterr()
    assert "aiodist" not in printed.out  # a target that was to be checked may have printed something
    assert printed.err.rstrip().splitlines()[-1].startswith("aiodist")
    assert "Traceback" not in printed.err
    return printed.err


def run_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `aiodist` in a process of its own; its output includes standard error."""
    command = [sys.executable, "-m", "aiodist", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, env=environment(**variables), text=True, check=False, **streams)  # type: ignore[call-overload, no-any-return]


def interrupt_command(*arguments: str, when: str) -> tuple[int, str]:
    """Run `aiodist` in a terminal, and press Ctrl-C once `when` is printed; return its exit code and output."""
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
        except OSError:  # on Linux: the last process has closed its side of the terminal
            pass
    os.close(ours)
    return process.returncode, output.decode()
