"""Ctrl-C, and readers that go away: in the process of the test where possible, and as a signal to real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from aiodist._demos import interruption
from aiodist._tools.cli import main
from tests.tools.command import environment, in_terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals are POSIX here")
LONG_RUN = ["demo", "text", "--steps", "1000000", "--replicas"]
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def test_third_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)

    async def program(times: int) -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    for times, ended in ((1, []), (2, []), (3, [130])):
        with pytest.raises(KeyboardInterrupt):
            interruption.run(program, times)
        assert codes == ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("replicas", ["1", "4"])
def test_run_says_at_which_step_it_was_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, replicas: str
) -> None:
    def describe(_: float) -> str:
        signal.raise_signal(signal.SIGINT)
        return ""

    monkeypatch.setattr("aiodist._demos.text._bits", describe)
    assert main([*LONG_RUN, replicas]) == 130
    noun = "replica" if replicas == "1" else "replicas"
    told = rf"interrupted at step [12] of 1000000 on {replicas} {noun}; nothing was saved\n"
    assert re.fullmatch(told, capsys.readouterr().err)


def test_interruption_before_the_first_step_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiodist._demos.text.load_topics", lambda: signal.raise_signal(signal.SIGINT))
    assert main([*LONG_RUN, "4"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_process_that_is_interrupted_twice_ends_in_one_line() -> None:
    def interrupt(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)

    ended = in_terminal([*LONG_RUN, "4"], when="bits/char", act=interrupt)
    assert ended.code == 130
    assert ended.last_line.startswith("interrupted at step ")
    assert ended.output.count("interrupted") == 1
    assert "Error" not in ended.output
    assert ended.output.rindex(SHOW_CURSOR) > ended.output.rindex(HIDE_CURSOR)


def test_reader_that_goes_away_ends_a_command_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "aiodist", *LONG_RUN, "2"]
    with os.fdopen(writer, "wb") as closed:
        ended = subprocess.run(command, env=environment(), stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (141, b"")
