"""Calls that come again: what is known of them from before must not show in what they give.

What a call means, and its plan, are taken from tables where the same place has asked for the same before. Everything
that the plan depends on and the signature does not tell is varied here, at one place of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import CommunicationOptions, ReduceOp, ReplicaContext
from tests.workers.simulated import Job, on_one_machine
from tests.workers.test_values import same

pytestmark = pytest.mark.anyio
LAYOUTS = [(1, 1), (2, 1), (1, 1, 1)]
SIZES = {"in the record": 20, "in one segment": 3000, "in several": 300_000}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_results_that_were_handed_out_stay_as_they_are(layout: tuple[int, ...], size: int) -> None:
    async def program(ctx: ReplicaContext) -> list[Any]:
        r = ctx.replica_id_in_sync_group
        value = np.empty(size, np.float32)
        kept = []
        for step in range(4):
            value[...] = step + r  # the caller's own again, as soon as the step is complete
            kept.append(await ctx.all_reduce(ReduceOp.SUM, value))
        with pytest.raises(ValueError, match="read-only"):
            kept[0][0] = 1
        value[...] = -1
        return kept

    n = sum(layout)
    for kept in await Job(*layout).values(program):
        for step, total in enumerate(kept):
            np.testing.assert_array_equal(total, np.full(size, n * step + n * (n - 1) // 2, np.float32))


def askew(value: Any) -> Any:
    """Return an array whose numbers lie a byte beside where the machine wants them, as of a file behind a header."""
    found = np.empty(value.nbytes + 1, np.uint8)[1:].view(value.dtype).reshape(value.shape)
    found[...] = value
    return found


VALUES: list[Callable[[np.ndarray], Any]] = [
    lambda grid: grid,
    np.asfortranarray,
    lambda grid: grid.astype(np.float32),
    lambda grid: grid.astype(">f4"),
    lambda grid: grid.astype(np.int64),
    lambda grid: grid[0].astype(np.float16),
    lambda grid: {"a": grid, "b": [grid[0], grid[::2]]},
    lambda grid: {"a": grid.astype(np.float32), "b": np.ones(3, np.float32)},
    lambda grid: grid[:0],
    askew,
    lambda grid: float(grid[0, 0]),
]
"""Values of whole numbers, whose sums are exact in any order."""


@settings(max_examples=25)
@given(
    layout=st.sampled_from([*LAYOUTS, (2, 2)]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(VALUES), st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX]), st.booleans(),
            st.sampled_from(["native", "float64"]), st.booleans(),
        ),
        max_size=10,
    ),
)  # fmt: skip
def test_any_sequence_of_calls_at_one_place_gives_what_one_machine_gives(
    layout: tuple[int, ...], steps: list[Any]
) -> None:
    async def program(ctx: ReplicaContext) -> list[Any]:
        grid = np.arange(600.0).reshape(20, 30) % 50 + ctx.replica_id_in_sync_group
        group = ctx.new_group(range(ctx.num_replicas_in_sync - 1, -1, -1))
        found: list[Any] = []
        for make, op, at_once, accumulate, in_group in steps:
            where, options = group if in_group else ctx, CommunicationOptions(accumulate=accumulate)
            handle = where.all_reduce(op, make(grid), options)
            found.append(await handle if at_once else handle)
        return [found[i] if steps[i][2] else await found[i] for i in range(len(steps))]

    async def compare() -> None:
        same(await Job(*layout).values(program), list(await on_one_machine(program, sum(layout))))

    anyio.run(compare)


async def test_a_replica_that_only_meets_lets_other_tasks_run() -> None:
    async def program(ctx: ReplicaContext) -> int:
        ended = anyio.Event()
        steps = 0

        async def beside() -> None:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beside)
            while not await ctx.all_reduce("MIN", int(ended.is_set())):
                steps += 1
        return steps

    for layout in [(1,), (1, 1)]:
        assert all(steps > 0 for steps in await Job(*layout).values(program))
