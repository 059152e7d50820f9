"""Threads: `run_sync` does blocking work in the thread of a replica's device; others compute large results."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import CommunicationOptions
from aiodist._runtime import threads
from aiodist._runtime.handle import posted
from aiodist_kernels import policy
from tests.runtime.programs import HeldThreads, here, mirrored, on_each, replica, still_works, turns, warned

pytestmark = pytest.mark.anyio

variable: ContextVar[str] = ContextVar("variable", default="")


# run_sync.


async def test_each_device_has_one_thread_which_the_next_run_uses_again() -> None:
    threads = list[threading.Thread]()

    async def program() -> tuple[int, str]:
        assert not any("CPU" in each.name or "reduction" in each.name for each in threading.enumerate())  # no work yet
        await here().barrier()
        own = {await here().run_sync(threading.current_thread) for _ in range(5)}
        threads.extend(own)
        return len(own), threads[-1].name.partition("_")[0]

    assert await on_each(3, program) == tuple((1, f"aiodist CPU:{k}") for k in range(3))
    assert len({*threads, threading.current_thread()}) == 4
    while not all(thread.name == "aiodist idle" for thread in threads):
        await turns(1)
    before, threads = threads, []
    await on_each(3, program)
    assert {*threads} == {*before}


async def test_replicas_work_at_the_same_time_with_their_context_and_arguments() -> None:
    """Each waits in its thread for the other, so one after the other they would never end."""
    meeting = threading.Barrier(2)

    def work(factor: int) -> tuple[int, str, bool]:
        meeting.wait(60)
        return factor * replica(), variable.get(), aiodist.get_strategy() is here().strategy

    async def program() -> Any:
        variable.set(f"of {replica()}")
        return await here().run_sync(work, factor=7)

    assert await on_each(2, program) == ((0, "of 0", True), (7, "of 1", True))


async def test_exception_is_raised_at_the_await() -> None:
    def work() -> None:
        raise LookupError("in the thread")

    async def program() -> int:
        with pytest.raises(LookupError, match="in the thread"):
            await here().run_sync(work)
        total: int = await here().all_reduce("SUM", 1)
        if replica() == 1:
            await here().run_sync(work)
        return total

    with pytest.raises(LookupError) as raised:
        await mirrored(2).run(program)
    assert "replica 1 of 2 on CPU:1" in raised.value.__notes__[0]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.every_loop
async def test_cancellation_waits_for_the_work(outside: bool) -> None:
    go, done, ended = threading.Event(), list[int](), list[int]()
    started = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        started[number].set()
        assert go.wait(60)
        done.append(number)

    async def program() -> None:
        with anyio.CancelScope() as own:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(here().run_sync, work, replica())  # pyright: ignore[reportArgumentType]
                if not outside:
                    await cancel(own, started[replica()])
        ended.append(replica())

    async def cancel(scope: anyio.CancelScope, *events: threading.Event) -> None:
        while not all(event.is_set() for event in events):
            await turns(1)
        scope.cancel()
        with anyio.CancelScope(shield=True):
            await turns()
            assert go.is_set() or not ended
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


async def test_run_sync_of_anything_but_a_plain_function_is_refused() -> None:
    async def work() -> None: ...

    async def program() -> None:
        with pytest.raises(TypeError, match="plain function, got the coroutine function"):
            await here().run_sync(work)  # type: ignore[unused-coroutine]
        with pytest.raises(TypeError, match="expects a function, got 3"):
            await here().run_sync(3)  # type: ignore[arg-type]

    await mirrored(2).run(program)


async def test_loop_wakes_one_thread_for_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does even if a thread that has notified the loop of its result still seems busy."""
    submit, callers = threads.Worker.submit, list[threading.Thread]()

    def noted(worker: threads.Worker, job: threads.Job) -> None:
        callers.append(threading.current_thread())
        submit(worker, job)

    monkeypatch.setattr(threads.Worker, "submit", noted)
    monkeypatch.setattr(threads.Worker, "busy", True)

    async def program() -> None:
        for _ in range(3):
            await here().run_sync(int)
            await here().barrier()

    await on_each(2, program)
    assert callers.count(threading.current_thread()) == 3
    assert len(callers) == 6


def test_thread_of_the_cache_has_an_empty_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Python lets threads inherit context variables, it would otherwise keep those of its first owner."""
    start = threading.Thread.start

    def inheriting(thread: threading.Thread) -> None:
        context, run = copy_context(), thread.run
        monkeypatch.setattr(thread, "run", lambda: context.run(run))
        start(thread)

    monkeypatch.setattr(threads, "_idle", [])
    monkeypatch.setattr(threading.Thread, "start", inheriting)
    seen, done = list[str](), threading.Event()
    context = copy_context()
    context.run(variable.set, "of the first")
    worker = context.run(threads.take, "a test's")
    worker.submit(lambda: seen.append(variable.get()))
    worker.submit(done.set)
    assert done.wait(60)
    worker.release()
    assert seen == [""]


class ReadWhile(list[Any]):
    """A list that calls a function whenever its length is read."""

    def __init__(self, values: list[Any], happens: Callable[[], object]) -> None:
        super().__init__(values)
        self._happens = happens

    def __len__(self) -> int:
        self._happens()
        return super().__len__()


async def test_other_threads_with_other_numbers_of_replicas_do_not_affect_a_reduction() -> None:
    """Without the interpreter lock they may look up their executor of the same request at the same time."""

    async def program() -> float:
        handle = here().all_reduce("MEAN", {"a": np.ones(37), "b": np.ones(3)})
        slot, member = posted(handle)
        if member.replica_id == 0:
            find = functools.partial(slot.request.executor, 2, (), "native", ())
            slot.values = ReadWhile(slot.values, find if member.group.size == 2 else int)
        return float((await handle)["a"][0])

    assert await on_each(3, program) == (1, 1, 1)
    assert await on_each(2, program) == (1, 1)


@pytest.mark.parametrize("locked", [True, False])
async def test_snapshot_in_another_thread_reads_frames_only_under_the_interpreter_lock(
    locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread takes it for the other workers while the loop is blocked; without the lock Python may crash."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: locked, raising=False)
    found: list[bool] = []

    async def program() -> None:
        handle = here().barrier()
        run = handle._me.run
        asking = threading.Thread(target=lambda: found.append(any(each.stack for each in run.snapshot().replicas)))
        asking.start()
        asking.join()
        await handle

    await mirrored(1).run(program)
    assert found == [locked]


# Reductions in threads; test_conformance has runs that end in the meantime.


def part(index: int) -> np.ndarray:
    return np.random.default_rng(index).uniform(1, 2, 1 << 16).astype(np.float32)


async def test_overlapped_reductions_complete_each_when_it_is_done(held: HeldThreads) -> None:
    order: list[int] = []

    async def program() -> list[Any]:
        handles = [here().all_reduce("SUM", part(i + replica()), name=str(i)) for i in range(3)]
        if replica() == 1:
            await held.wait()
            assert not any(handle.done() for handle in handles)
            held.given.reverse()
            held.go_on()
            await turns()
            assert all(handle.done() for handle in handles)
        found = [await handle for handle in handles]
        order.append(replica())
        assert not any(array.flags.writeable for array in found)
        return [array.tobytes() for array in found]

    assert (await on_each(2, program))[0] == [(part(i) + part(i + 1)).tobytes() for i in range(3)]
    assert order == [0, 1]


@pytest.mark.parametrize("awaited", [True, False])
async def test_work_ends_before_the_run_and_has_no_time_limit_once_all_have_arrived(
    awaited: bool, held: HeldThreads
) -> None:
    handles: list[Any] = []

    async def program() -> None:
        handles.append(here().all_reduce("SUM", part(replica()), CommunicationOptions(timeout_seconds=1e-9)))
        if replica() == 0:
            tasks.start_soon(release)
        if awaited:
            await handles[replica()]

    async def release() -> None:
        await held.wait()
        held.go_on()

    with warned() as found:
        async with anyio.create_task_group() as tasks:
            await mirrored(2).run(program)
            assert held.taken == 0
    assert all(handle.done() for handle in handles)
    assert ["never awaited" in warning.text for warning in found] == [True] * (2 - 2 * awaited)


async def test_error_in_a_worker_thread_is_raised_in_every_replica(held: HeldThreads) -> None:
    async def program() -> str:
        handle = here().all_reduce("SUM", part(replica()))
        if replica() == 1:
            await held.wait()
            held.given[:] = [functools.partial(with_failing_calls, fn) for fn in held.given]
            held.go_on()
        with pytest.raises(MemoryError) as caught:
            await handle
        return str(caught.value)

    def with_failing_calls(take: Any) -> None:
        take.__self__._calls[:] = [fail] * len(take.__self__._calls)
        take()

    def fail() -> None:
        raise MemoryError("no room")

    assert await on_each(2, program) == ("no room", "no room")


async def test_contributions_are_released_when_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1)
    alive: list[Any] = []

    async def program() -> None:
        for _ in range(2):
            mine = part(replica())
            alive.append(weakref.ref(mine))
            await here().all_reduce("SUM", mine)

    await mirrored(2).run(program)
    while any(thread.name == "aiodist reduction" for thread in threading.enumerate()):
        await turns(1)  # the thread is about to drop the work
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4
