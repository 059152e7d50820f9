"""Correct programs give NumPy's numbers under every interleaving; one mutated replica is always found and named."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import assume, given
from hypothesis import strategies as st

from aiodist import CollectiveError, ReplicaContext
from tests.runtime.programs import mirrored, run, still_works
from tests.runtime.random_programs import MUTATIONS, Steps, carry_out, mutated, programs

seeds = st.integers(0, 2**32)


@pytest.fixture(autouse=True, scope="module")
def unhurried() -> Iterator[None]:
    """A report waits for the others at most this long; on a busy machine a tenth of a second can pass anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aiodist._runtime.scheduler._SETTLE_SECONDS", 30.0)
        yield


class Part(NamedTuple):
    """A stretch of a program: collectives of one group, whose members' ids stand in the group's order."""

    members: tuple[int, ...]
    steps: Steps


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, list[Part]]:
    """Draw a number of replicas, and what groups of them do, the first of them all."""
    replicas = draw(st.integers(2, 5))
    everyone = draw(st.permutations(range(replicas)))
    sizes = [replicas, *draw(st.lists(st.integers(2, replicas), max_size=4))]
    return replicas, [Part(tuple(draw(st.permutations(everyone))[:size]), draw(programs())) for size in sizes]


async def carry_out_part(part: Part, group: ReplicaContext | None, seed: int) -> None:
    if group is None:
        return
    results = await carry_out(group, part.steps, random.Random(seed + group.replica_id_in_sync_group))
    for step, result in zip(part.steps, results, strict=True):
        step.check(result, group.replica_id_in_sync_group, len(part.members))


@given(drawn=parts(), seed=seeds, racing=st.booleans())
def test_a_correct_program_gives_numpys_numbers(drawn: tuple[int, list[Part]], seed: int, racing: bool) -> None:
    replicas, what = drawn

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        groups = [ctx.new_group(part.members) if me in part.members else None for part in what]
        async with anyio.create_task_group() as tasks:
            for part, group in zip(what, groups, strict=True):
                if racing:
                    tasks.start_soon(carry_out_part, part, group, seed)
                else:
                    await carry_out_part(part, group, seed)

    asyncio.run(run(mirrored(replicas), program))


@given(
    steps=programs(),
    replicas=st.integers(2, 5),
    odd=st.integers(0, 4),
    how=st.sampled_from(MUTATIONS),
    at=st.integers(0, 5),
    seed=seeds,
)
def test_a_mutated_replica_is_found_and_named(
    steps: Steps, replicas: int, odd: int, how: str, at: int, seed: int
) -> None:
    odd %= replicas
    mutation = mutated(steps, how, at % len(steps))
    assume(mutation is not None)
    assert mutation is not None

    async def program(ctx: ReplicaContext, seed: int) -> None:
        own = mutation[0] if ctx.replica_id_in_sync_group == odd else steps
        await carry_out(ctx, own, random.Random(seed + ctx.replica_id_in_sync_group))

    async def main() -> None:
        strategy = mirrored(replicas)
        texts = set()
        for interleaving in (seed, seed + replicas):
            with pytest.raises(CollectiveError) as caught:
                await run(strategy, partial(program, seed=interleaving))
            report = caught.value.report
            assert report.sequence_number == mutation[1]
            assert report.suspects == (odd,) or replicas == 2  # of two, one that is missing may be the right one
            texts.add(f"{type(caught.value)}: {report.reason}: {report}")
        assert len(texts) == 1, "\n=====\n".join(texts)
        await still_works(strategy)

    asyncio.run(main())


@given(counts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=2, max_size=4), seed=seeds)
def test_any_uneven_loops_add_up(counts: list[list[int]], seed: int) -> None:
    """Each inner list is a replica's: how many steps it makes in each epoch, before it joins."""
    replicas = len(counts)
    epochs = min(map(len, counts))

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        pauses = random.Random(seed + me)
        for epoch in range(epochs):
            for step in range(counts[me][epoch]):
                for _ in range(pauses.choice((0, 0, 1, 3))):
                    await checkpoint()
                active = [i for i in range(replicas) if counts[i][epoch] > step]
                value: Any = np.array([10.0**me])
                assert (await ctx.all_reduce("SUM", value)).tolist() == [sum(10.0**i for i in active)]
                assert (await ctx.all_gather(value, 0)).tolist() == [10.0**i for i in active]
            last = await ctx.join()
            assert counts[last][epoch] == max(counts[i][epoch] for i in range(replicas))

    asyncio.run(run(mirrored(replicas), program))
