"""What workers take from launchers, and what they tell `aiodist run`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiodist import MultiWorkerMirroredStrategy
from aiodist._workers.launcher import told_to_the_launcher


def test_torchrun_is_an_error_that_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    MultiWorkerMirroredStrategy().close()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"torchrun has started 4 processes.*: it needs MPI.*`aiodist run -n 4`"):
        MultiWorkerMirroredStrategy()


def test_rendezvouss_are_told_while_they_last_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_NOTES", str(tmp_path))
    rendezvous, met = (tmp_path / f"{kind}.{os.getpid()}" for kind in ("rendezvous", "met"))
    for count in ("1", "2"):
        with told_to_the_launcher():
            assert rendezvous.exists()
        assert not rendezvous.exists()
        assert met.read_text() == count
    with pytest.raises(TimeoutError), told_to_the_launcher():
        raise TimeoutError
    assert not rendezvous.exists()
    assert met.read_text() == "2"
