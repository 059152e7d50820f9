"""`aiodist demo text` on several workers, which all end with the weights of one worker alone."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.tools.command import behind_pipe, exit_code


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_workers_of_unequal_numbers_of_replicas_end_with_equal_weights() -> None:
    ended = behind_pipe(["demo", "text", "--steps", "2", "--workers", "2", "--replicas", "3"])
    assert ended.code == 0, ended.output
    assert len(set(re.findall(r"([0-9a-f]{16})  replica \d", ended.output))) == 1
    assert ended.output.count("  replica ") == 3
    assert "equal in every bit" in ended.output


def test_job_of_another_size_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AIODIST_WORKERS", "3")
    assert exit_code("demo", "text", "--workers", "2") == 2
    assert "--workers 2 in a job of 3" in capsys.readouterr().err
