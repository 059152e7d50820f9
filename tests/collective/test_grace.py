"""Replicas that are ready have their turn before a verdict, also where the grace is over before anybody ran."""

from __future__ import annotations

import pytest
from anyio.lowlevel import checkpoint

from aiodist import Reason, ReplicaContext
from aiodist.collective import group
from tests.collective.runs import error_of

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def process_that_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the grace be over as it begins."""
    monkeypatch.setattr(group, "GRACE_SECONDS", 0.0)


async def test_those_who_are_ready_are_heard() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(3 * (ctx.replica_id_in_sync_group > 1)):
            await checkpoint()
        await (ctx.barrier() if ctx.replica_id_in_sync_group == 0 else ctx.all_reduce("SUM", 1))

    report = (await error_of(program, replicas=6)).report
    assert report.reason is Reason.KIND
    assert report.suspects == (0,)
    assert all(replica.state == "waiting" for replica in report.replicas)


async def test_one_that_goes_on_and_on_is_not_waited_for() -> None:
    async def program(ctx: ReplicaContext) -> None:
        while ctx.replica_id_in_sync_group == 2:
            await checkpoint()
        await (ctx.barrier() if ctx.replica_id_in_sync_group == 0 else ctx.all_reduce("SUM", 1))

    report = (await error_of(program, replicas=4)).report
    assert report.reason is Reason.KIND
    assert [replica.state for replica in report.replicas] == ["waiting", "waiting", "running", "waiting"]
