"""Groups and joins across workers, beside what `test_as_on_one_machine` shows of them."""

from __future__ import annotations

import random
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import IncompleteCollectiveError, ReplicaContext, ReplicaContextError
from tests.runtime.test_random_programs import seeds
from tests.workers.simulated import Job, on_uvloop_too

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_pauses")]


async def merged(strategy: Any, value: Any) -> Any:
    return await strategy.reduce("SUM", value, None), len(strategy.experimental_local_results(value))


@on_uvloop_too
async def test_a_merge_function_of_a_group_has_this_workers_values() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        if me < 2:  # both on one worker
            return await ctx.new_group([0, 1]).merge_call(merged, (me + 1.0,))
        group = ctx.new_group([2, 4] if me in (2, 4) else [3, 5])
        with pytest.raises(ReplicaContextError, match="in the merge function of the group of replicas"):
            await group.merge_call(merged, (1.0,))
        return await group.merge_call(lambda _, value: value, (me,))

    async def as_text(ctx: ReplicaContext) -> str:
        return repr(await program(ctx))

    assert await Job(2, 2, 2).values(as_text) == ["(3.0, 2)", "(3.0, 2)", "2", "3", "4", "5"]


async def test_who_waits_where_no_cancellation_reaches_hears_of_a_failure_also_behind_the_first_worker() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 0:
            return
        group = ctx.new_group([1, 2], "both")
        await group.barrier()
        if ctx.replica_id_in_sync_group == 2:
            raise LookupError("its own")
        with anyio.CancelScope(shield=True):
            await group.barrier()

    job = Job(1, 2)
    first, second = await job.run(program)
    assert isinstance(first, IncompleteCollectiveError), first
    assert repr(second) == "LookupError('its own')"


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_to_all", "merge_call", "broadcast"])
async def test_what_needs_a_value_of_every_replica_is_refused(kind: str) -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group != 1:
            arguments: dict[str, tuple[Any, ...]] = {
                "reduce_scatter": ("SUM", np.ones(3)),
                "all_to_all": (np.ones(3),),
                "merge_call": (print,),
                "broadcast": (np.ones(3), 1),
            }
            with pytest.raises(ValueError, match=f"{kind} needs .* replica 1 has joined"):
                await getattr(ctx, kind)(*arguments[kind])
        await ctx.join()

    await Job(2, 1).values(program)


async def test_many_workers_join() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        sums = [await ctx.all_reduce("SUM", 1) for _ in range(2 if me in (3, 64) else 1)]
        return str((sums, await ctx.join(), await ctx.all_reduce("SUM", 1)))

    outcomes = await Job(*[1] * 66).values(program)
    assert outcomes == [str(([66, 2] if i in (3, 64) else [66], 64, 66)) for i in range(66)]


async def test_one_that_fails_while_others_have_joined_is_named() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 2:
            await anyio.lowlevel.checkpoint()
            raise ZeroDivisionError("no data")
        await ctx.join()

    *others, last = await Job(1, 1, 1).run(program)
    assert isinstance(last, ZeroDivisionError)
    for outcome in others:
        assert isinstance(outcome, IncompleteCollectiveError)
        assert "Replica 2 raised ZeroDivisionError: no data" in str(outcome)


@settings(max_examples=20)
@given(
    counts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=2, max_size=5),
    cuts=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=seeds,
)
def test_any_uneven_loops_give_the_bits_of_one_worker(counts: list[list[int]], cuts: list[bool], seed: int) -> None:
    """Each inner list is a replica's: how many steps it makes in each epoch. Cuts say where a worker's replicas end."""
    replicas, several = len(counts), min(map(len, counts))
    ends = [i + 1 for i in range(replicas - 1) if cuts[i]]
    layout = [b - a for a, b in zip([0, *ends], [*ends, replicas], strict=True)]

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        pauses, found = random.Random(seed + me), []
        values = np.random.default_rng([seed, me])
        for epoch in range(several):
            for _ in range(counts[me][epoch]):
                for _ in range(pauses.choice((0, 0, 1, 3))):
                    await anyio.lowlevel.checkpoint()
                value = values.standard_normal(70).astype(np.float32)
                found += [await ctx.all_reduce("MEAN", value), await ctx.all_gather(value[:2], 0)]
            last = await ctx.join()
            assert counts[last][epoch] == max(counts[i][epoch] for i in range(replicas))
        return repr([array.tobytes() for array in found])

    async def main() -> None:
        alone = await Job(replicas, reduction="ordered").values(program)
        assert await Job(*layout, reduction="ordered").values(program) == alone

    anyio.run(main)
