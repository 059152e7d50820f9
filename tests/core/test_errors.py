"""Errors and reports: their hierarchy, and that they are values which can be kept and sent elsewhere."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle

import pytest

import aiodist
from aiodist import (
    CallRecord,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveReport,
    CollectiveTimeoutError,
    DeviceNotFoundError,
    IncompleteCollectiveError,
    Location,
    MirroredStrategy,
    Reason,
    ReplicaContextError,
    ReplicaReport,
    ReplicaState,
    get_replica_context,
)

ERRORS: list[type[CollectiveError]] = [CollectiveMismatchError, IncompleteCollectiveError, CollectiveTimeoutError]


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
    assert issubclass(CollectiveError, RuntimeError)
    assert issubclass(CollectiveTimeoutError, TimeoutError)
    assert not issubclass(CollectiveMismatchError, TimeoutError)
    assert issubclass(ReplicaContextError, RuntimeError)
    assert not issubclass(ReplicaContextError, CollectiveError)
    assert issubclass(DeviceNotFoundError, ValueError)


def test_timeout_is_caught_as_either() -> None:
    for kind in (TimeoutError, OSError, CollectiveError, RuntimeError):
        with pytest.raises(kind):
            raise CollectiveTimeoutError(report())


@pytest.mark.parametrize("kind", ERRORS)
def test_error_tells_its_report(kind: type[CollectiveError]) -> None:
    error = kind(report())
    assert error.report == report()
    assert str(error) == str(error.report) == "replica 1 ended without collective #0"
    assert f"{kind.__module__}.{kind.__qualname__}" == f"aiodist.{kind.__name__}"


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_error_is_copied_and_pickled(kind: type[CollectiveError], duplicate: object) -> None:
    assert callable(duplicate)
    error = duplicate(kind(report()))
    assert type(error) is kind
    assert error.report == report()
    assert str(error) == str(report())


@pytest.mark.parametrize("kind", [ReplicaContextError, DeviceNotFoundError])
def test_other_errors_are_pickled(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("text")))
    assert type(error) is kind
    assert error.args == ("text",)


def test_report_is_a_value() -> None:
    assert report() == report()
    assert hash(report()) == hash(report())
    assert pickle.loads(pickle.dumps(report())) == report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report().reason = Reason.KIND  # type: ignore[misc]


def test_words_of_the_report_are_strings() -> None:
    assert report().reason == "exited"
    assert report().replicas[0].state == "waiting"
    assert [str(state) for state in ReplicaState] == ["waiting", "running", "exited", "failed", "cancelled"]
    assert [state for state in ReplicaState if not state.ended] == ["waiting", "running"]


def test_reasons_in_the_order_in_which_they_are_looked_for() -> None:
    assert [str(reason) for reason in Reason] == [
        *["kind", "name", "reduce_op", "axis", "source", "merge_fn"],
        *["structure", "shape", "dtype", "device", "call_site"],
        *["exited", "abandoned", "timeout", "cycle", "deadlock", "livelock", "group", "unmatched", "worker_lost"],
    ]


def test_location_as_text() -> None:
    assert str(Location("train.py", 41, "step")) == "train.py:41 in step"


def test_error_of_a_real_run_is_pickled_whole() -> None:
    async def program() -> None:
        context = get_replica_context()
        await context.all_reduce("SUM", 1.0)
        await (context.barrier() if context.replica_id_in_sync_group else context.all_reduce("SUM", {"x": 1}))

    with pytest.raises(CollectiveMismatchError) as caught:
        asyncio.run(MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).run(program))
    error = caught.value
    again = pickle.loads(pickle.dumps(error))
    assert again.report == error.report
    assert str(again) == str(error)
    assert error.report.suspects == (0,)
    assert error.report.sequence_number == 1


def test_errors_are_importable_from_the_top() -> None:
    for kind in (*ERRORS, CollectiveError, ReplicaContextError, DeviceNotFoundError):
        assert getattr(aiodist, kind.__name__) is kind


def test_repr_is_one_line_as_asyncio_logs_it_of_a_task() -> None:
    longer = dataclasses.replace(report(), text="replica 1 ended without collective #0\n> replica 1  CPU:1")
    assert repr(IncompleteCollectiveError(longer)) == (
        "IncompleteCollectiveError('replica 1 ended without collective #0')"
    )
