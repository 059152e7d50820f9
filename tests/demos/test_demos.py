"""The demos from the command line: what they print, their exit codes, Ctrl-C, and several workers."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from aiodist._demos import text
from aiodist._tools.cli import main
from tests.tools.command import interrupt_command, run_command, usage_error

DIGEST = re.compile(r"\b([0-9a-f]{16})  replica (\d+)")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Run a demo that must end with `code`; return its output."""
    assert main(["demo", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_text_prints_progress_a_sample_and_digests(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "text", "--steps", "25")
    assert re.search(r"^input +pydoc_data\.topics: [\d,]+ characters$", out, re.MULTILINE)
    lines = re.findall(r"^4 replicas, step +(\d+) of 25: \d\.\d\d bits/char(, \d+ steps/s)?$", out, re.MULTILINE)
    assert [int(step) for step, _ in lines] == [1, *range(2, 25, 2), 25]
    assert [bool(rate) for _, rate in lines] == [False, *[True] * 13]
    assert '\n  The "replica" statement\n  ***' in out
    assert [match[2] for match in DIGEST.finditer(out)] == ["0", "1", "2", "3"]
    assert len({match[1] for match in DIGEST.finditer(out)}) == 1
    assert "equal in every bit" in out
    assert re.search(r"^time +[\d.]+ s$", out, re.MULTILINE)
    assert "\x1b" not in out


def test_text_depends_on_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def digests(*arguments: str) -> set[str]:
        return {digest for digest, _ in DIGEST.findall(printed(capsys, "text", "--steps", "1", *arguments))}

    first = digests("--replicas", "2")
    assert first == digests("--replicas", "2", "--seed", "0")
    assert first != digests("--replicas", "2", "--seed", "1")


def test_text_with_different_weights_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    train = text._train

    async def train_apart(*args: object) -> object:
        learner, _ = await train(*args)  # type: ignore[arg-type]
        return learner, [1, 2]

    monkeypatch.setattr(text, "_train", train_apart)
    assert "DIFFERENT" in printed(capsys, "text", "--steps", "1", "--replicas", "2", code=1)


def test_mismatch_prints_the_program_and_the_report_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "mismatch")
    numbered = dict(re.findall(r"^ *(\d+)  +(\S.*)$", out, re.MULTILINE))
    (barrier,) = (number for number, line in numbered.items() if "ctx.barrier()" in line)
    (reduction,) = (number for number, line in numbered.items() if "ctx.all_reduce(" in line)
    report = out[out.index("CollectiveMismatchError: replicas disagree at collective #2") :]
    assert re.search(rf"^ *> replica 2 +CPU:2 +barrier\(\)\s+\S*mismatch\.py:{barrier} in learn$", report, re.MULTILINE)
    others = rf"^ +replicas 0, 1 and 3 .*all_reduce\(MEAN, .*\s+\S*mismatch\.py:{reduction} in learn$"
    assert re.search(others, report, re.MULTILINE)
    assert "exit code is 0" in out


@pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals are POSIX here")
def test_ctrl_c_ends_text_with_one_line() -> None:
    code, output = interrupt_command("demo", "text", "--steps", "1000000", when="bits/char")
    assert (code, output.splitlines()[-1]) == (130, "interrupted")
    assert "\x1b[1m" in output
    assert "Error" not in output


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_text_on_unequal_workers_ends_with_equal_weights() -> None:
    ended = run_command("demo", "text", "--steps", "2", "--workers", "2", "--replicas", "3")
    assert ended.returncode == 0, ended.stdout
    digests = DIGEST.findall(ended.stdout)
    assert [replica for _, replica in digests] == ["0", "1", "2"]
    assert len({digest for digest, _ in digests}) == 1
    assert "equal in every bit" in ended.stdout


def test_text_in_a_job_of_another_size_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIODIST_WORKERS", "3")
    assert "--workers 2 in a job of 3" in usage_error(capsys, "demo", "text", "--workers", "2")
