"""What workers keep of runs that are over: nothing of the program's, and of verdicts a few."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from aiodist import ReplicaContext
from aiodist.workers.tribunal import Coordinator
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio


class Payload:
    """What a replica's function has in its hands."""


def coordinator_of(job: Job) -> Coordinator:
    found: Any = job.strategies[0]._team._control
    coordinator: Coordinator = found._switchboard._coordinator
    return coordinator


async def test_failed_runs_keep_nothing_of_the_program_alive() -> None:
    jobs, payloads = [Job(1, 1) for _ in range(6)], list[weakref.ref[Payload]]()

    async def fails(ctx: ReplicaContext) -> None:
        payload = Payload()
        payloads.append(weakref.ref(payload))
        if ctx.replica_id_in_sync_group:
            raise ValueError("planted")
        await ctx.barrier()

    async def parts(ctx: ReplicaContext) -> None:
        payload = Payload()
        payloads.append(weakref.ref(payload))
        await (ctx.barrier() if ctx.replica_id_in_sync_group else ctx.all_reduce("SUM", 1.0))

    for job in jobs[:3]:
        await job.run(fails)
    for job in jobs[3:]:
        await job.run(parts)
    gc.collect()
    assert len(payloads) == 12
    assert not [payload for payload in payloads if payload() is not None]


async def test_groups_of_runs_that_are_over_are_forgotten() -> None:
    job = Job(1, 1)

    async def program(ctx: ReplicaContext) -> None:
        await ctx.new_group([0, 1]).barrier()

    for _ in range(5):
        assert await job.values(program) == [None, None]
    book = coordinator_of(job)._book
    assert not book._asked
    assert not book._left_by
    assert len(book._lanes) == 1
