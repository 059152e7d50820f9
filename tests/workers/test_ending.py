"""How workers end, as the launcher is told: by themselves, or as an echo of what another one has done."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist import (
    CollectiveReport,
    CollectiveTimeoutError,
    IncompleteCollectiveError,
    ReplicaReport,
    ReplicaState,
    WorkerLostError,
)
from aiodist._core.errors import CollectiveError
from aiodist._core.report import Reason
from aiodist._workers import ending
from aiodist._workers.ending import is_echo


def error(kind: type[CollectiveError], *states: str) -> CollectiveError:
    replicas = tuple(ReplicaReport(k, "CPU:0", ReplicaState(state)) for k, state in enumerate(states))
    return kind(CollectiveReport(Reason.EXITED, 0, replicas, (), "told"))


@pytest.mark.parametrize(
    ("raised", "echo"),
    [
        (error(IncompleteCollectiveError, "failed", "waiting", "waiting", "waiting"), True),
        (error(IncompleteCollectiveError, "exited", "exited", "waiting", "running"), True),
        (error(IncompleteCollectiveError, "failed", "waiting", "failed", "waiting"), False),
        (error(IncompleteCollectiveError, "waiting", "waiting", "waiting", "exited"), False),
        (error(IncompleteCollectiveError, "waiting", "waiting", "waiting", "waiting"), False),
        (error(WorkerLostError, "failed", "running", "running", "running"), True),
        (error(WorkerLostError, "running", "running", "failed", "failed"), False),
        (error(CollectiveTimeoutError, "failed", "waiting", "waiting", "waiting"), False),
        (ValueError("bad batch"), False),
        (None, False),
    ],
)
def test_errors_that_others_have_caused(raised: BaseException | None, echo: bool) -> None:
    assert is_echo(raised, {2, 3}) is echo


def end(notes: Path, worker: int, code: int, at: int) -> None:
    note = notes / f"ended.{worker}"
    note.write_text(str(code))
    os.utime(note, (at, at))


def test_worker_does_not_wait_for_one_that_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI waits for all; this test ends where nobody does for it any more."""
    monkeypatch.setenv("AIODIST_NOTES", str(tmp_path))
    begun, may_end = threading.Event(), threading.Event()

    def of_library(_: Any) -> Any:
        def finalise() -> None:
            begun.set()
            end(tmp_path, 7, 1, at=1)
            may_end.wait()

        return finalise

    monkeypatch.setattr(ending, "_of_library", of_library)
    ending.finalise(SimpleNamespace(Is_finalized=lambda: False), os.getpid())
    assert begun.is_set()
    may_end.set()
