"""Ctrl-C in the middle of a run, as a person does it: a signal to a real process, in a terminal and behind a pipe."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aiodist._demos.interruption import Interruptions
from tests.tools.command import Ended, behind_pipe, environment, in_terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals are POSIX here")
LONG_RUN = ["demo", "text", "--steps", "1000000", "--replicas"]
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
LINE = re.compile(r"interrupted at step (\d+) of 1000000 on (\d) replicas?; nothing was saved")


def interrupt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("run", [behind_pipe, in_terminal])
@pytest.mark.parametrize("replicas", ["1", "4"])
def test_interruption_ends_in_one_line(run: Callable[..., Ended], replicas: str) -> None:
    ended = run([*LONG_RUN, replicas], when="bits/char", act=interrupt)
    assert ended.code == 130
    assert (line := LINE.fullmatch(ended.last_line))
    assert int(line[1]) >= 1
    assert line[2] == replicas
    assert "Traceback" not in ended.output
    assert "Error" not in ended.output
    assert ended.output.count("interrupted") == 1


def interrupt_twice(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("run", [behind_pipe, in_terminal])
def test_second_interruption_changes_nothing(run: Callable[..., Ended]) -> None:
    ended = run([*LONG_RUN, "4"], when="bits/char", act=interrupt_twice)
    assert ended.code == 130
    assert LINE.fullmatch(ended.last_line)
    assert "Traceback" not in ended.output


def test_third_interruption_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr("os._exit", told.append)
    interruptions = Interruptions()
    with pytest.raises(KeyboardInterrupt):
        interruptions.handle()
    interruptions.handle()
    assert told == []
    interruptions.handle()
    assert told == [130]


def test_first_interruption_of_an_event_loop_is_a_cancellation() -> None:
    told: list[object] = []
    interruptions = Interruptions()
    interruptions.cancel = lambda: told.append("cancelled")
    interruptions.handle()
    interruptions.handle()
    assert told == ["cancelled"]


def test_terminal_gets_its_cursor_back() -> None:
    ended = in_terminal([*LONG_RUN, "4"], when="bits/char", act=interrupt)
    assert HIDE_CURSOR in ended.output
    assert ended.output.rindex(SHOW_CURSOR) > ended.output.rindex(HIDE_CURSOR)


def test_interruption_before_the_first_step_says_so() -> None:
    ended = behind_pipe([*LONG_RUN, "4"], when="input", act=interrupt)
    assert ended.code == 130
    assert ended.last_line.startswith("interrupted")
    assert "Traceback" not in ended.output


def test_reader_that_goes_away_ends_the_run_without_a_word() -> None:
    command = [sys.executable, "-m", "aiodist", *LONG_RUN, "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_reader_of_a_check_that_goes_away_is_not_told_that_replicas_disagree(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from aiodist import get_replica_context\nasync def replica():\n    await get_replica_context().barrier()\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "aiodist", "check", "program.py:replica", "--replicas", "2", "--schedules", "1"],
            cwd=tmp_path, env=environment(), stdout=closed, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_interruption_in_the_midst_of_an_import_ends_with_our_code(tmp_path: Path) -> None:
    """A class that is being made executes strings, of which Python notes that they were interrupted."""
    (tmp_path / "program.py").write_text(
        "import argparse, sys\n"
        "from aiodist._tools import cli\n"
        "def command(_):\n"
        "    exec('raise KeyboardInterrupt')\n"
        "sys.exit(cli.run(argparse.Namespace(command=command)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "program"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr.strip()) == (130, "interrupted")
