"""Traces: what they tell of runs on every event loop, alone, one after the other, and beside others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import CollectiveError, MirroredStrategy, ReduceOp, ReplicaContext
from aiodist._tools.trace import recording
from tests.runtime.programs import Relay, mirrored, run
from tests.tools.trace.traced import collectives, events_of, traced

pytestmark = pytest.mark.anyio


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.json"


async def reduce_twice(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(ReduceOp.SUM, np.ones((2, 3), np.float32))
    await ctx.barrier()


async def test_every_replica_has_a_lane_and_in_it_a_slice_for_each_collective(file: Path) -> None:
    events = await traced(file, reduce_twice, 2)
    lanes = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert lanes == ["runs", "replica 0 CPU:0", "replica 1 CPU:1"]
    slices = collectives(events)
    assert Counter((e["tid"], e["args"]["number"]) for e in slices) == {(t, n): 1 for t in (1, 2) for n in (0, 1)}
    assert {(e["name"], e["args"]["call"], e["args"]["bytes"]) for e in slices} == {
        ("all_reduce", "all_reduce(SUM, float32[2, 3])", 24),
        ("barrier", "barrier()", 0),
    }
    assert {e["args"]["at"].partition(":")[0] for e in slices} == {"tests/tools/trace/test_trace.py"}


async def test_last_to_come_waits_for_nobody(file: Path) -> None:
    turns = Relay([2, 0, 1])

    async def program(ctx: ReplicaContext) -> None:
        await turns.turn()
        handle = ctx.barrier()
        turns.pass_on()
        await handle

    events = collectives(await traced(file, program))
    assert {e["args"]["last"] for e in events} == {1}
    assert [e["tid"] - 1 for e in events if e["args"]["wait_ns"] == 0] == [1]


@pytest.mark.filterwarnings("ignore:replica . never awaited")
async def test_handles_that_nobody_awaits_have_no_length_and_are_not_kept_until_the_run_ends(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr(recording, "MOST_OPEN", 4)

    class Run(recording.Run):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.append(self.open)

    monkeypatch.setattr(recording, "Run", Run)

    async def program(ctx: ReplicaContext) -> None:
        for _ in range(20):
            ctx.barrier()
            await ctx.all_reduce("SUM", 1.0)
        assert len(kept[0]) <= 4

    events = collectives(await traced(file, program, 2))
    assert Counter((e["name"], e["args"].get("awaited", True)) for e in events) == {
        ("barrier", False): 40, ("all_reduce", True): 40,
    }  # fmt: skip
    assert {e["dur"] for e in events if e["name"] == "barrier"} == {0}


async def test_bytes_are_each_replicas_own_where_they_differ(file: Path) -> None:
    async def program(ctx: ReplicaContext) -> None:
        await ctx.all_gather(np.zeros((ctx.replica_id_in_sync_group, 5)), 0)

    events = collectives(await traced(file, program))
    assert {e["tid"] - 1: e["args"]["bytes"] for e in events} == {0: 0, 1: 40, 2: 80}


async def test_disagreement_is_marked(file: Path) -> None:
    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == 2:
            await ctx.barrier()
        await ctx.all_reduce("SUM", 1.0)

    with pytest.raises(CollectiveError) as caught, aiodist.trace(file):
        await run(mirrored(3), program)
    events = events_of(file)
    (verdict,) = [e for e in events if e["name"] == "CollectiveMismatchError"]
    assert verdict["args"] == {
        "run": 1, "reason": "kind", "number": 1, "suspects": [2], "text": str(caught.value.report),
    }  # fmt: skip
    calls = {e["tid"] - 1: e["args"]["call"] for e in collectives(events) if e["args"]["number"] == 1}
    assert calls == {0: "all_reduce(SUM, float)", 1: "all_reduce(SUM, float)", 2: "barrier()"}
    assert sum(e["ph"] == "i" for e in events) == 4


async def test_failure_of_a_replica_is_marked(file: Path) -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 1:
            raise ValueError("no </script> data")
        await ctx.barrier()

    with pytest.raises(ValueError, match="no"), aiodist.trace(file):
        await run(mirrored(2), program)
    ends = {e["tid"] - 1: (e["name"], e["args"].get("error")) for e in events_of(file) if e["ph"] == "i"}
    assert ends == {0: ("cancelled", None), 1: ("failed", "ValueError: no </script> data")}


async def test_consecutive_runs_share_lanes_and_concurrent_ones_do_not(file: Path) -> None:
    with aiodist.trace(file):
        strategy = mirrored(2)
        await run(strategy, reduce_twice)
        await run(strategy, reduce_twice)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, mirrored(3), reduce_twice)
            tasks.start_soon(run, mirrored(3), reduce_twice)
    runs = [(e["pid"], e["name"]) for e in events_of(file) if e["tid"] == 0 and e["ph"] == "X"]
    assert runs == [(1, "run 1: replica"), (1, "run 2: replica"), (2, "run 3: replica"), (3, "run 4: replica")]


def test_trace_encloses_event_loops(file: Path) -> None:
    async def replica() -> None:
        await aiodist.get_replica_context().barrier()

    async def main() -> None:
        await MirroredStrategy(["CPU:0", "CPU:1"]).run(replica)

    begin = time.monotonic()
    with aiodist.trace(file):
        asyncio.run(main())
        anyio.run(main, backend="trio")
        anyio.run(main, backend="trio")
    took = (time.monotonic() - begin) * 1e6
    runs = [e for e in events_of(file) if e["tid"] == 0 and e["ph"] == "X"]
    assert len(runs) == 3
    assert runs[-1]["ts"] + runs[-1]["dur"] < took  # although the clock of every trio run begins elsewhere


async def test_run_that_outlasts_its_trace_is_shown_as_far_as_it_came(file: Path) -> None:
    reached = anyio.Event()

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        if ctx.replica_id_in_sync_group:
            reached.set()
            await anyio.Event().wait()
        await ctx.all_reduce("SUM", 1.0)

    async with anyio.create_task_group() as tasks:
        with aiodist.trace(file):
            tasks.start_soon(run, mirrored(2), program)
            await reached.wait()
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    (waiting,) = [e for e in collectives(events_of(file)) if e["args"].get("incomplete")]
    assert waiting["name"] == "all_reduce"
    assert waiting["args"]["wait_ns"] > 0


async def test_join_has_the_number_that_it_gets_in_the_end(file: Path) -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(ctx.replica_id_in_sync_group):
            await ctx.barrier()
        await ctx.join()
        await ctx.barrier()

    events = collectives(await traced(file, program, 2))
    found = [(e["tid"] - 1, e["name"], e["args"]["number"]) for e in events]
    assert sorted(found) == [(0, "barrier", 2), (0, "join", 1), (1, "barrier", 0), (1, "barrier", 2), (1, "join", 1)]


async def test_groups_are_named_and_use_their_replicas_lanes(file: Path) -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group:
            pair = ctx.new_group([2, 1], name="pair")
            with pair:
                await pair.barrier()
        await ctx.barrier()

    events = collectives(await traced(file, program))
    found = sorted((e["args"].get("group", "the run"), e["args"]["number"], e["tid"] - 1) for e in events)
    pair = "group 'pair' of replicas 1 and 2"
    assert found == [(pair, 0, 1), (pair, 0, 2), ("the run", 0, 0), ("the run", 0, 1), ("the run", 0, 2)]
