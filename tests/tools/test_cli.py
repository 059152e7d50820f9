"""What all commands share: help, version, usage errors, exit codes, colour, and output that cannot be written."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

import aiodist
from aiodist._core.text import duration, size
from aiodist._tools.cli import build_parser, main
from tests.tools.command import environment, exit_code, run_command, usage_error
from tests.torch.recorded import Job


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["demo", "text", "--replicas", "0"], "--replicas: expected a whole number of at least 1, got '0'"),
        (["demo", "text", "--seed", "1.5"], "--seed: expected a whole number of at least 0, got '1.5'"),
        (["demo", "text", "--workers", "5"], "--replicas 4 with --workers 5: each worker needs at least one"),
        (["demo", "text", "--", "3"], "unexpected arguments: -- 3"),
    ],
)
def test_bad_usage_gives_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in usage_error(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--help"], "demo"),
        ([], "demo"),
        (["demo"], "mismatch"),
        (["trace"], "html"),
        (["demo", "text", "--help"], "--replicas N"),
        (["--version"], f"aiodist {aiodist.__version__}\n"),
    ],
)
def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert exit_code(*arguments) == 0
    printed = capsys.readouterr()
    assert message in printed.out
    assert printed.err == ""


def test_import_of_the_command_line_is_light() -> None:
    program = "import aiodist._tools.cli, sys; print({'rich', 'sklearn', 'numba', 'trio'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], env=environment()) == b"set()\n"


def test_characters_that_cannot_be_encoded_become_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("aiodist._demos.mismatch.BEFORE", "→")
    assert main(["demo", "mismatch"]) == 0
    out.seek(0)
    assert out.read().startswith("?\n")


def test_times_and_sizes_have_three_digits() -> None:
    seconds = {0: "0", 2e-9: "2 ns", 1.234e-6: "1.23 µs", 45.6e-6: "45.6 µs", 0.9996: "1.00 s", 123.4: "123 s"}
    assert {value: duration(value) for value in seconds} == seconds
    nbytes = {0: "0 B", 1023: "1023 B", 1536: "1.50 KiB", 3 << 30: "3.00 GiB", 5 << 50: "5120 TiB"}
    assert {value: size(value) for value in nbytes} == nbytes


def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, list[argparse.Action]]]:
    """Yield a parser and the parsers of its commands, each with its arguments."""
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    yield parser, [action for action in parser._actions if action not in commands]
    for inner in (choice for action in commands for choice in action.choices.values()):
        yield from parsers(inner)


def test_commands_and_options_have_descriptions_and_options_the_same_meaning_everywhere() -> None:
    meanings: dict[str, set[str]] = {}
    for parser, actions in parsers(build_parser()):
        assert parser.description, parser.prog
        assert [action.dest for action in actions if not action.help] == []
        for action in actions:
            for option in action.option_strings:
                meanings.setdefault(option, set()).add(f"{action.metavar} {type(action).__name__}")
    assert {option: found for option, found in meanings.items() if len(found) > 1 and option.startswith("--")} == {}
    assert {"--replicas", "--workers", "--ranks", "--seed", "--json"} <= set(meanings)


PROGRAM = """
import asyncio, aiodist

async def parts():
    ctx = aiodist.get_replica_context()
    await ctx.all_reduce("SUM" if ctx.replica_id_in_sync_group else "MAX", 1.0)

if __name__ == "__main__":
    try:
        with aiodist.trace("run.json"):
            asyncio.run(aiodist.MirroredStrategy(["CPU:0", "CPU:1"]).run(parts))
    except aiodist.CollectiveError:
        pass
"""


def test_colour_of_reports_obeys_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    runpy.run_path("program.py", run_name="__main__")
    job = Job(2)
    job.call(0, "barrier")
    dumps = " ".join(str(path) for path in job.write(Path()))
    monkeypatch.setenv("TERM", "xterm-256color")
    for forced, forbidden in (("1", ""), ("1", "1"), ("", "")):
        monkeypatch.setenv("FORCE_COLOR", forced)
        monkeypatch.setenv("NO_COLOR", forbidden)
        for command in (
            "check program.py:parts -n 2", f"explain {dumps}", "demo mismatch", "trace show run.json",
        ):  # fmt: skip
            exit_code(*command.split())
            message = capsys.readouterr().out
            assert "collective #" in message, command
            assert ("\x1b[1;31m" in message) is (forced > forbidden), command


@pytest.mark.skipif(importlib.util.find_spec("argcomplete") is None, reason="argcomplete is not installed")
def test_shell_completes_words() -> None:
    request = {"COMP_LINE": "aiodist trace s", "COMP_POINT": "15", "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout"}
    assert run_command(_ARGCOMPLETE="1", **request).stdout.strip() == "show"


def into(out: int | IO[Any], *arguments: str, unbuffered: str) -> tuple[int, str]:
    """Run a command with this standard output; return its exit code and standard error."""
    command, variables = [sys.executable, "-m", "aiodist", *arguments], environment(PYTHONUNBUFFERED=unbuffered)
    ended = subprocess.run(command, env=variables, stdout=out, stderr=subprocess.PIPE, check=False, text=True)
    return ended.returncode, ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("arguments", "unbuffered", "path"),
    [
        ("doctor", "", "/dev/full"),
        ("doctor", "1", "/dev/null"),
        ("demo mismatch", "1", "/dev/full"),
        ("trace", "", "/dev/full"),
        ("--version", "1", "/dev/full"),
    ],
)
def test_output_that_cannot_be_written_is_reported_in_one_line(arguments: str, unbuffered: str, path: str) -> None:
    with Path(path).open("rb" if path == "/dev/null" else "wb") as out:
        ended = into(out, *arguments.split(), unbuffered=unbuffered)
    reason = "Bad file descriptor" if path == "/dev/null" else "No space left on device"
    assert ended == (1, f"aiodist: error: cannot write the output: {reason}\n")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes are POSIX here")
@pytest.mark.parametrize("arguments", ["doctor", "--version", "demo text --steps 1000000"])
def test_broken_pipe_ends_a_command_silently(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert into(writer, *arguments.split(), unbuffered="1") == (141, "")
    os.close(writer)
