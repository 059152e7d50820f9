"""The first worker judges for all: where it is lost or ends before it has, nobody waits for the verdict for ever."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from aiodist import IncompleteCollectiveError, ReplicaContext, WorkerLostError, get_replica_context
from aiodist.workers.simulated_control import SimulatedSwitchboard
from tests.workers.over_tcp import strategies
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio


async def _fail_on_the_first(ctx: ReplicaContext) -> None:
    await ctx.barrier()
    if ctx.replica_id_in_sync_group == 0:
        raise ValueError("bad batch")
    await ctx.barrier()


async def test_judge_that_is_lost_when_all_have_told_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1, 1, 1)
    told = anyio.Event()
    monkeypatch.setattr(SimulatedSwitchboard, "_tell", lambda *_: told.set())

    async def lose() -> None:
        await told.wait()
        await anyio.wait_all_tasks_blocked()
        job.cluster.lose(0, "has died")

    outcomes: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose)
        outcomes += await job.run(_fail_on_the_first)
    first, *others = outcomes
    assert isinstance(first, (ValueError, WorkerLostError))
    assert [type(other) for other in others] == [WorkerLostError] * 2
    assert "worker 0 of 3 has died" in str(others[0])


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_judge_that_ends_judges_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `sys.exit` in a replica ends the program: nothing awaits the verdict there."""
    workers = strategies(2)
    team = workers[0]._team
    outcomes: list[Any] = [None] * 2

    def report_and_end(*told: Any) -> None:
        team._control.report(*told)
        threading.Thread(target=team.close).start()

    async def one(rank: int) -> None:
        try:
            await workers[rank].run(lambda: _fail_on_the_first(get_replica_context()))
        except Exception as error:  # noqa: BLE001  (it is the outcome)
            outcomes[rank] = error

    monkeypatch.setattr(team, "report", report_and_end)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for rank in range(2):
                tasks.start_soon(one, rank)
    for strategy in workers:
        strategy.close()
    assert [type(outcome) for outcome in outcomes] == [ValueError, IncompleteCollectiveError]
    assert isinstance(outcomes[1].__cause__, ValueError)
