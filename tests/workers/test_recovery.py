"""What becomes of lanes when runs fail: whatever comes first on which worker, all go on, and none waits for ever."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aiodist import CollectiveError, CommunicationOptions, ReplicaContext, get_replica_context
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio


async def _fail(ctx: ReplicaContext, leader: int, unwound: anyio.Event, group: bool) -> None:
    """Bring a record on one worker only, and unwind when it is told to."""
    where = ctx.new_group(range(ctx.num_replicas_in_sync), "everyone") if group else ctx
    try:
        await where.barrier(name="both")
        if ctx.replica_id_in_sync_group == leader:
            await where.all_reduce("SUM", 1, CommunicationOptions(timeout_seconds=0.02))
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await unwound.wait()


@pytest.mark.parametrize("groups", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("workers", [2, 3])
async def test_runs_that_end_in_another_order_on_each_worker(workers: int, groups: tuple[bool, bool]) -> None:
    job = Job(*[1] * workers)

    async def one(strategy: Any) -> Any:
        rank = strategy._span[0]
        may_end = [anyio.Event(), anyio.Event()]
        ended = [anyio.Event(), anyio.Event()]

        async def run(k: int) -> None:
            with pytest.raises(CollectiveError):
                await strategy.run(lambda: _fail(get_replica_context(), k, may_end[k], groups[k]))
            ended[k].set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, 0)
            await anyio.sleep(0.01)
            tasks.start_soon(run, 1)
            await anyio.sleep(0.25)
            for k in (rank % 2, 1 - rank % 2):
                may_end[k].set()
                await ended[k].wait()

    assert await job.everywhere(one) == [None] * workers
    await job.check_that_it_works()
