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


async def test_work_of_a_device_is_done_in_one_thread_of_its_own() -> None:
    async def program() -> set[int]:
        return {await here().run_sync(threading.get_ident) for _ in range(5)}

    idents = await on_each(3, program)
    assert [len(own) for own in idents] == [1, 1, 1]
    assert len({threading.get_ident()}.union(*idents)) == 4


async def test_thread_bears_the_devices_name() -> None:
    async def program() -> str:
        return await here().run_sync(lambda: threading.current_thread().name)

    assert [name.partition("_")[0] for name in await on_each(2, program)] == ["aiodist CPU:0", "aiodist CPU:1"]


async def test_arguments_and_result() -> None:
    async def program() -> tuple[int, int]:
        return await here().run_sync(divmod, 7, 2)

    assert await on_each(2, program) == ((3, 1), (3, 1))


async def test_context_is_the_replicas() -> None:
    def work() -> tuple[int, str, bool]:
        return replica(), variable.get(), aiodist.get_strategy() is here().strategy

    async def program() -> Any:
        variable.set(f"of {replica()}")
        return await here().run_sync(work)

    assert await on_each(2, program) == ((0, "of 0", True), (1, "of 1", True))


async def test_replicas_work_at_the_same_time() -> None:
    """Each waits in its thread for the other: one after the other, they would never end."""
    meeting = threading.Barrier(3)

    async def program() -> None:
        await here().run_sync(meeting.wait, 30)

    await mirrored(3).run(program)


async def test_exception_is_raised_at_the_await() -> None:
    def work() -> None:
        raise LookupError("in the thread")

    async def program() -> int:
        with pytest.raises(LookupError, match="in the thread"):
            await here().run_sync(work)
        total: int = await here().all_reduce("SUM", 1)
        return total

    assert await on_each(2, program) == (2, 2)


async def test_exception_that_nobody_catches_is_the_replicas() -> None:
    def work() -> None:
        raise LookupError("in the thread")

    async def program() -> None:
        if replica() == 1:
            await here().run_sync(work)
        await here().barrier()

    with pytest.raises(LookupError) as caught:
        await mirrored(2).run(program)
    assert "replica 1 of 2 on CPU:1" in caught.value.__notes__[0]


async def test_cancellation_waits_for_the_work() -> None:
    started, go, done = threading.Event(), threading.Event(), []

    def work() -> None:
        started.set()
        assert go.wait(30)
        done.append(True)

    async def program() -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(here().run_sync, work)
                while not started.is_set():
                    await checkpoint()
                scope.cancel()
                go.set()
        assert done
        assert scope.cancelled_caught

    await mirrored(1).run(program)


async def test_cancellation_from_outside_waits_for_the_work_of_every_replica() -> None:
    go, done = threading.Event(), []
    started = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        started[number].set()
        assert go.wait(30)
        done.append(number)

    async def program() -> None:
        await here().run_sync(work, replica())

    strategy = mirrored(3)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(strategy.run, program)
            while not all(event.is_set() for event in started):
                await checkpoint()
            scope.cancel()
            go.set()
    assert sorted(done) == [0, 1, 2]
    await still_works(strategy)


async def test_no_thread_outlives_the_run() -> None:
    threads: list[threading.Thread] = []

    async def program() -> None:
        threads.append(await here().run_sync(threading.current_thread))

    await mirrored(3).run(program)
    assert len(threads) == 3
    assert not any(thread.is_alive() for thread in threads)


async def test_no_thread_is_started_without_work() -> None:
    before = threading.active_count()
    seen = []

    async def program() -> None:
        await here().barrier()
        seen.append(threading.active_count())

    await mirrored(8).run(program)
    assert max(seen) <= before


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


async def test_coroutine_function_is_refused() -> None:
    async def work() -> None: ...

    async def program() -> None:
        with pytest.raises(TypeError, match="plain function, got the coroutine function"):
            await here().run_sync(work)  # type: ignore[unused-coroutine]
        with pytest.raises(TypeError, match="expects a function, got 3"):
            await here().run_sync(3)  # type: ignore[arg-type]
        await here().barrier()

    await mirrored(2).run(program)


async def test_context_of_another_replica_is_refused() -> None:
    contexts: dict[int, Any] = {}

    async def program() -> None:
        contexts[replica()] = here()
        await here().barrier()
        with pytest.raises(ReplicaContextError, match="each replica uses its own"):
            await contexts[1 - replica()].run_sync(int)
        await here().barrier(name="both are done")

    await mirrored(2).run(program)


async def test_default_context_has_threads_too() -> None:
    context = aiodist.get_replica_context()
    assert await context.run_sync(threading.get_ident) != threading.get_ident()
