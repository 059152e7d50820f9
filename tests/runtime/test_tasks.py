"""Inside a replica, timeouts, cancel scopes, child tasks and threads mean what they mean in any program."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

import aiodist
from aiodist import IncompleteCollectiveError, MirroredStrategy
from tests.runtime.programs import Relay, here, mirrored, on_each, replica, still_works

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.anyio

variable: ContextVar[int] = ContextVar("variable", default=-1)


async def test_each_replica_is_a_task_of_its_own() -> None:
    async def program() -> int:
        await here().barrier()  # all of them are there at once
        return anyio.get_current_task().id

    caller = anyio.get_current_task().id
    assert len({caller, *await on_each(3, program)}) == 4


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


async def test_timeout_around_something_else_than_a_collective() -> None:
    async def program() -> tuple[bool, int]:
        with anyio.move_on_after(0) as scope:
            await anyio.sleep_forever()
        return scope.cancelled_caught, await here().all_reduce("SUM", 1)

    assert await on_each(3, program) == ((True, 3),) * 3


async def test_timeout_of_one_replica_only_does_not_disturb_the_others() -> None:
    async def program() -> int:
        if replica() == 1:
            with anyio.move_on_after(0):
                await anyio.sleep_forever()
        total: int = await here().all_reduce("SUM", 1)
        return total

    assert await on_each(3, program) == (3, 3, 3)


async def test_cancel_scope_of_one_replica() -> None:
    async def program() -> bool:
        with anyio.CancelScope() as scope:
            if replica() == 0:
                scope.cancel()
            await checkpoint()
        await here().barrier()
        return scope.cancelled_caught

    assert await on_each(2, program) == (True, False)


async def test_cancellation_in_the_await_of_a_complete_collective_is_only_that() -> None:
    relay = Relay([1, 2, 0])

    async def program() -> int:
        await relay.turn()
        with anyio.CancelScope() as scope:
            handle = here().barrier(name="first")
            relay.pass_on()
            if replica() == 0:  # it has completed the meeting
                scope.cancel()
            await handle
        total: int = await here().all_reduce("SUM", 1)
        return total

    assert await on_each(3, program) == (3, 3, 3)


@pytest.mark.parametrize("order", [(1, 2, 0), (0, 2, 1), (0, 1, 2), (2, 1, 0)], ids=str)
async def test_last_arrival_in_a_cancelled_scope(order: Sequence[int]) -> None:
    """Its first await is where it gives way; whether the scope takes effect there or later is the event loop's."""
    relay = Relay(order)

    async def program() -> int:
        await relay.turn()
        if replica() == order[-1]:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await here().barrier(name="first")
        else:
            handle = here().barrier(name="first")
            relay.pass_on()
            await handle
        total: int = await here().all_reduce("SUM", 1)
        return total

    assert await on_each(3, program) == (3, 3, 3)


async def test_abandoned_collective_is_an_error_that_names_who_left() -> None:
    left = anyio.Event()

    async def program() -> None:
        if replica() == 2:
            await left.wait()
        if replica() == 1:
            with anyio.CancelScope() as scope:
                handle = here().barrier(name="met")
                scope.cancel()
                await handle
            left.set()
        else:
            await here().barrier(name="met")

    strategy = mirrored(3)
    with pytest.raises(IncompleteCollectiveError) as caught:
        await strategy.run(program)
    assert caught.value.report.reason == "abandoned"
    assert caught.value.report.suspects == (1,)
    await still_works(strategy)


async def test_child_tasks_have_their_replicas_context() -> None:
    async def program() -> list[int]:
        seen = []

        async def child() -> None:
            await checkpoint()
            seen.append(replica())
            assert aiodist.get_strategy() is here().strategy

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(child)
        return seen

    assert await on_each(2, program) == ([0, 0, 0], [1, 1, 1])


async def test_two_child_tasks_that_take_turns_at_collectives() -> None:
    """Calls are ordered by the replica's program, whichever task makes them."""

    async def program() -> list[int]:
        turns = [anyio.Event() for _ in range(4)]
        results: list[int] = []

        async def child(which: int) -> None:
            for number in (which, which + 2):
                if number:
                    await turns[number - 1].wait()
                handle = here().all_reduce("SUM", number)
                turns[number].set()
                results.append(await handle)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child, 0)
            tasks.start_soon(child, 1)
        return sorted(results)

    assert await on_each(3, program) == ([0, 3, 6, 9],) * 3


async def test_failing_child_task_fails_its_replica() -> None:
    async def child() -> None:
        raise LookupError("child")

    async def program() -> None:
        async with anyio.create_task_group() as tasks:
            if replica() == 1:
                tasks.start_soon(child)
            await here().barrier()

    strategy = mirrored(2)
    with pytest.raises(ExceptionGroup) as caught:
        await strategy.run(program)
    assert isinstance(caught.value.exceptions[0], LookupError)
    assert "replica 1 of 2 on CPU:1" in caught.value.__notes__[0]
    await still_works(strategy)


async def test_anyio_thread_has_its_replicas_context() -> None:
    async def program() -> int:
        return await anyio.to_thread.run_sync(replica)

    assert await on_each(2, program) == (0, 1)


async def test_runs_of_several_strategies_keep_apart() -> None:
    results: dict[str, Any] = {}

    async def program(scale: int) -> str:
        total = 0
        for k in range(10):
            total += await here().all_reduce("SUM", k * scale)
        return "right" if total == 45 * scale * here().num_replicas_in_sync else "wrong"

    async def run(name: str, strategy: MirroredStrategy, scale: int) -> None:
        results[name] = await strategy.run(program, args=(scale,))

    async with anyio.create_task_group() as tasks:
        for count in range(1, 6):
            tasks.start_soon(run, f"of {count}", mirrored(count), 10**count)
    assert results == {f"of {count}": "right" for count in range(1, 6)}


async def test_runs_of_one_strategy_at_a_time_keep_apart() -> None:
    strategy = mirrored(3)
    results: dict[int, Any] = {}

    async def program(which: int) -> Any:
        whole = []
        for _ in range(which + 1):
            whole.append((await here().all_gather(np.array([which]), 0)).tolist())
            await checkpoint()
        return whole[-1] == [which] * 3

    async def run(which: int) -> None:
        results[which] = await strategy.run(program, args=(which,))

    async with anyio.create_task_group() as tasks:
        for which in range(6):
            tasks.start_soon(run, which)
    assert results == dict.fromkeys(range(6), True)


async def test_failure_of_one_run_leaves_another_alone() -> None:
    strategy = mirrored(2)
    failed = anyio.Event()

    async def failing() -> None:
        await here().barrier()
        raise LookupError

    async def working() -> int:
        await failed.wait()
        total: int = await here().all_reduce("SUM", 1)
        return total

    async def fail() -> None:
        with pytest.raises(LookupError):
            await strategy.run(failing)
        failed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail)
        assert await strategy.run(working) == 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_current_task_and_timeout_of_asyncio(anyio_backend: str) -> None:
    async def program() -> bool:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        await here().barrier()
        return asyncio.current_task() is task and task.cancelling() == 0

    assert await on_each(2, program) == (True, True)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_task_group_of_asyncio(anyio_backend: str) -> None:
    async def program() -> int:
        async with asyncio.TaskGroup() as tasks:
            child = tasks.create_task(call())
        return child.result()

    async def call() -> int:
        total: int = await here().all_reduce("SUM", replica())
        return total

    assert await on_each(3, program) == (3, 3, 3)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncio_thread_has_its_replicas_context(anyio_backend: str) -> None:
    async def program() -> int:
        return await asyncio.to_thread(replica)

    assert await on_each(2, program) == (0, 1)


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_nursery_and_scopes_of_trio(anyio_backend: str) -> None:
    import trio

    async def program() -> int:
        results: list[int] = []

        async def child() -> None:
            results.append(await here().all_reduce("SUM", 1))

        with trio.move_on_after(0) as scope:
            await trio.sleep_forever()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        assert scope.cancelled_caught
        return results[0]

    assert await on_each(3, program) == (3, 3, 3)


def test_run_of_asyncio_and_of_trio_in_one_process() -> None:
    import trio

    strategy = mirrored(2)
    asyncio.run(still_works(strategy))
    trio.run(still_works, strategy)
    asyncio.run(still_works(strategy))


def test_run_without_an_event_loop_says_what_is_missing() -> None:
    coroutine = mirrored(2).run(lambda: None)
    with pytest.raises((aiodist.ReplicaContextError, RuntimeError), match="asyncio"):
        coroutine.send(None)
