"""run_sync: a replica's blocking work, in its device's thread."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import aiodist
from aiodist import ReplicaContextError
from tests.runtime.programs import here, mirrored, on_each, replica, still_works

pytestmark = pytest.mark.anyio

variable: ContextVar[str] = ContextVar("variable", default="")


async def test_work_of_a_device_is_done_in_one_thread_of_its_own_that_the_next_run_uses_again() -> None:
    threads = list[threading.Thread]()

    async def program() -> tuple[int, str]:
        own = {await here().run_sync(threading.current_thread) for _ in range(5)}
        threads.extend(own)
        return len(own), threads[-1].name.partition("_")[0]

    assert await on_each(3, program) == tuple((1, f"aiodist CPU:{k}") for k in range(3))
    assert len({*threads, threading.current_thread()}) == 4
    while not all(thread.name == "aiodist idle" for thread in threads):
        await checkpoint()
    before, threads = threads, []
    await on_each(3, program)
    assert {*threads} == {*before}


async def test_no_thread_is_started_without_work() -> None:
    seen: list[str] = []

    async def program() -> None:
        await here().barrier()
        seen.extend(thread.name for thread in threading.enumerate())

    await mirrored(8).run(program)
    assert not any("CPU" in name or "reduction" in name for name in seen)


async def test_context_arguments_and_result() -> None:
    def work(factor: int) -> tuple[int, str, bool]:
        return factor * replica(), variable.get(), aiodist.get_strategy() is here().strategy

    async def program() -> Any:
        variable.set(f"of {replica()}")
        return await here().run_sync(work, factor=7)

    assert await on_each(2, program) == ((0, "of 0", True), (7, "of 1", True))


async def test_replicas_work_at_the_same_time() -> None:
    """Each waits in its thread for the other: one after the other, they would never end."""
    meeting = threading.Barrier(3)

    async def program() -> None:
        await here().run_sync(meeting.wait, 30)

    await mirrored(3).run(program)


@pytest.mark.parametrize("caught", [True, False])
async def test_exception_is_raised_at_the_await(caught: bool) -> None:
    def work() -> None:
        raise LookupError("in the thread")

    async def program() -> int:
        if caught:
            with pytest.raises(LookupError, match="in the thread"):
                await here().run_sync(work)
        elif replica() == 1:
            await here().run_sync(work)
        total: int = await here().all_reduce("SUM", 1)
        return total

    if caught:
        assert await on_each(2, program) == (2, 2)
    else:
        with pytest.raises(LookupError) as raised:
            await mirrored(2).run(program)
        assert "replica 1 of 2 on CPU:1" in raised.value.__notes__[0]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.every_loop
async def test_cancellation_waits_for_the_work(outside: bool) -> None:
    go, done = threading.Event(), []
    started = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        started[number].set()
        assert go.wait(30)
        done.append(number)

    async def program() -> None:
        with anyio.CancelScope() as own:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(here().run_sync, work, replica())  # pyright: ignore[reportArgumentType]
                if not outside:
                    await cancel(own, started[replica()])
        assert done

    async def cancel(scope: anyio.CancelScope, *events: threading.Event) -> None:
        while not all(event.is_set() for event in events):
            await checkpoint()
        scope.cancel()
        go.set()

    strategy = mirrored(3)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(strategy.run, program)
            if outside:
                await cancel(scope, *started)
    assert sorted(done) == [0, 1, 2]
    assert scope.cancelled_caught == outside
    await still_works(strategy)


async def test_collective_from_the_thread_is_refused() -> None:
    async def program() -> int:
        context = here()

        def work() -> None:
            for call in (
                lambda: context.all_reduce("SUM", 1),
                context.barrier,
                lambda: context.broadcast(1),
                lambda: aiodist.get_replica_context().barrier(),
            ):
                with pytest.raises(ReplicaContextError, match=r"in the thread 'aiodist CPU:\d.*return the value"):
                    call()

        await context.run_sync(work)
        total: int = await context.all_reduce("SUM", 1)
        return total

    assert await on_each(2, program) == (2, 2)


async def test_what_is_no_plain_function_or_of_another_replica_is_refused() -> None:
    contexts: dict[int, Any] = {}

    async def work() -> None: ...

    async def program() -> None:
        contexts[replica()] = here()
        with pytest.raises(TypeError, match="plain function, got the coroutine function"):
            await here().run_sync(work)  # type: ignore[unused-coroutine]
        with pytest.raises(TypeError, match="expects a function, got 3"):
            await here().run_sync(3)  # type: ignore[arg-type]
        await here().barrier()
        with pytest.raises(ReplicaContextError, match="each replica uses its own"):
            await contexts[1 - replica()].run_sync(int)
        await here().barrier(name="both are done")

    await mirrored(2).run(program)
