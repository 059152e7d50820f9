"""Ctrl-C, and readers that go away: in the process of the test where possible, and as a signal to real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aiodist._demos import interruption
from aiodist._demos.interruption import Interruptions
from aiodist._tools.cli import main
from tests.tools.command import environment, in_terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals are POSIX here")
LONG_RUN = ["demo", "text", "--steps", "1000000", "--replicas"]
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


@pytest.fixture
def interruptions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interruptions]:
    """Count this test's Ctrl-Cs alone."""
    monkeypatch.setattr(interruption, "INTERRUPTIONS", own := Interruptions())
    before = signal.getsignal(signal.SIGINT)
    yield own
    signal.signal(signal.SIGINT, before)


def test_first_ends_what_an_event_loop_runs_and_the_third_ends_all(
    monkeypatch: pytest.MonkeyPatch, interruptions: Interruptions
) -> None:
    told: list[object] = []
    monkeypatch.setattr("os._exit", told.append)
    interruptions.cancel = lambda: told.append("cancelled")
    for expected in (["cancelled"], ["cancelled"], ["cancelled", 130]):
        interruptions.handle()
        assert told == expected


def test_first_without_an_event_loop_is_raised(interruptions: Interruptions) -> None:
    with pytest.raises(KeyboardInterrupt):
        interruptions.handle()


@pytest.mark.parametrize("replicas", ["1", "4"])
def test_run_says_at_which_step_it_was_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, interruptions: Interruptions, replicas: str
) -> None:
    def describe(_: float) -> str:
        signal.raise_signal(signal.SIGINT)
        return ""

    monkeypatch.setattr("aiodist._demos.text._bits", describe)
    interruptions.install()
    assert main([*LONG_RUN, replicas]) == 130
    noun = "replica" if replicas == "1" else "replicas"
    told = rf"interrupted at step [12] of 1000000 on {replicas} {noun}; nothing was saved\n"
    assert re.fullmatch(told, capsys.readouterr().err)


def test_interruption_before_the_first_step_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, interruptions: Interruptions
) -> None:
    monkeypatch.setattr("aiodist._demos.text.load_topics", lambda: signal.raise_signal(signal.SIGINT))
    interruptions.install()
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
