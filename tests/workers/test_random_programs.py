"""Random programs of collectives on several workers, one replica of them mutated: every run ends, everywhere alike."""

from __future__ import annotations

import random
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodist import CollectiveError, ReplicaContext
from tests.workers.simulated import Job, Program, on_trio_too

LAYOUTS = [(2, 2), (1, 1, 1), (1, 3), (2, 1, 2), (1, 1)]
KINDS = ["sum", "barrier", "gather", "max", "merge"]
pytestmark = [pytest.mark.anyio, on_trio_too]


def steps_of(rng: random.Random, replicas: int) -> tuple[list[list[str]], int | None]:
    """Return each replica's steps, and the one whose are not the others'."""
    common = [rng.choice(KINDS) for _ in range(rng.randint(1, 6))]
    steps = [list(common) for _ in range(replicas)]
    bad, at = rng.randrange(replicas), rng.randrange(len(common))
    mutation = rng.choice(["none", "drop", "shuffle", "raise", "abandon", "return", "extra"])
    if mutation == "drop":
        del steps[bad][at]
    elif mutation == "shuffle":
        rng.shuffle(steps[bad])
    elif mutation == "return":
        del steps[bad][at:]
    elif mutation != "none":
        steps[bad].insert(at, rng.choice(KINDS) if mutation == "extra" else mutation)
    return steps, None if steps[bad] == common else bad


def issue(ctx: ReplicaContext, kind: str) -> Any:
    if kind == "sum":
        return ctx.all_reduce("SUM", np.ones(300))
    if kind == "max":
        return ctx.all_reduce("MAX", 1)
    if kind == "gather":
        return ctx.all_gather(np.ones(2), 0)
    if kind == "merge":
        return ctx.merge_call(lambda _: None)
    return ctx.barrier()


def program_of(rng: random.Random, steps: list[list[str]]) -> Program:
    turns = [[rng.choice([0, 0, 1, 2]) for _ in mine] for mine in steps]
    overlapped = rng.random() < 0.5

    async def program(ctx: ReplicaContext) -> None:
        r = ctx.replica_id_in_sync_group
        pending = []
        for kind, waits in zip(steps[r], turns[r], strict=True):
            for _ in range(waits):
                await anyio.lowlevel.checkpoint()
            if kind == "raise":
                raise ValueError("bad batch")
            if kind == "abandon":
                with anyio.move_on_after(0.001):
                    await ctx.barrier()
            elif overlapped:
                pending.append(issue(ctx, kind))
            else:
                await issue(ctx, kind)
        for handle in pending:
            await handle

    return program


@pytest.mark.parametrize("seed", range(5))
async def test_every_run_ends_on_every_worker_alike(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        layout = rng.choice(LAYOUTS)
        steps, culprit = steps_of(rng, sum(layout))
        job = Job(*layout)
        outcomes = await job.run(program_of(rng, steps))
        if culprit is None:
            assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        else:
            assert all(isinstance(outcome, (CollectiveError, ValueError)) for outcome in outcomes), outcomes
            reports = {str(o) for o in outcomes if isinstance(o, CollectiveError)}
            assert len(reports) <= 1
