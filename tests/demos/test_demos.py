"""Every demo from the command line, for a few steps: what it prints, and what its exit code means."""

from __future__ import annotations

import importlib.util
import re

import pytest

from aiodist._demos import text
from aiodist._tools.cli import main
from tests.tools.command import behind_pipe, exit_code

DIGEST = re.compile(r"\b([0-9a-f]{16})  replica (\d+)  (CPU:\d+)")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Run a command that must end with `code`; return what it prints."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_text_tells_all_that_a_person_wants_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "demo", "text", "--steps", "4")
    assert re.search(r"^input +pydoc_data\.topics, [\d,]+ characters, sha256 [0-9a-f]{16}$", out, re.MULTILINE)
    assert re.search(r"^4 replicas, step 4 of 4: \d\.\d\d bits/char, \d+ steps/s$", out, re.MULTILINE)
    assert re.search(r"^held out +\d\.\d\d bits/char; \d+% of next characters", out, re.MULTILINE)
    assert '\n  The "replica" statement\n  ***' in out
    assert [match.groups()[1:] for match in DIGEST.finditer(out)] == [(str(n), f"CPU:{n}") for n in range(4)]
    assert len({match[1] for match in DIGEST.finditer(out)}) == 1
    assert "equal in every bit" in out
    assert re.search(r"^time +[\d.]+ s; .*computing [\d.]+, reducing [\d.]+, waiting [\d.]+$", out, re.MULTILINE)
    assert "\x1b" not in out


def test_text_depends_on_the_seed_and_runs_on_the_devices_named(capsys: pytest.CaptureFixture[str]) -> None:
    def ran(*arguments: str) -> list[tuple[str, ...]]:
        return DIGEST.findall(printed(capsys, "demo", "text", "--steps", "1", *arguments))

    first, again = ran("--replicas", "2"), ran("--devices", "cpu:3,/cpu:1", "--seed", "0")
    assert [device for _, _, device in again] == ["CPU:3", "CPU:1"]
    assert {digest for digest, *_ in first} == {digest for digest, *_ in again}
    assert {digest for digest, *_ in first} != {digest for digest, *_ in ran("--replicas", "2", "--seed", "1")}


def test_text_with_different_weights_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["0" * 16, "1" * 16])
    monkeypatch.setattr(text, "weights_digest", lambda _: next(digests))
    assert "DIFFERENT" in printed(capsys, "demo", "text", "--steps", "1", "--replicas", "2", code=1)


def test_mismatch_shows_the_report_with_the_lines_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "demo", "mismatch")
    numbered = dict(re.findall(r"^ *(\d+)  +(\S.*)$", out, re.MULTILINE))
    (barrier,) = (number for number, line in numbered.items() if "ctx.barrier()" in line)
    (reduction,) = (number for number, line in numbered.items() if "ctx.all_reduce(" in line)
    report = out[out.index("CollectiveMismatchError: replicas disagree at collective #2") :]
    assert re.search(rf"^ *> replica 2 +CPU:2 +barrier\(\)\s+\S*mismatch\.py:{barrier} in learn$", report, re.MULTILINE)
    others = rf"^ +replicas 0, 1 and 3 .*all_reduce\(MEAN, .*\s+\S*mismatch\.py:{reduction} in learn$"
    assert re.search(others, report, re.MULTILINE)
    assert "exit code is 0" in out


# On several workers.


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_workers_of_unequal_numbers_of_replicas_end_with_equal_weights() -> None:
    ended = behind_pipe(["demo", "text", "--steps", "2", "--workers", "2", "--replicas", "3"])
    assert ended.code == 0, ended.output
    assert len(set(re.findall(r"([0-9a-f]{16})  replica \d", ended.output))) == 1
    assert ended.output.count("  replica ") == 3
    assert "equal in every bit" in ended.output


def test_job_of_another_size_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AIODIST_WORKERS", "3")
    assert exit_code("demo", "text", "--workers", "2") == 2
    assert "--workers 2 in a job of 3" in capsys.readouterr().err
