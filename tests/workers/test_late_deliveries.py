"""Random programs on a network that delivers late, in any order: what one machine gives, and what it reports."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import CollectiveError, ReplicaContext
from aiodist.collective import group
from tests.runtime.random_programs import MUTATIONS, Mutation, Steps, carry_out, mutated, programs
from tests.runtime.test_random_programs import Loop, on, seeds
from tests.workers.network import network
from tests.workers.simulated import Job, on_both_loops, on_one_machine
from tests.workers.test_divergence import without_workers

LAYOUTS = [(1, 1), (2, 1), (1, 2), (1, 1, 1), (2, 2), (1, 3), (1, 1, 1, 1), (2, 1, 2)]
RATES = [0.2, 0.5, 0.9]


@pytest.fixture(autouse=True, scope="module")
def unhurried() -> Any:
    """A verdict waits for the others at most this long; on a busy machine a tenth of a second can pass anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "GRACE_SECONDS", 1.0)
        yield


@st.composite
def faulty(draw: st.DrawFn) -> tuple[Steps, Mutation | None, int]:
    """Draw a program, what one replica does in its place, if it does, and which one."""
    steps = draw(programs())
    how = draw(st.sampled_from([None, *MUTATIONS]))
    mutation = None if how is None else mutated(steps, how, draw(st.integers(0, len(steps) - 1)))
    return steps, mutation, draw(st.integers(0, 4))


@on_both_loops
@settings(max_examples=100)
@given(
    drawn=faulty(),
    layout=st.sampled_from(LAYOUTS),
    seed=seeds,
    rate=st.sampled_from(RATES),
)
def test_any_program_gives_or_reports_what_one_machine_does(
    loop: Loop, drawn: Any, layout: tuple[int, ...], seed: int, rate: float
) -> None:
    steps, mutation, odd = drawn
    replicas = sum(layout)

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        own = mutation.steps if mutation is not None and me == odd % replicas else steps
        results = await carry_out(ctx, own, random.Random(seed + me))
        if mutation is None:
            for step, result in zip(steps, results, strict=True):
                if step.kind != "merge_call":  # which has the worker's own components
                    step.check(result, me, replicas)

    async def main() -> None:
        async with network(seed, rate):
            job = Job(*layout)
            if mutation is None:
                await job.values(program)
            else:
                with pytest.raises(CollectiveError) as expected:
                    await on_one_machine(program, replicas)
                for outcome in await job.run(program):
                    assert type(outcome) is expected.type
                    assert without_workers(str(outcome)) == without_workers(str(expected.value))

    on(loop, main)
