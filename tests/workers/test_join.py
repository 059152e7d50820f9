"""Joining across workers: the same meaning as on one machine, whoever of which worker runs out of data first."""

from __future__ import annotations

import random
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import IncompleteCollectiveError, IndexedSlices, ReplicaContext
from tests.runtime.programs import error_of
from tests.runtime.test_random_programs import seeds
from tests.workers.simulated import Job, Program, on_both_loops, on_one_machine, on_uvloop_too
from tests.workers.test_divergence import without_workers

LAYOUTS = [(1, 1, 1), (2, 1), (1, 2), (3,)]
pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_pauses")]


async def every_kind(ctx: ReplicaContext) -> Any:
    me = ctx.replica_id_in_sync_group
    mine = np.array([me + 1])
    seen: list[Any] = []
    for _ in range(me + 1):
        seen.append([(await ctx.all_reduce(op, mine))[0] for op in ("SUM", "MEAN", "MIN", "MAX", "PRODUCT")])
        seen.append((await ctx.all_gather(mine, 0)).tolist())
        seen.append((await ctx.broadcast(mine, 2)).tolist())
        seen.append(await ctx.all_reduce("SUM", me))
        await ctx.barrier()
    last = await ctx.join()
    return seen, last, await ctx.all_reduce("SUM", 1)


async def epochs(ctx: ReplicaContext) -> Any:
    me = ctx.replica_id_in_sync_group
    sums: list[Any] = []
    for epoch in range(3):
        sums += [await ctx.all_reduce("SUM", np.full(1000, me), name="step") for _ in range((me + epoch) % 3)]
        last = await ctx.join()
        sums.append((last, await ctx.broadcast(me, last), await ctx.all_reduce("SUM", 1)))
    return [np.asarray(value).tolist() for value in sums], ctx.member.sequence


async def rows_and_buffers(ctx: ReplicaContext) -> Any:
    me = ctx.replica_id_in_sync_group
    found: list[Any] = []
    if me != 1:
        out = {"a": np.zeros(2), "b": np.zeros(3)}
        assert await ctx.all_reduce("SUM", {"b": np.full(3, float(me)), "a": np.ones(2)}, out=out) is out
        rows = IndexedSlices(np.ones((1, 2)), np.array([me]), (4, 2))
        found = [out["a"].tolist(), out["b"].tolist(), (await ctx.all_reduce("SUM", rows)).indices.tolist()]
        found.append(float((await ctx.all_reduce("SUM", np.ones((1 << 18) + 1, np.float32)))[-1]))
    await ctx.join()
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("program", [every_kind, epochs, rows_and_buffers], ids=lambda p: p.__name__)
async def test_joining_means_what_it_means_on_one_machine(layout: tuple[int, ...], program: Program) -> None:
    async def as_text(ctx: ReplicaContext) -> str:
        return repr(await program(ctx))

    job = Job(*layout)
    assert await job.values(as_text) == list(await on_one_machine(as_text, 3))


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_to_all", "merge_call", "broadcast"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_what_needs_a_value_of_every_replica_is_refused(kind: str, layout: tuple[int, ...]) -> None:
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

    await Job(*layout).values(program)


@on_uvloop_too
async def test_many_workers_join() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        sums = [await ctx.all_reduce("SUM", 1) for _ in range(2 if me in (3, 64) else 1)]
        return str((sums, await ctx.join(), await ctx.all_reduce("SUM", 1)))

    outcomes = await Job(*[1] * 66).values(program)
    assert outcomes == [str(([66, 2] if i in (3, 64) else [66], 64, 66)) for i in range(66)]


# When replicas do not meet.


async def another_order(ctx: ReplicaContext) -> None:
    me = ctx.replica_id_in_sync_group
    await ctx.barrier()
    if me == 1:
        await ctx.all_reduce("SUM", 1.0)
    elif me in (2, 3):
        await ctx.barrier()
    await ctx.join()


async def one_ends_without(ctx: ReplicaContext) -> None:
    for _ in range(ctx.replica_id_in_sync_group):
        await ctx.barrier()
    if ctx.replica_id_in_sync_group != 3:
        await ctx.join()


async def one_ends_while_others_go_on(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group < 2:
        await ctx.join()
    elif ctx.replica_id_in_sync_group == 2:
        await ctx.barrier()


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 2), (3, 1), (1, 3)], ids=str)
@pytest.mark.parametrize(
    "program", [another_order, one_ends_without, one_ends_while_others_go_on], ids=lambda p: p.__name__
)
async def test_every_worker_raises_what_one_machine_would(layout: tuple[int, ...], program: Program) -> None:
    expected = await error_of(program, 4)
    job = Job(*layout)
    for outcome in await job.run(program):
        assert type(outcome) is type(expected), outcome
        assert without_workers(str(outcome)) == without_workers(str(expected))


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2)], ids=str)
async def test_one_that_fails_while_others_have_joined_is_named(layout: tuple[int, ...]) -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 2:
            await anyio.lowlevel.checkpoint()
            raise ZeroDivisionError("no data")
        await ctx.join()

    job = Job(*layout)
    *others, last = await job.run(program)
    assert isinstance(last, ZeroDivisionError)
    for outcome in others:
        assert isinstance(outcome, IncompleteCollectiveError)
        assert "Replica 2 raised ZeroDivisionError: no data" in str(outcome)


@on_both_loops
@settings(max_examples=25)
@given(
    counts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=2, max_size=5),
    cuts=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=seeds,
)
def test_any_uneven_loops_give_the_bits_of_one_worker(
    loop: Any, counts: list[list[int]], cuts: list[bool], seed: int
) -> None:
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

    anyio.run(main, backend=loop[0], backend_options=loop[1])
