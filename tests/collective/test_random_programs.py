"""Correct programs give NumPy's numbers under every interleaving; one mutated replica is always found and named."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aiodist import CollectiveError, ReplicaContext
from aiodist.collective import group
from tests.collective.random_programs import MUTATIONS, Steps, carry_out, mutated, programs
from tests.collective.runs import check_that_it_works, mirrored, run

on_every_loop = pytest.mark.parametrize(
    "loop", [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})], ids=["asyncio", "uvloop", "trio"]
)
Loop = tuple[str, dict[str, Any]]
seeds = st.integers(0, 2**32)


@pytest.fixture(autouse=True, scope="module")
def unhurried() -> Any:
    """A verdict waits for the others at most this long; on a busy machine a tenth of a second can pass anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "GRACE_SECONDS", 15.0)
        yield


def on(loop: Loop, main: Callable[[], Awaitable[None]]) -> None:
    backend, options = loop
    anyio.run(main, backend=backend, backend_options=options)


@on_every_loop
@settings(max_examples=60)
@given(steps=programs(), replicas=st.integers(2, 5), seed=seeds)
def test_a_correct_program_gives_numpys_numbers(loop: Loop, steps: Steps, replicas: int, seed: int) -> None:
    async def program(ctx: ReplicaContext) -> None:
        replica_id = ctx.replica_id_in_sync_group
        results = await carry_out(ctx, steps, random.Random(seed + replica_id))
        for step, result in zip(steps, results, strict=True):
            step.check(result, replica_id, replicas)

    async def main() -> None:
        await run(mirrored(replicas), program)

    on(loop, main)


@on_every_loop
@settings(max_examples=70)
@given(
    steps=programs(),
    replicas=st.integers(2, 5),
    odd=st.integers(0, 4),
    how=st.sampled_from(MUTATIONS),
    at=st.integers(0, 5),
    seed=seeds,
)
def test_a_mutated_replica_is_found_and_named(
    loop: Loop, steps: Steps, replicas: int, odd: int, how: str, at: int, seed: int
) -> None:
    odd %= replicas
    mutation = mutated(steps, how, at % len(steps))
    assume(mutation is not None)
    assert mutation is not None

    async def program(ctx: ReplicaContext, seed: int) -> None:
        own = mutation.steps if ctx.replica_id_in_sync_group == odd else steps
        await carry_out(ctx, own, random.Random(seed + ctx.replica_id_in_sync_group))

    async def main() -> None:
        strategy = mirrored(replicas)
        texts = set()
        for interleaving in (seed, seed + replicas):
            with pytest.raises(CollectiveError) as caught:
                await run(strategy, partial(program, seed=interleaving))
            report = caught.value.report
            assert report.sequence_number == mutation.first
            assert report.suspects == (odd,) or replicas == 2  # of two, one that is missing may be the right one
            texts.add(f"{type(caught.value)}: {report.reason}: {report}")
        assert len(texts) == 1, "\n=====\n".join(texts)
        await check_that_it_works(strategy)

    on(loop, main)
