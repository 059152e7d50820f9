"""Exploring finds bugs that depend on the order of tasks, reduces their schedules and repeats them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import CollectiveMismatchError
from aiodist._checking.explore import Result, explore, minimise, replay
from aiodist._checking.schedule import DEFER, Change, Schedule
from tests.checking.programs import Main
from tests.project.paths import ROOT, environment
from tests.runtime.programs import here, mirrored, replica


def exploration(main: Main, schedules: int = 100, seed: int = 0) -> Result:
    return explore(main, schedules=schedules, seed=seed, seconds=20)


async def racing_children() -> None:
    """Two child tasks of each replica issue a collective each, in whatever order they are started."""

    async def reduce(ctx: Any, op: str) -> None:
        await ctx.all_reduce(op, np.ones(2))

    async def program() -> None:
        await here().barrier()
        async with asyncio.TaskGroup() as tasks:
            for op in ("SUM", "MAX"):
                tasks.create_task(reduce(here(), op))

    await mirrored(3).run(program)


async def late_flag() -> None:
    """Replica 1 reads a flag that replica 0 sets; in the default order it is set by then."""
    flag: list[bool] = []

    async def program() -> None:
        for step in range(20):
            await here().barrier()
            if step == 10 and replica() == 0:
                flag.append(True)
            if step == 10 and replica() == 1 and not flag:
                raise LookupError("no flag")

    await mirrored(2).run(program)


async def late_merge_function() -> None:
    """Replica 1 reads a flag that a merge function sets; in the default order it is set by then."""
    flag: list[bool] = []

    async def merge(_: Any) -> None:
        await asyncio.sleep(0)
        flag.append(True)

    async def program() -> None:
        handle = here().merge_call(merge)
        for _ in range(3):
            await asyncio.sleep(0)
        if replica() == 1 and not flag:
            raise LookupError("no flag")
        await handle

    await mirrored(2).run(program)


WRONG = [
    (racing_children, CollectiveMismatchError),
    (late_flag, LookupError),
    (late_merge_function, LookupError),
]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("main", "error"), WRONG)
def test_bug_that_depends_on_the_order_is_found_reduced_and_repeated(
    main: Main, error: type[Exception], seed: int
) -> None:
    found = exploration(main, seed=seed)
    assert found.schedules > 1
    assert isinstance(found.error, error)
    assert len(found.schedule.changes) == len(found.changes) == 1
    assert found.changes[0].startswith(("replica", "a task"))

    again = replay(main, Schedule.parse(str(found.schedule)), seconds=20)
    assert str(again.error) == str(found.error)
    assert again.changes == found.changes


def summaries() -> list[str]:
    found = [exploration(main, seed=3) for main, _ in WRONG]
    return [f"{each.schedules} {each.schedule}" for each in found]


def test_exploration_depends_on_its_seed_alone() -> None:
    """It does not depend on the process, the hash seed, or addresses of objects."""
    program = "from tests.checking.test_explore import *\nprint(*summaries(), sep='\\n')"
    printed = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=environment(), text=True)
    assert printed.splitlines() == summaries()


def test_program_without_a_choice_or_that_always_fails_has_one_schedule() -> None:
    async def main() -> None:
        raise ValueError("always")

    assert exploration(lambda: asyncio.sleep(1)).schedules == 1
    found = exploration(main)
    assert found.schedules == 1
    assert isinstance(found.error, ValueError)
    assert str(found.schedule) == "0/"


choices = st.one_of(st.just(DEFER), st.integers(1, 50), st.integers(-50, -1))
changes = st.dictionaries(st.integers(0, 10**6), choices, max_size=6).map(
    lambda found: tuple(Change(point, found[point]) for point in sorted(found))
)


@given(st.integers(0, 2**40), changes)
def test_schedule_is_read_back_from_its_text(seed: int, made: tuple[Change, ...]) -> None:
    schedule = Schedule(seed, made)
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    "text", ["", "7", "x/", "-1/", "0/17", "0/17:0", "0/17:-0", "0/,", "0/17-,", "0/17-;18-", "²/"]
)
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a schedule such as 0/17-,40:2"):
        Schedule.parse(text)


@given(st.integers(1, 40), st.data())
def test_minimised_items_fail_and_none_can_be_left_out(size: int, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.sets(st.integers(0, size - 1), min_size=1), min_size=1, max_size=3))

    def failure_of(part: Sequence[int]) -> Sequence[int] | None:
        return part if any(group <= set(part) for group in groups) else None

    found = minimise(range(size), failure_of) or range(size)
    assert failure_of(found)
    assert len(found) == 1 or not any(failure_of([x for x in found if x != one]) for one in found)
