"""What a strategy leaves behind when it is closed, or dropped: no thread, no socket, no doubt about the engine."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist import MultiWorkerMirroredStrategy, ReplicaContext, Variable, WorkerLostError, get_replica_context
from aiodist.workers import tcp_control
from aiodist.workers.separate import unfinished
from tests.runtime.warned import warned
from tests.workers.over_tcp import strategies

pytestmark = pytest.mark.anyio

CONTROL = "aiodist control"


@pytest.fixture(params=[("asyncio", {})])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Control planes know nothing of event loops."""
    return request.param


def controls() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == CONTROL]


def join_controls() -> None:
    """Wait for control planes that are about to end."""
    for thread in controls():
        thread.join(10)
        assert not thread.is_alive()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that the test leaves no control plane, no file descriptor, and the engine to be brought to its end."""
    gc.collect()
    assert not controls()
    unfinished.clear()  # what other tests' workers have left in the midst, who are gone
    before = open_files()
    yield
    join_controls()
    gc.collect()
    assert open_files() <= before
    assert not unfinished


async def use(workers: Sequence[MultiWorkerMirroredStrategy]) -> None:
    """Let workers do what leaves references behind: variables, runs and operations."""

    async def replica() -> Any:
        ctx: ReplicaContext = get_replica_context()
        return await ctx.all_reduce("SUM", np.ones(3))

    async def one(strategy: MultiWorkerMirroredStrategy) -> None:
        with strategy.scope():
            variable = Variable(np.ones(2))
        await strategy.run(replica)
        assert await strategy.reduce("SUM", 1, None) == len(workers)
        assert variable.numpy().tolist() == [1, 1]

    async with anyio.create_task_group() as tasks:
        for strategy in workers:
            tasks.start_soon(one, strategy)


async def test_dropped_strategies_leave_when_they_are_collected(nothing_left: None) -> None:
    count = 50
    with warned() as told:
        for number in range(count):
            workers = strategies(2)
            if number % 10 == 0:
                await use(workers)
            del workers
            if number % 5 == 0:  # so that there are not a hundred threads at a time
                gc.collect()
        gc.collect()
    texts = [warning.text for warning in told if warning.category is ResourceWarning]
    assert len(texts) == len(told) == 2 * count
    assert all("was dropped with its connections open; call strategy.close()" in text for text in texts)


async def test_closed_strategies_leave_and_say_nothing(nothing_left: None) -> None:
    workers = strategies(3)
    await use(workers)
    for strategy in workers:
        strategy.close()
        strategy.close()
    assert not controls()


async def test_closed_strategy_is_asked_for_nothing_more(nothing_left: None) -> None:
    workers = strategies(2)
    await use(workers)
    workers[0].close()
    with pytest.raises(WorkerLostError, match="worker 0 of 2 has closed this strategy; it had replica 0"):
        await workers[0].reduce("SUM", 1, None)
    workers[1].close()


async def test_groups_are_asked_for_and_given_without_waiting_for_the_next_beat(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_control, "BEAT_SECONDS", 3600.0)
    workers = strategies(3)

    async def replica() -> Any:
        ctx: ReplicaContext = get_replica_context()
        if ctx.replica_id_in_sync_group == 0:
            return 0
        return [await ctx.new_group([1, 2]).all_reduce("SUM", step) for step in range(3)]

    found: list[Any] = [None] * len(workers)

    async def one(worker: int) -> None:
        found[worker] = await workers[worker].run(replica)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for worker in range(len(workers)):
                tasks.start_soon(one, worker)
    assert found == [0, [0, 2, 4], [0, 2, 4]]
    monkeypatch.undo()
    for strategy in workers:
        strategy.close()


async def test_worker_that_has_left_in_order_is_no_reason_to_leave_the_engine_as_it_is(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_control, "FAREWELL_SECONDS", 0.05)
    one, other = workers = strategies(2)
    await use(workers)
    heard, lose = threading.Event(), other._team.lose

    def lose_and_tell(rank: int, why: str) -> None:
        lose(rank, why)
        heard.set()

    monkeypatch.setattr(other._team, "lose", lose_and_tell)
    one.close()
    assert heard.wait(10)
    with pytest.raises(WorkerLostError, match="worker 0 of 2 has ended"):
        await other.reduce("SUM", 1, None)
    other.close()


async def test_worker_that_leaves_others_waiting_for_it_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_control, "FAREWELL_SECONDS", 0.05)
    one, other = workers = strategies(2)
    await use(workers)
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(WorkerLostError, match="worker 0 of 2 has ended"):
                await other.reduce("SUM", 1, None)

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        one.close()
    other.close()
    assert unfinished
    unfinished.clear()
