"""The recorder: what each replica did last, while runs go on and after any end, on every event loop."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from aiodist import RecordedCall, ReplicaContext
from tests.runtime.programs import mirrored, run

pytestmark = pytest.mark.anyio


def told(calls: tuple[RecordedCall, ...]) -> list[tuple[int, str, bool]]:
    return [(call.sequence_number, call.call, call.complete) for call in calls]


async def test_last_run_is_recorded_for_every_replica() -> None:
    strategy = mirrored(3)
    recorder = strategy.recorder
    assert (recorder.running, recorder.last, str(recorder)) == ((), None, "no run yet")

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group != 1:
            await ctx.new_group([0, 2], name="pair").barrier()
        await ctx.all_reduce("SUM", np.ones(3, np.float32))

    await run(strategy, program)
    record, label = recorder.last, "group 'pair' of replicas 0 and 2"
    assert record is not None
    assert (record.devices, record.in_progress) == (("CPU:0", "CPU:1", "CPU:2"), False)
    assert [[call.group for call in record.calls(i)] for i in range(3)] == [[None, label], [None], [None, label]]
    assert told(record.calls(1)) == [(0, "all_reduce(SUM, float32[3])", True)]
    assert record.calls(0)[0].location.function == "program"
    with pytest.raises(IndexError, match="replica_id must be from 0 to 2, got 3"):
        record.calls(3)


async def test_run_in_progress_is_recorded_as_it_stands() -> None:
    strategy = mirrored(2)
    seen: list[list[tuple[int, str, bool]]] = []

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        if ctx.replica_id_in_sync_group:
            (record,) = strategy.recorder.running
            assert record.in_progress
            seen.extend([told(record.calls(0)), told(record.calls(1))])
        await ctx.all_reduce("SUM", 1.0)

    await run(strategy, program)
    assert seen == [[(0, "barrier()", True), (1, "all_reduce(SUM, float)", False)], [(0, "barrier()", True)]]
    assert strategy.recorder.running == ()


async def test_record_is_written_for_a_person() -> None:
    strategy = mirrored(4)

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == 3:
            raise ValueError("mine")
        await ctx.barrier()

    with pytest.raises(ValueError, match="mine"):
        await run(strategy, program)
    record = strategy.recorder.last
    assert record is not None
    lines = str(strategy.recorder).splitlines()
    assert lines[0] == "run of 4 replicas, ended"
    assert lines[1].startswith("  replicas 0-2")
    assert lines[2].startswith("    #0  barrier()   tests/strategy/test_recorder.py:")
    assert lines[3].endswith(" in program   open")
    assert lines[4].startswith("  replica 3")


async def test_record_keeps_no_value_alive() -> None:
    strategy = mirrored(2)
    kept: list[weakref.ref[np.ndarray]] = []

    async def program(ctx: ReplicaContext) -> None:
        value = np.ones(100)
        kept.append(weakref.ref(value))
        await ctx.all_reduce("SUM", value)
        if ctx.replica_id_in_sync_group:
            raise ValueError("mine")
        await ctx.all_reduce("MAX", value)

    with pytest.raises(ValueError, match="mine"):
        await run(strategy, program)
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
