"""The command line: help, version, bad usage, exit codes, and what it prints where."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

import aiodist
from aiodist._tools.cli import main
from tests.tools.command import environment, exit_code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["demo", "text", "--replicas", "0"], "--replicas: expected a whole number of at least 1, got '0'"),
        (["demo", "text", "--steps", "-3"], "--steps: expected"),
        (["demo", "text", "--steps", "many"], "--steps: expected a whole number of at least 1, got 'many'"),
        (["demo", "text", "--seed", "1.5"], "--seed: expected a whole number of at least 0, got '1.5'"),
        (["demo", "text", "--devices", "CPU:0,,CPU:1"], "--devices: expected device names separated by commas"),
        (["demo", "text", "--replicas", "3", "--devices", "CPU:0"], "--replicas 3 with 1 --devices"),
        (["demo", "text", "--devices", "CPU:0,CPU:0"], "--devices: "),
        (["demo", "text", "--devices", "TPU:0"], "--devices: "),
        (["demo", "text", "--workers", "5"], "--replicas 4 with --workers 5: each worker needs at least one"),
        (["demo", "text", "--", "3"], "unexpected arguments: -- 3"),
    ],
)
def test_bad_usage_is_said_in_a_line_with_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert exit_code(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.rstrip().splitlines()[-1].startswith("aiodist")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "demo"),
        ([], "demo"),
        (["demo"], "mismatch"),
        (["trace"], "html"),
        (["demo", "text", "--help"], "--replicas N"),
        (["--version"], f"aiodist {aiodist.__version__}\n"),
    ],
)
def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert exit_code(*arguments) == 0
    printed = capsys.readouterr()
    assert said in printed.out
    assert printed.err == ""


def test_command_line_loads_nothing_heavy_before_it_knows_what_to_do() -> None:
    program = "import aiodist._tools.cli, sys; print({'rich', 'sklearn', 'numba', 'trio'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_characters_that_the_encoding_lacks_become_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("aiodist._demos.mismatch.BEFORE", "→")
    assert main(["demo", "mismatch"]) == 0
    out.seek(0)
    printed = out.read()
    assert printed.startswith("?\n")
    assert "\x1b" not in printed
