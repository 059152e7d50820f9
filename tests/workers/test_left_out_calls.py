"""A call that fails on one worker before its record is brought: who catches that is one call ahead of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist import CollectiveError, ReplicaContext
from aiodist.workers import coding
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Return the steps, and replicas, at which there is no memory for what is to be sent."""
    found: set[tuple[int, int]] = set()
    encode = coding.encode

    def encode_or_fail(value: Any) -> Any:
        if found and any(tuple(row) in found for array in value for row in array.reshape(-1, 2).tolist()):
            raise MemoryError("no room")
        return encode(value)

    monkeypatch.setattr("aiodist.workers.transfers.encode", encode_or_fail)
    return found


async def program(ctx: ReplicaContext) -> list[Any]:
    """Gather by step; a failed step is None."""
    found: list[Any] = []
    for step in range(4):
        try:
            found.append((await ctx.all_gather(np.array([step, ctx.replica_id_in_sync_group]), 0)).tolist())
        except MemoryError:
            found.append(None)
            continue
        expected = [x for replica_id in range(ctx.num_replicas_in_sync) for x in (step, replica_id)]
        assert found[-1] == expected, "values of several steps were put together"
    return found


@pytest.mark.parametrize("verify", ["ahead", "alongside"])
@pytest.mark.parametrize("counts", [(1, 1), (1, 2, 1)])
@pytest.mark.parametrize("failing", [{(1, 1)}, {(3, 1)}, {(1, 1), (2, 0)}])
async def test_what_others_bring_is_never_put_together_with_the_next_call(
    counts: tuple[int, ...], failing: set[tuple[int, int]], verify: str, lacking: set[tuple[int, int]]
) -> None:
    job = Job(*counts, verify=verify)
    lacking |= failing
    outcomes = await job.run(program)
    assert all(isinstance(outcome, CollectiveError) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    lacking.clear()
    await job.check_that_it_works()


async def test_a_call_that_failed_on_all_workers_is_left_out_by_all(lacking: set[tuple[int, int]]) -> None:
    job = Job(1, 1, 1)
    lacking |= {(1, 0), (1, 1), (1, 2)}
    for found in await job.run(program):
        assert [step is None for step in found[0]] == [False, True, False, False]
