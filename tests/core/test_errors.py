"""Errors and reports: their hierarchy, and that they are values which can be kept and sent elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import aiodist
from aiodist import (
    CallRecord,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveReport,
    CollectiveTimeoutError,
    DeadlockError,
    DeviceNotFoundError,
    IncompleteCollectiveError,
    Location,
    Reason,
    ReplicaContextError,
    ReplicaReport,
    ReplicaState,
    WorkerLostError,
)

ERRORS: list[type[CollectiveError]] = [
    CollectiveMismatchError, IncompleteCollectiveError, CollectiveTimeoutError, DeadlockError, WorkerLostError,
]  # fmt: skip


def report() -> CollectiveReport:
    place = Location("train.py", 41, "step")
    record = CallRecord(0, "barrier()", place)
    replicas = (
        ReplicaReport(0, "CPU:0", ReplicaState.WAITING, "barrier()", place, (record,), (place,)),
        ReplicaReport(1, "CPU:1", ReplicaState.EXITED),
    )
    return CollectiveReport(Reason.EXITED, 0, replicas, (1,), "replica 1 ended without collective #0")


def test_hierarchy() -> None:
    for error in ERRORS:
        assert issubclass(error, CollectiveError)
        assert getattr(aiodist, error.__name__) is error
        assert issubclass(error, TimeoutError) == (error is CollectiveTimeoutError)
    assert issubclass(CollectiveError, RuntimeError)
    assert issubclass(ReplicaContextError, RuntimeError)
    assert not issubclass(ReplicaContextError, CollectiveError)
    assert issubclass(DeviceNotFoundError, ValueError)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(
    "again", [lambda error: error, copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_error_tells_its_report_also_where_it_is_copied(kind: type[CollectiveError], again: Callable[..., Any]) -> None:
    error = again(kind(report()))
    assert type(error) is kind
    assert error.report == report()
    assert str(error) == str(error.report) == "replica 1 ended without collective #0"
    assert f"{kind.__module__}.{kind.__qualname__}" == f"aiodist.{kind.__name__}"


def test_words_of_the_report_are_strings() -> None:
    assert report().reason == "exited"
    assert report().replicas[0].state == "waiting"
    assert [state for state in ReplicaState if not state.ended] == ["waiting", "running"]
    assert str(Location("train.py", 41, "step")) == "train.py:41 in step"
