"""Handles: a collective is issued by the call and completed by the await, in a replica that is an ordinary task."""

from __future__ import annotations

import asyncio
import gc
import inspect
import warnings
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import (
    CollectiveHandle,
    CollectiveMismatchError,
    CommunicationOptions,
    IncompleteCollectiveError,
    ReplicaContext,
    ReplicaContextError,
    get_replica_context,
)
from aiodist._core.instrument import Observer, observing
from tests.runtime.programs import Program, here, mirrored, on_each, replica, run, turns, warned

pytestmark = pytest.mark.anyio

variable: ContextVar[int] = ContextVar("variable", default=-1)


# Tasks.


@pytest.mark.every_loop
async def test_each_replica_is_a_task_of_its_own_with_a_name_and_the_callers_context() -> None:
    async def train() -> tuple[Any, ...]:
        before = variable.get()
        variable.set(replica())
        await here().barrier()  # all have started
        task = anyio.get_current_task()
        return task.id, task.name, before, variable.get()

    token = variable.set(7)
    ids, *rest = await mirrored(2).run(partial(train))
    assert len({anyio.get_current_task().id, *ids.values}) == 3
    names = ("replica 0 of train (CPU:0)", "replica 1 of train (CPU:1)")
    assert [each.values for each in rest] == [names, (7, 7), (0, 1)]
    assert variable.get() == 7
    variable.reset(token)


async def test_child_tasks_and_threads_have_their_replicas_context() -> None:
    async def program() -> list[int]:
        seen = []

        async def child() -> None:
            await turns(1)
            seen.append(replica())
            assert aiodist.get_strategy() is here().strategy

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
            tasks.start_soon(child)
        with here() as context:
            assert get_replica_context() is context
        assert get_replica_context() is context
        assert repr(here()) == f"<ReplicaContext: replica {replica()} of 2 on CPU:{replica()}>"
        return [*seen, await anyio.to_thread.run_sync(replica), await asyncio.to_thread(replica)]

    assert await on_each(2, program) == ([0] * 4, [1] * 4)


# In observed runs, there is a warning about tasks of one replica that race for its next collective.


async def warnings_of(program: Program, *, observed: bool = True) -> list[str]:
    """Return the texts of the warnings that a program gives on two replicas."""
    with warned() as found, observing(Observer()) if observed else nullcontext():
        await run(mirrored(2, "signature"), program)
    return [warning.text for warning in found]


async def actor(ctx: ReplicaContext) -> None:
    for _ in range(5):
        await ctx.all_reduce("SUM", 1.0)


async def learner(ctx: ReplicaContext) -> None:
    for _ in range(5):
        await ctx.all_reduce("SUM", 2.0)


async def side_by_side(ctx: ReplicaContext) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor, ctx)
        tasks.start_soon(learner, ctx)


async def beside_its_child(ctx: ReplicaContext) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor, ctx)
        await learner(ctx)


@pytest.mark.parametrize(
    ("program", "other"), [(side_by_side, "the task of learner() at "), (beside_its_child, "replica 0")]
)
async def test_racing_tasks_are_named_with_their_lines(program: Program, other: str) -> None:
    (text,) = await warnings_of(program)  # one, for all replicas
    assert text.startswith("tasks of replica 0 race for the next collective: the task of actor() at ")
    assert text.count("issued all_reduce(SUM, float) at ") == 2
    assert f", {other}" in text
    assert text.endswith("may differ: await them one after the other, or give each a group")
    assert await warnings_of(program, observed=False) == []


async def in_turn(ctx: ReplicaContext) -> None:
    await ctx.barrier()
    for work in (actor, learner, actor):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, ctx)
        await ctx.barrier()


async def a_group_each(ctx: ReplicaContext) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor, ctx.new_group([0, 1], "actors"))
        tasks.start_soon(learner, ctx.new_group([0, 1], "learners"))


async def one_that_issues_beside_one_that_does_not(ctx: ReplicaContext) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turns)
        await actor(ctx)


async def a_child_of_a_child(ctx: ReplicaContext) -> None:
    async def child() -> None:
        await actor(ctx)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(learner, ctx)
        await actor(ctx)

    await learner(ctx)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child)
    await learner(ctx)


@pytest.mark.parametrize(
    "program", [in_turn, a_group_each, one_that_issues_beside_one_that_does_not, a_child_of_a_child]
)
async def test_tasks_in_an_order_give_no_warning(program: Program) -> None:
    assert await warnings_of(program) == []


# Uses of a handle.


@pytest.mark.every_loop
async def test_handle_may_be_awaited_again_late_and_in_several_tasks() -> None:
    async def program() -> int:
        totals: list[int] = []

        async def child(handle: CollectiveHandle[int]) -> None:
            totals.append(await handle)

        handle, nest = here().all_reduce("SUM", 1), here().all_reduce("SUM", {"x": np.ones(2)})
        await turns(10 * replica())
        first, second = await nest, await nest
        assert first["x"] is second["x"]
        assert first is not second
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child, handle)
            pending = here().all_reduce("SUM", replica())
            for _ in range(3):
                tasks.start_soon(child, pending)
            await pending
        return sum(totals)

    assert await on_each(3, program) == (12, 12, 12)


@pytest.mark.parametrize("own_is_complete", [False, True])
@pytest.mark.every_loop
async def test_handle_of_another_replica_is_refused_at_once(own_is_complete: bool) -> None:
    """Otherwise it might be awaited forever, because no timeout ends it."""
    handles: dict[int, CollectiveHandle[int]] = {}

    async def program() -> int:
        handles[replica()] = here().all_reduce("SUM", 1)
        if own_is_complete or replica() == 1:
            await (here().barrier(name="known") if own_is_complete else turns(1))
            text = f"replica {replica()} awaits a handle that replica {1 - replica()} was given by all_reduce"
            with pytest.raises(ReplicaContextError, match=text):
                await handles[1 - replica()]
        return await handles[replica()]

    assert await on_each(2, program, communication_options=CommunicationOptions(timeout_seconds=30)) == (2, 2)


async def test_handle_is_accepted_wherever_asyncio_accepts_a_coroutine() -> None:
    async def program() -> list[int]:
        handle = here().all_reduce("SUM", 0)
        assert isinstance(handle, CollectiveHandle)
        assert isinstance(handle, Coroutine)
        assert inspect.isawaitable(handle)
        results = list(await asyncio.gather(handle, *(here().all_reduce("SUM", k) for k in range(1, 3))))
        results.append(await asyncio.wait_for(here().all_reduce("SUM", 3), 60))
        again = here().all_reduce("SUM", 4)
        results += [await asyncio.create_task(again), await asyncio.create_task(again), await again]
        results += [await done for done in asyncio.as_completed([here().all_reduce("SUM", 5)])]
        cancelled = asyncio.create_task(here().all_reduce("SUM", 6))
        await here().barrier()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        return results

    assert await on_each(2, program) == ([0, 2, 4, 6, 8, 8, 8, 10],) * 2


@pytest.mark.every_loop
async def test_task_groups_accept_methods_that_return_handles() -> None:
    """The call site is the program's line, not that of the event loop that makes the call."""

    async def program(ctx: ReplicaContext) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ctx.barrier)
            await ctx.barrier(name="between")
        async with anyio.create_task_group() as tasks:
            if replica() == 0:
                tasks.start_soon(ctx.barrier)
            else:
                tasks.start_soon(ctx.barrier)

    line = inspect.getsourcelines(program)[1] + 6
    with pytest.raises(CollectiveMismatchError) as caught:
        await run(mirrored(2), program)
    assert caught.value.report.sequence_number == 2
    assert [each.location and each.location.line for each in caught.value.report.replicas] == [line, line + 2]


async def test_collective_that_an_event_loop_calls_needs_a_name() -> None:
    async def program() -> None:
        errors: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        loop.call_soon(here().barrier)
        await asyncio.sleep(0)
        assert [type(error) for error in errors] == [ValueError]
        assert "give it a name" in str(errors[0])

    await on_each(1, program)


# Handles that are not awaited.

SLIPS: list[Callable[[Any], object]] = [
    lambda handle: handle / 2,
    lambda handle: 2 - handle,
    lambda handle: np.ones(2) + handle,
    lambda handle: handle < 1,
    lambda handle: handle[0],
    *(bool, list, float, np.asarray),
]


async def test_handle_that_is_used_as_a_value_asks_for_await() -> None:
    async def program() -> None:
        handle = here().all_reduce("SUM", np.ones(2))
        for use in SLIPS:
            with pytest.raises(TypeError, match=r"is `await` missing\? all_reduce\(SUM, float64\[2\]\) #0 of replica"):
                use(handle)
        with pytest.raises(TypeError, match=r"CollectiveHandle.*is `await` missing"):
            here().all_reduce("SUM", {"x": handle})
        if replica() == 0:
            assert repr(handle).startswith("<CollectiveHandle: all_reduce(SUM, float64[2]) #0 of replica 0 at tests")
            assert repr(handle).endswith("in program, not complete>")
        await handle
        assert repr(handle).endswith("in program, complete>")

    await mirrored(2).run(program)


async def test_dropped_handle_has_contributed_and_warns_with_its_call_site() -> None:
    async def program() -> Any:
        handle: Any = here().all_reduce("SUM", np.float32(replica()))
        if replica() == 1:
            handle = None  # the warning has the line of the call above
            gc.collect()
        result = None if handle is None else await handle
        await here().barrier(name="later")
        return result

    with warned() as found:
        assert await on_each(3, program) == (3.0, None, 3.0)
    (warning,) = found
    assert warning.category is RuntimeWarning
    assert (warning.file, warning.line) == (__file__, inspect.getsourcelines(program)[1] + 1)
    assert "replica 1 never awaited all_reduce(SUM, np.float32)" in warning.text
    assert "it has contributed, but its result is lost" in warning.text


async def test_handle_that_is_dropped_in_a_loop_gives_one_warning_for_each_replica() -> None:
    async def program() -> None:
        for _ in range(3):
            here().barrier()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        await mirrored(2).run(program)
        await mirrored(2).run(program)
    texts = [str(warning.message) for warning in found]
    assert [text.partition(" called")[0] for text in texts] == [f"replica {i} never awaited barrier()," for i in (0, 1)]


@pytest.mark.parametrize("ending", ["well", "a replica fails", "cancelled"])
async def test_handles_that_a_failed_or_cancelled_run_leaves_give_no_warning(ending: str) -> None:
    async def program() -> None:
        for handle in [here().all_reduce("SUM", k) for k in range(3)]:
            await handle
            if ending != "well" and replica() != 1:
                await anyio.sleep_forever()
        if ending == "a replica fails":
            raise LookupError
        if ending == "cancelled":
            scope.cancel()

    with warned() as found, anyio.CancelScope() as scope:
        if ending == "a replica fails":
            with pytest.raises(LookupError):
                await mirrored(3).run(program)
        else:
            await mirrored(3).run(program)
    gc.collect()
    assert found == []


async def test_merge_call_dropped_outside_any_run_leaves_nothing_open() -> None:
    ctx = get_replica_context()
    before = dict(ctx._me.member.group.open)
    with warned() as found:
        ctx.merge_call(len)
    assert ["never awaited merge_call" in warning.text for warning in found] == [True]
    assert ctx._me.member.group.open == before


# Clocks.


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances by a millisecond in each turn."""

    turns = 0

    def time(self) -> float:
        return self.turns / 1000

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()  # type: ignore[misc]


def test_timers_of_a_loop_with_a_clock_of_its_own_are_called_between_collectives() -> None:
    async def program() -> bool:
        called: list[int] = []
        asyncio.get_running_loop().call_later(0.02, called.append, 1)
        for _ in range(100):
            await here().barrier()
        return bool(called)

    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        assert runner.run(on_each(2, program)) == (True, True)


@pytest.mark.filterwarnings("ignore:replica 0 never awaited:RuntimeWarning")
async def test_incomplete_collective_is_an_error_for_tasks_that_outlive_the_run() -> None:
    left: list[Any] = []

    async def in_a_task(ctx: ReplicaContext) -> None:
        await ctx.barrier()

    async def program(ctx: ReplicaContext) -> None:
        if replica() == 0:
            left.append(asyncio.create_task(in_a_task(ctx)))
            await asyncio.sleep(0)
            left.append(ctx.barrier())

    with pytest.raises(IncompleteCollectiveError):
        await run(mirrored(2), program)
    for awaitable in left:
        with pytest.raises(IncompleteCollectiveError):
            await asyncio.wait_for(awaitable, 60)
