"""Any program gives a trace that is valid, complete, and consistent in its sums."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiodist
from aiodist import CollectiveError, ReplicaContext
from tests.runtime.programs import mirrored
from tests.tools.trace.traced import Event, collectives, events_of

STEPS = ("reduce", "gather", "barrier", "merge", "overlap", "yield", "drop")


async def step(ctx: ReplicaContext, what: str) -> None:
    """Do one step of a program."""
    match what:
        case "reduce":
            await ctx.all_reduce("SUM", {"a": np.ones(3), "b": 1})
        case "gather":
            await ctx.all_gather(np.ones((ctx.replica_id_in_sync_group, 2), np.int16), 0)
        case "barrier":
            await ctx.barrier(name='a "name" </script>')
        case "merge":
            await ctx.merge_call(lambda strategy: None)
        case "overlap":
            first, second = ctx.barrier(), ctx.broadcast(np.ones(2))

            async def later() -> None:
                await second

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(later)
                await first
        case "yield":
            for _ in range(ctx.replica_id_in_sync_group):
                await anyio.lowlevel.checkpoint()
        case "drop":
            ctx.barrier()


@pytest.mark.filterwarnings("ignore:replica . never awaited")
@settings(max_examples=25)
@given(
    programs=st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.sampled_from(STEPS), max_size=8), st.integers(0, 20)),
        min_size=1,
        max_size=3,
    ),
    trio=st.booleans(),
)
def test_any_program_gives_a_valid_trace(programs: list[tuple[int, list[str], int]], trio: bool) -> None:
    async def one(replicas: int, steps: list[str], leaves_at: int) -> None:
        async def replica() -> None:
            ctx = aiodist.get_replica_context()
            for index, what in enumerate(steps):
                if index == leaves_at and ctx.replica_id_in_sync_group == 0:
                    return
                await step(ctx, what)

        try:
            await mirrored(replicas).run(replica)
        except* CollectiveError:
            pass  # the trace is what is looked at

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for program in programs:
                tasks.start_soon(one, *program)

    with tempfile.TemporaryDirectory() as folder:
        with aiodist.trace(Path(folder) / "run.json") as path:
            if trio:
                anyio.run(main, backend="trio")
            else:
                asyncio.run(main())
        check(events_of(path), programs)


def check(events: list[Event], programs: list[tuple[int, list[str], int]]) -> None:
    runs = {e["args"]["run"]: e for e in events if e["ph"] == "X" and e["cat"] == "run" and e["tid"] == 0}
    assert len(runs) == len(programs)
    made = {"overlap": 2, "yield": 0}
    whole = sum(n * sum(made.get(what, 1) for what in steps) for n, steps, at in programs if at >= len(steps))
    assert len(collectives(events)) >= whole
    met: dict[int, list[Event]] = {}
    for event in collectives(events):
        met.setdefault(event["args"]["collective"], []).append(event)
        run = runs[event["args"]["run"]]
        assert run["ts"] - 0.002 <= event["ts"]
        assert event["ts"] + event["dur"] <= run["ts"] + run["dur"] + 0.002
    for parts in met.values():
        complete = {p["ts"] + p["args"]["wait_ns"] / 1e3 for p in parts if p["args"]["wait_ns"] > 0}
        if complete and not parts[0]["args"].get("incomplete"):
            assert max(complete) - min(complete) < 0.002  # all that wait, wait for the same moment
        issued = {p["tid"]: p["ts"] - p["args"]["ahead_ns"] / 1e3 for p in parts}
        assert len(issued) == len(parts)
