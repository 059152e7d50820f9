"""Replicas are tasks like any other: context variables, child tasks, threads and runs beside each other."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint

import aiodist
from tests.runtime.programs import here, mirrored, on_each, replica

pytestmark = pytest.mark.anyio

variable: ContextVar[int] = ContextVar("variable", default=-1)


@pytest.mark.every_loop
async def test_each_replica_is_a_task_of_its_own_with_a_name() -> None:
    async def train() -> tuple[int, str | None]:
        await here().barrier()  # all of them are there at once
        task = anyio.get_current_task()
        return task.id, task.name

    strategy = mirrored(2)
    found = (await strategy.run(train))[0].values, (await strategy.run(partial(train)))[1].values
    assert len({anyio.get_current_task().id, *found[0]}) == 3
    assert found[1] == ("replica 0 of train (CPU:0)", "replica 1 of train (CPU:1)")


async def test_context_variables_are_the_callers_and_changes_stay_in_the_replica() -> None:
    async def program() -> tuple[int, int]:
        before = variable.get()
        variable.set(replica())
        await here().barrier()
        return before, variable.get()

    token = variable.set(7)
    assert await on_each(2, program) == ((7, 0), (7, 1))
    assert variable.get() == 7
    variable.reset(token)


async def test_child_tasks_and_threads_have_their_replicas_context() -> None:
    async def program() -> list[int]:
        seen = []

        async def child() -> None:
            await checkpoint()
            seen.append(replica())
            assert aiodist.get_strategy() is here().strategy

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
            tasks.start_soon(child)
        return [*seen, await anyio.to_thread.run_sync(replica), await asyncio.to_thread(replica)]

    assert await on_each(2, program) == ([0] * 4, [1] * 4)


async def test_child_tasks_may_take_turns_at_collectives() -> None:
    """Calls are ordered by the replica's program, whichever task makes them."""

    async def program() -> list[int]:
        turns = [anyio.Event() for _ in range(4)]
        totals: list[int] = []

        async def child(which: int) -> None:
            for number in (which, which + 2):
                if number:
                    await turns[number - 1].wait()
                handle = here().all_reduce("SUM", number)
                turns[number].set()
                totals.append(await handle)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child, 0)
            tasks.start_soon(child, 1)
        return sorted(totals)

    assert await on_each(3, program) == ([0, 3, 6, 9],) * 3


def test_run_without_an_event_loop_says_what_is_missing() -> None:
    coroutine = mirrored(2).run(lambda: None)
    with pytest.raises((aiodist.ReplicaContextError, RuntimeError), match="asyncio"):
        coroutine.send(None)
