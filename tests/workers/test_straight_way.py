"""The straight way gives what the general way gives: results, bits, reports, wherever workers part or fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import ReplicaContext
from aiodist.replica import carrying
from aiodist.replica.courses import Courses
from aiodist.replica.straight import go_straight
from tests.workers.simulated import Job, Program, on_both_loops

pytestmark = pytest.mark.anyio
ROUNDS = 3
SIZES = [60, 3000, 150_000]
verifies = st.sampled_from(["ahead", "alongside"])


@dataclass(frozen=True)
class Step:
    """A sum at a place of its own, and for how many turns of the loop each worker is late for it."""

    op: str
    dtype: str
    size: int
    nested: bool
    out: bool
    overlapped: bool
    late: tuple[int, int, int]


@dataclass(frozen=True)
class Mishap:
    """What one worker does otherwise in the last round."""

    kind: str
    at: int
    worker: int


steps = st.lists(
    st.builds(
        Step,
        op=st.sampled_from(["SUM", "MEAN", "PRODUCT", "MAX"]),
        dtype=st.sampled_from(["f4", "f8", "i4", "f2"]),
        size=st.sampled_from(SIZES),
        nested=st.booleans(),
        out=st.booleans(),
        overlapped=st.booleans(),
        late=st.tuples(*[st.integers(0, 3)] * 3),
    ),
    min_size=1,
    max_size=3,
)
mishaps = st.none() | st.builds(
    Mishap,
    kind=st.sampled_from(["other op", "other shape", "other place", "raises", "leaves", "askew", "joins"]),
    at=st.integers(0, 2),
    worker=st.integers(0, 1),
)

_places: dict[str, Any] = {}
exec("\n".join(f"def place_{i}(method, *args, **how): return method(*args, **how)" for i in range(4)), _places)


async def checkpoints(turns: int) -> None:
    """Let the loop have some turns."""
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()


def askew(value: Any) -> Any:
    """Return the same numbers, not in one piece."""
    return np.repeat(value, 2)[::2]


def program_of(todo: list[Step], mishap: Mishap | None) -> Program:
    async def program(ctx: ReplicaContext) -> Any:
        r = ctx.replica_id_in_sync_group
        found: list[Any] = []
        pending: list[Any] = []
        for index in range(ROUNDS * len(todo)):
            at, step = index % len(todo), todo[index % len(todo)]
            own = mishap if index >= (ROUNDS - 1) * len(todo) and mishap and mishap.at == at else None
            kind = own.kind if own and own.worker == r else ""
            await checkpoints(step.late[r])
            if kind == "raises":
                raise LookupError("its own")
            if kind == "leaves":
                return found
            if kind == "joins":
                found.append(await ctx.join())
                return found
            value: Any = (np.arange(step.size + (kind == "other shape")) % 7 + r + index).astype(step.dtype)
            if kind == "askew":
                value = askew(value)
            out = np.empty_like(value) if step.out else None
            brought, into = ([value], None if out is None else [out]) if step.nested else (value, out)
            place = _places[f"place_{3 if kind == 'other place' else at}"]
            op = "MIN" if kind == "other op" else step.op
            handle = place(ctx.all_reduce, op, brought, out=into)
            if step.overlapped:
                pending.append(handle)
            else:
                found.append(await handle)
        found.extend([await handle for handle in pending])
        return found

    return program


def plain(outcome: Any) -> Any:
    """Return what can be compared: bits, or the kind and words of an error."""
    if isinstance(outcome, Exception):
        return type(outcome), str(outcome)
    if isinstance(outcome, (list, tuple)):
        return [plain(each) for each in outcome]
    if isinstance(outcome, np.ndarray):
        return outcome.dtype, outcome.shape, outcome.tobytes(), outcome.flags.writeable
    return outcome


@contextmanager
def counted(taken: list[Any]) -> Iterator[None]:
    """Note the meetings that go the straight way."""

    def go(carrier: Any, meeting: Any, course: Any) -> Any:
        taken.append(meeting.number)
        return go_straight(carrier, meeting, course)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrying, "go_straight", go)
        yield


@contextmanager
def without_it() -> Iterator[None]:
    """Let all steps go the general way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Courses, "straight", lambda *_: None)
        yield


@pytest.mark.parametrize("verify", ["ahead", "alongside"])
@pytest.mark.parametrize("counts", [(1, 1), (1, 1, 1)], ids=str)
async def test_steps_that_come_again_go_it(counts: tuple[int, ...], verify: str) -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(4):
            await ctx.all_reduce("SUM", np.ones(3000))

    taken: list[int] = []
    with counted(taken):
        await Job(*counts, verify=verify).values(program)
    assert sorted(set(taken)) == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:replica . never awaited")  # what was asked for before a mishap
@on_both_loops
@settings(max_examples=15)
@given(layout=st.sampled_from([(1, 1), (1, 1, 1)]), verify=verifies, todo=steps, mishap=mishaps)
def test_both_ways_end_alike(
    loop: tuple[str, dict[str, Any]], layout: tuple[int, ...], verify: str, todo: list[Step], mishap: Mishap | None
) -> None:
    async def outcomes() -> list[Any]:
        job = Job(*layout, verify=verify)
        found = [plain(outcome) for outcome in await job.run(program_of(todo, mishap))]
        found += [plain(outcome) for outcome in await job.run(program_of(todo, None))]
        return found

    backend, options = loop
    with without_it():
        expected = anyio.run(outcomes, backend=backend, backend_options=options)
    assert anyio.run(outcomes, backend=backend, backend_options=options) == expected


async def cancel(scope: anyio.CancelScope, turns: int) -> None:
    await checkpoints(turns)
    scope.cancel()


def sums(size: int, turns: int = 0, late: int = 0) -> Program:
    """Return a program of four sums; replica 0 is cancelled after some turns of the loop in the third, if any."""

    async def program(ctx: ReplicaContext) -> list[float]:
        r = ctx.replica_id_in_sync_group
        found = []
        async with anyio.create_task_group() as tasks:
            for step in range(4):
                with anyio.CancelScope() as scope:
                    if step == 2 and r == 0 and turns:
                        tasks.start_soon(cancel, scope, turns)
                    await checkpoints(late * r)
                    found.append(float((await ctx.all_reduce("SUM", np.full(size, r + 1.0)))[-1]))
        return found

    return program


@pytest.mark.parametrize("verify", ["ahead", "alongside"])
@pytest.mark.parametrize("size", SIZES)
async def test_a_replica_that_is_cancelled_in_the_midst(size: int, verify: str) -> None:
    for turns, late in product(range(1, 5), range(4)):
        job = Job(1, 1, verify=verify)
        one, other = await job.run(sums(size, turns, late))
        if isinstance(one, Exception):
            assert "replica 0 was cancelled out of collective #2" in str(one)
            assert (type(other), str(other)) == (type(one), str(one))
        else:  # all had agreed on it already: it has been carried out
            assert (one[0][-1], other[0]) == (3.0, [3.0] * 4)
        assert await job.values(sums(size)) == [[3.0] * 4] * 2
