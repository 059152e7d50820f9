"""Verdicts that a worker hears before its own engine shows it what they are about."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from aiodist import CollectiveMismatchError, get_replica_context
from aiodist.replica.team import Team
from aiodist.workers.tribunal import Verdict
from tests.workers.network import network
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio
LATE = 1


class Held(set[Hashable]):
    """Holds what a worker's engine brings, from a moment on until there is a verdict."""

    def __init__(self, verdicts: list[Verdict]) -> None:
        super().__init__()
        self._verdicts = verdicts
        self.begun = False

    def __contains__(self, channel: object) -> bool:
        return self.begun and not self._verdicts and isinstance(channel, tuple) and channel[::2][:2] == ("data", LATE)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "run"])
async def test_a_disagreement_that_is_seen_behind_the_verdict_is_no_breakdown(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: list[Verdict] = []
    held, job = Held(verdicts), Job(1, 1)

    async def replica() -> Any:
        ctx = get_replica_context()
        held.begun = True
        return await (ctx.barrier() if ctx.replica_id_in_sync_group else ctx.all_reduce("SUM", np.ones(3)))

    async def one(strategy: Any) -> Any:
        if inside:
            return await strategy.run(replica)
        held.begun = True
        if strategy is job.strategies[LATE]:
            return await strategy.gather(np.ones(2), 0)
        return await strategy.reduce("SUM", 1.0, None)

    async with network(seed=0) as net:
        net.held = held
        judge = Team._judge

        def judge_and_release(team: Team, key: Any, verdict: Verdict) -> None:
            judge(team, key, verdict)
            if team is job.strategies[LATE]._team:
                verdicts.append(verdict)
                net.release()

        monkeypatch.setattr(Team, "_judge", judge_and_release)
        assert [type(outcome) for outcome in await job.everywhere(one)] == [CollectiveMismatchError] * 2
        for _ in range(2):
            await job.check_that_it_works()
    assert len(verdicts) == 1
    assert not verdicts[0].broken
