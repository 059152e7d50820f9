"""Random programs over random groups give NumPy's numbers under every interleaving, in one task or in one a group."""

from __future__ import annotations

import random
from typing import NamedTuple

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import ReplicaContext
from tests.collective.random_programs import Steps, carry_out, programs
from tests.collective.runs import mirrored, run
from tests.collective.test_random_programs import Loop, on, on_every_loop, seeds


class Part(NamedTuple):
    """A stretch of a program: collectives of one group, whose members' ids stand in the group's order."""

    members: tuple[int, ...]
    steps: Steps


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, list[Part]]:
    """Draw a number of replicas, and what groups of them do."""
    replicas = draw(st.integers(2, 5))
    everyone = draw(st.permutations(range(replicas)))
    sizes = draw(st.lists(st.integers(2, replicas), min_size=1, max_size=5))
    drawn = [Part(tuple(draw(st.permutations(everyone))[:size]), draw(programs())) for size in sizes]
    return replicas, drawn


async def carry_out_part(part: Part, group: ReplicaContext | None, seed: int) -> None:
    if group is None:
        return
    results = await carry_out(group, part.steps, random.Random(seed + group.replica_id_in_sync_group))
    for step, result in zip(part.steps, results, strict=True):
        step.check(result, group.replica_id_in_sync_group, len(part.members))


@on_every_loop
@settings(max_examples=60)
@given(drawn=parts(), seed=seeds, racing=st.booleans())
def test_a_correct_program_with_groups_gives_numpys_numbers(
    loop: Loop, drawn: tuple[int, list[Part]], seed: int, racing: bool
) -> None:
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

    async def main() -> None:
        await run(mirrored(replicas), program)

    on(loop, main)
