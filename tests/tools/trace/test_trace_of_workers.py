"""Traces and records of runs on several workers: each has the replicas of its own process, by their ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist import ReplicaContext
from aiodist._arrays import environment
from aiodist._tools.trace.page import page_of
from aiodist._tools.trace.reader import TraceFile, read_trace
from aiodist._tools.trace.summary import count_up
from tests.tools.trace.traced import events_of
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio


async def meet(ctx: ReplicaContext) -> None:
    await ctx.barrier()
    pair = ctx.new_group([1, 2]) if ctx.replica_id_in_sync_group in (1, 2) else None
    if pair is not None:
        await pair.all_reduce("SUM", 1.0)
    await ctx.all_reduce("SUM", 1.0)


async def part(ctx: ReplicaContext) -> None:
    await ctx.barrier()
    if ctx.replica_id_in_sync_group == 2:
        await ctx.all_reduce("SUM", 1.0)
    await ctx.all_reduce("MAX", 1.0)


async def traced(path: Path, program: Any) -> TraceFile:
    with aiodist.trace(path):
        outcomes = await Job(1, 2).run(program)
    assert program is part or not any(isinstance(outcome, Exception) for outcome in outcomes)
    events_of(path)
    return read_trace(path)


async def test_every_worker_s_replicas_have_their_ids(tmp_path: Path) -> None:
    trace = await traced(tmp_path / "run.json", meet)
    assert sorted(trace.devices.values(), key=min) == [{0: "CPU:0"}, {1: "CPU:0", 2: "CPU:1"}]
    assert sorted(sorted(run.functions) for run in trace.runs.values()) == [[0], [1, 2]]
    arrived = sorted(sorted(each.replica for each in one.arrivals) for one in trace.collectives)
    assert arrived == [[0], [0], [1, 2], [1, 2], [1, 2]]
    rows = count_up(trace).replicas
    assert sorted((row.replica, row.collectives) for row in rows) == [(0, 2), (1, 3), (2, 3)]


async def test_page_counts_lanes_from_the_first_replica(tmp_path: Path) -> None:
    trace = await traced(tmp_path / "run.json", part)
    page = page_of(trace, "run.json")
    data = json.loads(page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])
    assert sorted((track["base"], len(track["devices"])) for track in data["tracks"]) == [(0, 1), (1, 2)]
    assert {run["base"]: run["report"]["suspects"] for run in data["runs"]} == {0: [], 1: [1]}


async def test_recorder_knows_replicas_by_their_ids() -> None:
    job = Job(1, 2)
    await job.run(meet)
    record = job.strategies[1].recorder.last
    assert record is not None
    calls = ["barrier()", "all_reduce(SUM, float)"]
    assert [[call.call for call in record.calls(i) if call.group is None] for i in (1, 2)] == [calls, calls]
    assert str(record).startswith("run of 2 replicas, ended\n  replicas 1 and 2\n    #0  barrier()")
    with pytest.raises(IndexError, match="from 1 to 2, got 0"):
        record.calls(0)


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, "a/run.json"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "a/run.0.json"),
        ({"AIODIST_WORKERS": "12", "PMI_RANK": "11"}, "a/run.11.json"),
    ],
)
def test_each_worker_has_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], path: str
) -> None:
    for name in ("AIODIST_WORKERS", "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"AIODIST_TRACE": "a/run.json"} | settings).items():
        monkeypatch.setenv(name, value)
    assert environment.trace_path() == path
