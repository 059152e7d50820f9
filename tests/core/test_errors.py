"""Errors: their hierarchy, and that each keeps its report when it is copied or sent."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import aiodist
from aiodist import CollectiveError, CollectiveReport, Location, Reason, ReplicaReport, ReplicaState

ERRORS: list[type[CollectiveError]] = [
    aiodist.CollectiveMismatchError, aiodist.IncompleteCollectiveError, aiodist.CollectiveTimeoutError,
    aiodist.DeadlockError, aiodist.WorkerLostError,
]  # fmt: skip
TEXT = "replica 1 ended without collective #0"
REPORT = CollectiveReport(Reason.EXITED, 0, (ReplicaReport(1, "CPU:1", ReplicaState.EXITED),), (1,), TEXT)


def test_error_hierarchy() -> None:
    for error in ERRORS:
        assert issubclass(error, CollectiveError)
        assert issubclass(error, TimeoutError) == (error is aiodist.CollectiveTimeoutError)
    assert issubclass(CollectiveError, RuntimeError)
    assert issubclass(aiodist.ReplicaContextError, RuntimeError)
    assert not issubclass(aiodist.ReplicaContextError, CollectiveError)
    assert issubclass(aiodist.DeviceNotFoundError, ValueError)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_error_keeps_its_report_when_copied(kind: type[CollectiveError], copied: Callable[..., Any]) -> None:
    error = copied(kind(REPORT))
    assert type(error) is kind
    assert error.report == REPORT
    assert str(error) == str(error.report) == TEXT
    assert f"{kind.__module__}.{kind.__qualname__}" == f"aiodist.{kind.__name__}"


def test_terms_of_reports_are_strings() -> None:
    assert (REPORT.reason, REPORT.replicas[0].state) == ("exited", "exited")
    assert [state for state in ReplicaState if not state.ended] == ["waiting", "running"]
    assert str(Location("train.py", 41, "step")) == "train.py:41 in step"
