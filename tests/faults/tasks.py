"""Child tasks, exceptions, cancellation, timeouts, threads and locks beside the calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

import aiodist
from aiodist import Reason, ReplicaContext
from tests.faults import trainer
from tests.faults.case import (
    EVERYONE,
    LOSS,
    SIZES,
    abandoned,
    correct,
    deadlock,
    fail,
    family,
    fault,
    incomplete,
    me,
    mismatch,
    odd,
    race,
    raises,
)

family("child task")  # Child tasks of one replica that issue collectives side by side.


async def load(batch: int) -> np.ndarray:
    """Return a batch, after a turn of the loop."""
    await asyncio.sleep(0)
    return np.array([batch, 1.0], np.float32)


@race(Reason.CALL_SITE)
async def two_tasks_race_to_reduce(ctx: ReplicaContext) -> None:
    async def loss() -> None:
        await ctx.all_reduce("SUM", await load(1))

    async def gradient() -> None:
        await ctx.all_reduce("SUM", await load(2))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(loss())
        tasks.create_task(gradient())


@race(Reason.REDUCE_OP)
async def gathered_coroutines_race(ctx: ReplicaContext) -> None:
    async def reduce(op: str) -> None:
        await ctx.all_reduce(op, await load(1))

    await asyncio.gather(reduce("SUM"), reduce("MAX"))


@race(Reason.NAME)
async def workers_take_names_from_a_queue(ctx: ReplicaContext) -> None:
    names: asyncio.Queue[str] = asyncio.Queue()
    for name in "abcd":
        names.put_nowait(name)

    async def worker() -> None:
        while not names.empty():
            name = names.get_nowait()
            await ctx.all_reduce("SUM", await load(1), name=name)

    await asyncio.gather(worker(), worker())


@race(Reason.SHAPE)
async def reduces_in_order_of_completion(ctx: ReplicaContext) -> None:
    async def compute(size: int) -> np.ndarray:
        await asyncio.sleep(0)
        return np.zeros(size)

    for done in asyncio.as_completed([compute(2), compute(3)]):
        await ctx.all_reduce("SUM", await done)


@race(Reason.KIND, says="its own task")
async def logs_beside_the_step(ctx: ReplicaContext) -> None:
    async def log() -> None:
        await asyncio.sleep(0)
        await ctx.all_gather(np.zeros(1), 0)

    logging = asyncio.create_task(log())
    await asyncio.sleep(0)
    await ctx.all_reduce("SUM", np.zeros(1))
    await logging


@correct(anyio=False)
async def tasks_with_a_group_each(ctx: ReplicaContext) -> None:
    groups = [ctx.new_group(EVERYONE, name=name) for name in ("loss", "gradient")]

    async def reduce(group: ReplicaContext) -> None:
        for batch in range(3):
            await group.all_reduce("SUM", await load(batch))

    await asyncio.gather(*map(reduce, groups))


@correct(anyio=False)
async def only_one_task_issues_collectives(ctx: ReplicaContext) -> None:
    async def compute() -> None:
        for batch in range(5):
            await load(batch)

    computing = asyncio.create_task(compute())
    for batch in range(3):
        await ctx.all_reduce("SUM", await load(batch))
    await computing


@correct(anyio=False)
async def issued_in_order_and_awaited_in_tasks(ctx: ReplicaContext) -> None:
    async def result_of(handle: Awaitable[object]) -> object:
        await asyncio.sleep(0)
        return await handle

    issued = [ctx.all_reduce("SUM", np.zeros(2)), ctx.all_gather(np.zeros(1), 0)]
    await asyncio.gather(*map(result_of, issued))


family("exception")  # Exceptions: raised, swallowed, and what `finally` does after them.


def parse(ctx: ReplicaContext, bad: int) -> np.ndarray:
    """Return a batch; the bad replica's is broken."""
    if me(ctx) == bad:
        raise ValueError("broken batch")
    return LOSS


@raises(ValueError, peers=True)
async def one_replica_raises(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("SUM", parse(ctx, 1))


@mismatch(Reason.KIND, 1, peers=True)
async def swallows_its_own_exception(ctx: ReplicaContext) -> None:
    with suppress(ValueError):
        await ctx.all_reduce("SUM", parse(ctx, 1))  # named
    await ctx.barrier()  # named


@incomplete(Reason.EXITED, 3)
async def swallows_the_collective_error(ctx: ReplicaContext) -> None:
    if me(ctx) == 3:
        return
    with suppress(aiodist.CollectiveError):
        await ctx.all_reduce("SUM", LOSS)  # named


@mismatch(Reason.KIND, 0, peers=True)
async def barrier_in_finally(ctx: ReplicaContext) -> None:
    try:
        await ctx.all_reduce("SUM", parse(ctx, 0))  # named
    finally:
        await ctx.barrier()  # named


@raises(ExceptionGroup)
async def replicas_fail_in_two_ways(ctx: ReplicaContext) -> None:
    try:
        await ctx.barrier()
        if odd(ctx):
            await fail()
        await ctx.barrier()
    finally:
        if me(ctx) != 1:
            raise KeyError("while cleaning up")


family("waiting")  # Cancelled waits, timeouts, slow replicas, threads and timers while the others wait.


@asynccontextmanager
async def replica_0_comes_late(ctx: ReplicaContext, over: Any) -> AsyncIterator[None]:
    """Let the others wait for replica 0 until one of them gives up; then let all meet."""
    if me(ctx) == 0:
        await over.wait()
    yield
    over.set()
    await ctx.barrier()


@incomplete(Reason.ABANDONED, 1, shared=anyio.Event)
async def timeout_around_one_collective(ctx: ReplicaContext, over: anyio.Event) -> None:
    async with replica_0_comes_late(ctx, over):
        with anyio.move_on_after(0.01 if odd(ctx) else 60):
            await ctx.all_reduce("SUM", LOSS)  # named


@fault(aiodist.CollectiveTimeoutError, Reason.TIMEOUT, 3, shared=anyio.Event)
async def never_comes(ctx: ReplicaContext, never: anyio.Event) -> None:
    if me(ctx) == 3:
        await never.wait()  # named
    await ctx.all_reduce("SUM", LOSS, aiodist.CommunicationOptions(timeout_seconds=0.05))  # named


@correct(peers=True)
async def slow_replica(ctx: ReplicaContext) -> None:
    for _ in range(3):
        for _ in range(10 * me(ctx)):
            await anyio.lowlevel.checkpoint()
        await ctx.all_reduce("SUM", LOSS)


@correct()
async def computes_in_a_thread(ctx: ReplicaContext) -> None:
    for step in range(3):
        if me(ctx) == step:
            await ctx.run_sync(sum, range(10_000))
        await ctx.all_reduce("SUM", LOSS)


@correct()
async def timeout_that_does_not_fire(ctx: ReplicaContext) -> None:
    with anyio.fail_after(60):
        await ctx.all_reduce("SUM", LOSS)


@correct()
async def timeout_away_from_collectives(ctx: ReplicaContext) -> None:
    with anyio.move_on_after(0.001 * me(ctx)):
        await anyio.sleep_forever()
    await ctx.all_reduce("SUM", LOSS)


@correct(shared=anyio.Event, anyio=False)
async def woken_by_a_timer(ctx: ReplicaContext, event: anyio.Event) -> None:
    if odd(ctx):
        asyncio.get_running_loop().call_later(0.005, event.set)
        await event.wait()
    await ctx.all_reduce("SUM", LOSS)


@correct(anyio=False)
async def woken_by_a_thread(ctx: ReplicaContext) -> None:
    if me(ctx) == 2:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        wake = loop.run_in_executor(None, loop.call_soon_threadsafe, woken.set)
        await woken.wait()
        await wake
    await ctx.all_reduce("SUM", LOSS)


@abandoned(anyio=False, says="ValueError", shared=asyncio.Event)
async def sibling_task_fails(ctx: ReplicaContext, over: asyncio.Event) -> None:
    async with replica_0_comes_late(ctx, over):

        async def reduce() -> None:
            await ctx.all_reduce("SUM", LOSS)  # named

        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(reduce())
                if odd(ctx):
                    await asyncio.sleep(0.01)
                    tasks.create_task(fail())


@abandoned(anyio=False, says="wait_for", shared=asyncio.Event)
async def wait_for_one_collective(ctx: ReplicaContext, over: asyncio.Event) -> None:
    async with replica_0_comes_late(ctx, over):
        with suppress(TimeoutError):
            await asyncio.wait_for(ctx.all_reduce("SUM", LOSS), 0.05 if odd(ctx) else 60)  # named


@abandoned(anyio=False, says="asyncio.timeout(", shared=asyncio.Event)
async def timeout_around_a_helper(ctx: ReplicaContext, over: asyncio.Event) -> None:
    async with replica_0_comes_late(ctx, over):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05 if odd(ctx) else 60):
                await trainer.average(ctx, LOSS)


@abandoned(anyio=False, says="was cancelled out of", shared=asyncio.Event)
async def task_cancelled_by_its_own_replica(ctx: ReplicaContext, over: asyncio.Event) -> None:
    async with replica_0_comes_late(ctx, over):
        task = asyncio.create_task(trainer.average(ctx, LOSS))
        if odd(ctx):
            await asyncio.sleep(0.01)
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@abandoned(says="its sibling", shared=anyio.Event)
async def sibling_fails_in_a_task_group_of_anyio(ctx: ReplicaContext, over: anyio.Event) -> None:
    async with replica_0_comes_late(ctx, over):
        with suppress(ExceptionGroup):
            async with anyio.create_task_group() as tasks:
                if odd(ctx):
                    tasks.start_soon(fail)
                await ctx.all_reduce("SUM", LOSS)  # named


@abandoned(says="'cancel' cancelled its scope", shared=anyio.Event)
async def scope_cancelled_by_a_sibling(ctx: ReplicaContext, over: anyio.Event) -> None:
    async with replica_0_comes_late(ctx, over), anyio.create_task_group() as tasks:
        if odd(ctx):

            async def cancel() -> None:
                tasks.cancel_scope.cancel()

            tasks.start_soon(cancel)
        await ctx.all_reduce("SUM", LOSS)  # named


@abandoned(anyio=False, never="time limit around")
async def one_is_late_and_the_others_time_out(ctx: ReplicaContext) -> None:
    if odd(ctx):
        await asyncio.sleep(9)  # named
    with suppress(TimeoutError):
        await asyncio.wait_for(ctx.all_reduce("SUM", LOSS), 0.1)  # named
    await ctx.barrier()


@abandoned(anyio=False, shared=asyncio.Event)
async def times_out_and_returns(ctx: ReplicaContext, over: asyncio.Event) -> None:
    if me(ctx) == 0:
        await over.wait()
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05 if odd(ctx) else 60):
            await ctx.all_reduce("SUM", LOSS)  # named
    over.set()


@mismatch(Reason.KIND, 1, sizes=SIZES, never="drop the remainder")
async def leaves_the_loop_by_an_exception(ctx: ReplicaContext) -> None:
    with suppress(ValueError):
        for step in range(3):
            if odd(ctx) and step == 1:
                await fail()
            await ctx.all_reduce("MEAN", LOSS)  # named
    await ctx.barrier()  # named


@incomplete(Reason.EXITED, 1, sizes=SIZES, never="drop the remainder")
async def swallows_and_returns(ctx: ReplicaContext) -> None:
    for step in range(3):
        try:
            if odd(ctx) and step == 1:
                await fail()
        except ValueError:
            return  # named
        await ctx.all_reduce("MEAN", LOSS)  # named


@correct(sizes=SIZES, anyio=False)
async def sibling_fails_before_the_collective(ctx: ReplicaContext) -> None:
    with suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail() if odd(ctx) else asyncio.sleep(0))
    await ctx.all_reduce("SUM", LOSS)


@correct(sizes=SIZES, anyio=False)
async def cancelled_after_it_was_complete(ctx: ReplicaContext) -> None:
    task = asyncio.create_task(trainer.average(ctx, LOSS))
    await ctx.barrier()
    await task
    task.cancel()
    await ctx.barrier()


family("side channel")  # Locks, events, queues and tasks between replicas: what is awaited beside the collectives.


def one_each(make: Callable[[], Any]) -> Callable[[], list[Any]]:
    """Return what makes an object for each replica."""
    return lambda: [make() for _ in EVERYONE]


@deadlock(1, 2, 3, shared=asyncio.Lock)
async def lock_held_across_a_sum(ctx: ReplicaContext, lock: asyncio.Lock) -> None:
    if me(ctx) == 0:
        await lock.acquire()
    await ctx.barrier()
    if me(ctx):
        await lock.acquire()  # named
    await ctx.all_reduce("SUM", LOSS)  # named
    lock.release()


@deadlock(2, name="queue_that_nobody_fills", shared=lambda: (2, asyncio.Queue().get))
@deadlock(3, name="event_that_nobody_sets", shared=lambda: (3, asyncio.Event().wait))
async def one_waits_in_vain(ctx: ReplicaContext, shared: tuple[int, Callable[[], Awaitable[Any]]]) -> None:
    waiter, wait = shared
    if me(ctx) == waiter:
        await wait()  # named
    await ctx.all_reduce("SUM", LOSS)  # named


@deadlock(0, shared=lambda: asyncio.Queue(1))
async def queue_that_nobody_empties(ctx: ReplicaContext, queue: asyncio.Queue[int]) -> None:
    if me(ctx) == 0:
        for item in range(2):
            await queue.put(item)  # named
    await ctx.barrier()  # named
    if odd(ctx):
        await queue.get()


@deadlock(*EVERYONE, shared=one_each(asyncio.Queue))
async def ring_that_receives_first(ctx: ReplicaContext, ring: list[asyncio.Queue[int]]) -> None:
    i = me(ctx)
    await ring[i].get()  # named
    await ring[(i + 1) % 4].put(i)
    await ctx.barrier()


@deadlock(2, 3, shared=lambda: asyncio.Semaphore(2))
async def semaphore_held_across_a_barrier(ctx: ReplicaContext, slots: asyncio.Semaphore) -> None:
    if me(ctx) > 1:
        await ctx.new_group([2, 3]).barrier()
        await asyncio.sleep(1)
    async with slots:  # named
        await ctx.barrier()  # named


@deadlock(3, shared=asyncio.Condition)
async def condition_that_nobody_notifies(ctx: ReplicaContext, condition: asyncio.Condition) -> None:
    if me(ctx) == 3:
        async with condition:
            await condition.wait()  # named
    await ctx.all_reduce("SUM", LOSS)  # named


@deadlock(0, shared=dict)
async def awaits_the_task_of_another(ctx: ReplicaContext, tasks: dict[str, asyncio.Task[Any]]) -> None:
    async def reduce() -> None:
        await ctx.all_reduce("SUM", LOSS, name="reduce")  # named

    if odd(ctx):
        tasks["reduce"] = asyncio.create_task(reduce())
        await tasks["reduce"]  # named
    elif me(ctx) == 0:
        await asyncio.sleep(1)
        await asyncio.shield(tasks["reduce"])  # named
        await ctx.all_reduce("SUM", LOSS, name="reduce")
    else:
        await ctx.all_reduce("SUM", LOSS, name="reduce")  # named


@correct(shared=lambda: SimpleNamespace(lock=anyio.Lock(), total=0))
async def lock_released_before_the_sum(ctx: ReplicaContext, shared: Any) -> None:
    async with shared.lock:
        total = shared.total
        await anyio.lowlevel.checkpoint()
        shared.total = total + 1
    await ctx.all_reduce("SUM", LOSS)
    assert shared.total == 4


@correct(shared=one_each(anyio.Event))
async def one_wakes_the_next(ctx: ReplicaContext, events: list[anyio.Event]) -> None:
    i = me(ctx)
    if i:
        await events[i - 1].wait()
    events[i].set()
    await ctx.all_reduce("SUM", LOSS)


@correct(shared=one_each(partial(anyio.create_memory_object_stream, 4)))
async def ring_that_sends_first(ctx: ReplicaContext, streams: list[Any]) -> None:
    i = me(ctx)
    send, receive = streams[(i + 1) % 4][0], streams[i][1]
    with send, receive:
        await send.send(i)
        assert await receive.receive() == (i - 1) % 4
        await ctx.all_reduce("SUM", LOSS)


@correct(shared=anyio.Event)
async def woken_between_two_collectives(ctx: ReplicaContext, event: anyio.Event) -> None:
    await ctx.barrier()
    if me(ctx) == 3:
        event.set()
    await event.wait()
    await ctx.barrier()
