"""Records of collectives, on any event loop, and their comparison."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodist import MirroredStrategy, ReduceOp, get_replica_context
from aiodist.testing import assert_same_collectives, record_collectives, run_replicas

CALLS = ["all_reduce(SUM, float32[2])", "barrier()", "all_gather(float64[*], axis=0)"]


async def program() -> None:
    ctx = get_replica_context()
    await ctx.all_reduce(ReduceOp.SUM, np.ones(2, np.float32))
    await ctx.barrier()
    await ctx.all_gather(np.ones(ctx.replica_id_in_sync_group + 1), 0)


async def other_program() -> None:
    ctx = get_replica_context()
    await ctx.all_reduce(ReduceOp.SUM, np.ones(2, np.float32))
    await ctx.all_gather(np.ones(ctx.replica_id_in_sync_group + 1), 0)


def test_collectives_are_recorded_with_their_places_on_any_event_loop() -> None:
    with record_collectives() as record:
        run_replicas(program, 3)
    assert record.calls == CALLS
    assert [r.sequence_number for r in record] == [0, 1, 2]
    assert record[0].location.function == "program"
    for backend in ("asyncio", "trio"):
        with record_collectives() as record:
            anyio.run(MirroredStrategy(["CPU:0", "CPU:1"]).run, program, backend=backend)
        assert record.calls == CALLS


def test_only_runs_that_begin_inside_are_recorded() -> None:
    async def main() -> list[str]:
        strategy, calls = MirroredStrategy(["CPU:0", "CPU:1"]), list[str]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(strategy.run, program)
            await anyio.lowlevel.checkpoint()
            with record_collectives() as record:
                await strategy.run(other_program)
                calls.extend(record.calls)
        return calls

    assert anyio.run(main) == [CALLS[0], CALLS[2]]


def test_same_collectives_are_the_same_whoever_makes_them() -> None:
    with record_collectives() as one:
        run_replicas(program, 2)
    with record_collectives() as two:
        run_replicas(program, 5)
    for left, right in ((one, two), (one, CALLS), (list(one), iter(two.calls)), ([], [])):
        assert_same_collectives(left, right)


def test_difference_is_shown_as_a_diff() -> None:
    with record_collectives() as record:
        run_replicas(other_program, 2)
    with pytest.raises(AssertionError) as caught:
        assert_same_collectives(record, CALLS)
    assert str(caught.value).splitlines() == [
        "the collectives differ: 2 calls, expected 3",
        "--- expected",
        "+++ actual",
        "@@ -1,3 +1,2 @@",
        f" {CALLS[0]}",
        f"-{CALLS[1]}",
        f" {CALLS[2]}",
    ]
