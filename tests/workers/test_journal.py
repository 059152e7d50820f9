"""What a launcher concludes from the journal of a job, and how workers write it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiodist._workers.ending import Journal, noted_rendezvous


def journal(folder: Path, *lines: str) -> Journal:
    (folder / "journal").write_text("".join(f"{line}\n" for line in lines))
    return Journal(str(folder))


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], 0),
        (["ended 7 0"], 0),
        (["ended 7 0", "ended 8 1"], 1),
        (["ended 7 0", "ended 8 1", "ended 10 5", "ended 9 6"], 5),
    ],
)
def test_exit_code_is_that_of_the_first_that_has_failed_by_itself(tmp_path: Path, lines: list[str], code: int) -> None:
    assert journal(tmp_path, *lines).failure() == code


def test_workers_run_until_their_agents_say_that_they_have_ended(tmp_path: Path) -> None:
    started = "started 7 70 0", "started 8 80 1"
    found = journal(tmp_path, *started, "waits 7", "waits 8", "goes-on 8", "ended 7 0")
    assert found.running() == {8: 80}
    assert found.missing().startswith("; worker 1 (process 8 on ")
    assert not found.waits_in_vain()
    assert journal(tmp_path, *started, "ended 7 0", "waits 8").waits_in_vain()
    assert journal(tmp_path, "started 7 70 0", "waits 7").missing() == ""


def test_workers_note_their_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with noted_rendezvous():  # where there is no launcher, nobody is to know
        pass
    monkeypatch.setenv("AIODIST_NOTES", str(tmp_path))
    with noted_rendezvous():
        assert Journal(str(tmp_path)).waiting == {os.getpid()}
    assert Journal(str(tmp_path)).waiting == set()
