"""Traces: their content for runs on every event loop, alone, consecutive and concurrent, and the file.

A file is read strictly by the rules of the Trace Event format. It is complete or absent, whatever happens.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiodist
from aiodist import CollectiveError, IndexedSlices, MirroredStrategy, ReduceOp, ReplicaContext
from aiodist._arrays import environment
from aiodist._core.call import Call, OrderCheck, Place
from aiodist._core.instrument import observing
from aiodist._core.ledger import Ledger
from aiodist._tools.trace.file import read_trace, replacing
from aiodist._tools.trace.recording import Recording
from aiodist._tools.trace.show import count_up
from tests.project.paths import environment as python_environment
from tests.runtime.programs import mirrored, run
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio

Event = dict[str, Any]

REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
}
AWAIT = {
    "collective", "run", "group", "number", "last", "completed", "error",
    "awaited", "replica", "call", "at", "bytes", "wait_ns", "ahead_ns",
}  # fmt: skip


async def traced(path: Path, program: Callable[[ReplicaContext], Awaitable[Any]], replicas: int = 3) -> list[Event]:
    """Run a program under a trace; return the events."""
    with aiodist.trace(path):
        await run(mirrored(replicas), program)
    return events_of(path)


def events_of(path: Path) -> list[Event]:
    """Read a trace file, and check every event and lane; return the events by time."""
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: 1 / 0)  # no NaN, no Infinity
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] == "ns"
    events: list[Event] = document["traceEvents"]
    for event in events:
        assert set(event) == REQUIRED[event["ph"]] | {"ph"}
        assert (type(event["pid"]), type(event["tid"]), type(event["name"])) == (int, int, str)
        assert min(event.get("ts", 0.0), event.get("dur", 0.0)) >= 0
    for event in collectives(events):
        assert set(event["args"]) == AWAIT
        assert event["args"]["wait_ns"] <= event["dur"] * 1e3 + 1
    events.sort(key=lambda event: (event.get("ts", 0.0), -event.get("dur", 0.0)))
    check_lanes(events)
    return events


def check_lanes(events: list[Event]) -> None:
    """Check that the slices of a lane are disjoint or nested, and that every lane has a name."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    lanes = defaultdict(list)
    for event in events:
        assert (event["pid"], event["tid"]) in named
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():
        open_ends: list[float] = []
        for begin, end in slices:
            while open_ends and open_ends[-1] <= begin + 0.0005:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.0015
            open_ends.append(end)


def collectives(events: list[Event]) -> list[Event]:
    """Return the slices of collectives."""
    return [event for event in events if event["ph"] == "X" and event["cat"] == "collective"]


# Runs.


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.json"


async def reduce_twice(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(ReduceOp.SUM, np.ones((2, 3), np.float32))
    await ctx.barrier()


async def test_each_replica_has_a_lane_with_a_slice_for_each_collective(file: Path) -> None:
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


@pytest.mark.filterwarnings("ignore:replica . never awaited")
async def test_handle_that_is_never_awaited_has_no_duration_and_bytes_are_per_replica(file: Path) -> None:
    async def program(ctx: ReplicaContext) -> None:
        rows = ctx.replica_id_in_sync_group
        ctx.barrier()
        await ctx.all_gather(np.zeros((rows, 5)), 0)
        await ctx.all_reduce("SUM", IndexedSlices(np.ones((rows, 2)), np.arange(rows), (5, 2)))

    events = collectives(await traced(file, program))
    found = sorted((e["name"], e["tid"] - 1, e["args"]["awaited"], e["args"]["bytes"], e["dur"] > 0) for e in events)
    gathers = [("all_gather", replica, True, 40 * replica, True) for replica in range(3)]
    reductions = [("all_reduce", replica, True, 24 * replica, True) for replica in range(3)]
    assert found == [*gathers, *reductions, *(("barrier", replica, False, 0, False) for replica in range(3))]


async def test_failure_of_a_replica_is_marked(file: Path) -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 1:
            raise ValueError("no </script> data")
        await ctx.barrier()

    with pytest.raises(ValueError, match="no"), aiodist.trace(file):
        await run(mirrored(2), program)
    functions = [e["args"] for e in events_of(file) if "end" in e["args"]]
    ends = {args["replica"]: (args["end"], args["error"]) for args in functions}
    assert ends == {0: ("cancelled", None), 1: ("failed", "ValueError: no </script> data")}


async def test_late_call_belongs_to_the_collective_that_has_failed(file: Path) -> None:
    async def program(ctx: ReplicaContext) -> None:
        match ctx.replica_id_in_sync_group:
            case 0:
                await anyio.lowlevel.checkpoint()
                raise ValueError("no data")
            case 1:
                await ctx.barrier()
            case _:
                try:
                    await anyio.sleep_forever()
                finally:
                    await ctx.barrier()

    with pytest.raises(ValueError, match="no data"), aiodist.trace(file):
        await run(mirrored(3), program)
    found = {(e["tid"] - 1, e["args"]["collective"], e["args"]["error"]) for e in collectives(events_of(file))}
    assert found == {(replica, 1, "IncompleteCollectiveError") for replica in (1, 2)}


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


async def test_run_that_outlasts_its_trace_ends_with_it(file: Path) -> None:
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
    (waiting,) = [e for e in collectives(events_of(file)) if e["args"]["completed"] is None]
    assert waiting["name"] == "all_reduce"
    assert waiting["args"]["wait_ns"] > 0


async def test_join_has_its_final_number(file: Path) -> None:
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
    found = sorted((e["args"]["group"] or "the run", e["args"]["number"], e["tid"] - 1) for e in events)
    pair = "group 'pair' of replicas 1 and 2"
    assert found == [(pair, 0, 1), (pair, 0, 2), ("the run", 0, 0), ("the run", 0, 1), ("the run", 0, 2)]


async def test_recorded_call_takes_little_memory() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(500):
            await ctx.all_reduce("SUM", 1.0)

    recording = Recording()
    with observing(recording):
        await run(mirrored(4), program)  # so that what is allocated once does not count
        gc.collect()
        tracemalloc.start()
        try:
            await run(mirrored(4), program)
            gc.collect()
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert taken / 2000 < 200


def test_calls_of_torch_ranks_count_no_bytes_if_they_are_unknown() -> None:
    """Their slots hold no values."""
    recording, ledger = Recording(), Ledger(range(1), OrderCheck.SIGNATURE)
    job: Any = SimpleNamespace(ledger=ledger, devices=("CPU:0",), clock=time.monotonic)
    recording.run_begun(job, "print")
    member = ledger.root.member_of(0)
    for shape in ((3,), (None,)):
        call = Call("all_gather", paths=("",), shapes=(shape,), dtypes=("bfloat16",), arrays=("torch",))
        recording.posted(member, ledger.root.post(member, call, Place("train.py", 1, 0, "step"), 0))
    assert [arrival.nbytes for each in recording.runs[0].collectives for arrival in each.arrivals] == [6, 0]


# On several workers, each trace has the replicas of its own process.


async def test_replicas_of_several_workers_have_their_ids(file: Path) -> None:
    with aiodist.trace(file):
        assert not any(isinstance(outcome, Exception) for outcome in await Job(1, 2).run(reduce_twice))
    events_of(file)
    trace = read_trace(file)
    runs = sorted((run.first, run.devices, list(run.functions)) for run in trace.runs)
    assert runs == [(0, ["CPU:0"], [0]), (1, ["CPU:0", "CPU:1"], [1, 2])]
    rows = count_up(trace).replicas
    assert sorted((row.replica, row.collectives) for row in rows) == [(0, 2), (1, 2), (2, 2)]


async def test_recorder_of_a_worker_has_the_ids_of_its_replicas() -> None:
    job = Job(1, 2)
    await job.run(reduce_twice)
    record = job.strategies[1].recorder.last
    assert record is not None
    lines = str(record).splitlines()
    assert lines[:2] == ["run of 2 replicas, ended", "  replicas 1 and 2"]
    assert lines[2].startswith("    #0  all_reduce(SUM, float32[2, 3])")
    with pytest.raises(IndexError, match="from 1 to 2, got 0"):
        record.calls(0)


@pytest.mark.parametrize(
    ("workers", "rank", "path"), [(1, 0, "a/run.json"), (2, 0, "a/run.0.json"), (12, 11, "a/run.11.json")]
)
def test_each_worker_has_its_own_file(monkeypatch: pytest.MonkeyPatch, workers: int, rank: int, path: str) -> None:
    variables = {"AIODIST_TRACE": "a/run.json", "AIODIST_WORKERS": str(workers), "PMI_RANK": str(rank)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.trace_path() == path


# The file.

PROGRAM = """
import asyncio, os, signal, sys
import aiodist

async def step():
    ctx = aiodist.get_replica_context()
    await ctx.barrier()
    if ctx.replica_id_in_sync_group == 1:
        exec(sys.argv[1])
    await ctx.barrier()

asyncio.run(aiodist.MirroredStrategy(["CPU:0", "CPU:1"]).run(step))
"""


def names(folder: Path) -> list[str]:
    """List a folder."""
    return sorted(path.name for path in folder.iterdir())


def run_traced(folder: Path, act: str, path: str = "run.json") -> subprocess.CompletedProcess[str]:
    """Run the program in a process, with AIODIST_TRACE."""
    command, variables = [sys.executable, "-c", PROGRAM, act], python_environment() | {"AIODIST_TRACE": path}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("act", "codes", "text"),
    [
        ("sys.exit(3)", {3}, ""),
        ("signal.raise_signal(signal.SIGINT)", {1, -signal.SIGINT}, "KeyboardInterrupt"),
    ],
)
def test_trace_of_a_process_is_complete_however_it_ends(tmp_path: Path, act: str, codes: set[int], text: str) -> None:
    done = run_traced(tmp_path, act)
    assert done.returncode in codes
    assert text in done.stderr
    assert len(collectives(events_of(tmp_path / "run.json"))) >= 2
    assert names(tmp_path) == ["run.json"]


def test_unwritable_trace_of_a_process_is_reported_at_its_first_run(tmp_path: Path) -> None:
    done = run_traced(tmp_path, "pass", "missing/run.json")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"OSError: cannot write {tmp_path}/missing/run.json: its folder")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("missing/run.json", r"cannot write .*run\.json: its folder does not exist"),
        (".", "it is not a regular file"),
        (os.devnull, "it is not a regular file"),
    ],
)
def test_unwritable_path_is_reported_before_the_block_begins(tmp_path: Path, path: str, text: str) -> None:
    with pytest.raises(OSError, match=text), aiodist.trace(tmp_path / path):
        pytest.fail("the block has begun")


def test_file_appears_once_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run.json")
    with replacing(tmp_path / "link") as file:
        file.write("text")
        assert not (tmp_path / "run.json").exists()
    assert (tmp_path / "run.json").read_text() == "text"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_at_the_end_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    (tmp_path / "run.json").write_text("before")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(type(error)) as caught, aiodist.trace(tmp_path / "run.json"):
        raise ValueError("the program's own")
    assert isinstance(caught.value.__context__, ValueError)
    assert isinstance(error, KeyboardInterrupt) or str(tmp_path / "run.json") in str(caught.value)
    assert (tmp_path / "run.json").read_text() == "before"
    assert names(tmp_path) == ["run.json"]


# Any program.

Programs: TypeAlias = list[tuple[int, list[str], int]]
"""For each program the number of replicas, the steps, and the step before which the first replica leaves."""
MADE = {"gather": 1, "barrier": 1, "overlap": 2, "yield": 0, "drop": 1}
"""The number of collectives in each kind of step."""


async def step(ctx: ReplicaContext, what: str) -> None:
    match what:
        case "gather":
            await ctx.all_gather(np.ones((ctx.replica_id_in_sync_group, 2), np.int16), 0)
        case "barrier":
            await ctx.barrier(name='a "name" </script>')
        case "overlap":
            first, second = ctx.barrier(), ctx.broadcast(np.ones(2))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_for, second)
                await first
        case "yield":
            for _ in range(ctx.replica_id_in_sync_group):
                await anyio.lowlevel.checkpoint()
        case "drop":
            ctx.barrier()


async def wait_for(handle: Awaitable[object]) -> None:
    await handle


async def run_all(programs: Programs) -> None:
    """Run programs at the same time; the first replica of each may leave early."""

    async def one(replicas: int, steps: list[str], leaves_at: int) -> None:
        async def replica() -> None:
            ctx = aiodist.get_replica_context()
            for what in steps[: leaves_at if ctx.replica_id_in_sync_group == 0 else None]:
                await step(ctx, what)

        with suppress(CollectiveError):
            await mirrored(replicas).run(replica)

    async with anyio.create_task_group() as tasks:
        for program in programs:
            tasks.start_soon(one, *program)


@pytest.mark.filterwarnings("ignore:replica . never awaited")
@settings(max_examples=25)
@given(
    programs=st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.sampled_from([*MADE]), max_size=8), st.integers(0, 20)),
        min_size=1,
        max_size=3,
    ),
    trio=st.booleans(),
)
def test_trace_of_any_program_is_valid(programs: Programs, trio: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with aiodist.trace(Path(folder) / "run.json") as path:
            anyio.run(run_all, programs, backend="trio" if trio else "asyncio")
        events = events_of(path)
    runs = {e["args"]["run"]: e for e in events if e["ph"] == "X" and e["cat"] == "run" and e["tid"] == 0}
    assert len(runs) == len(programs)
    whole = sum(n * sum(map(MADE.__getitem__, steps)) for n, steps, at in programs if at >= len(steps))
    assert len(collectives(events)) >= whole
    for event in collectives(events):
        run = runs[event["args"]["run"]]
        assert run["ts"] - 0.002 <= event["ts"]
        assert event["ts"] + event["dur"] <= run["ts"] + run["dur"] + 0.002
        completed, waited = event["args"]["completed"], event["args"]["wait_ns"] / 1e3
        if completed is not None and waited:
            assert event["ts"] + waited == pytest.approx(completed, abs=0.002)
