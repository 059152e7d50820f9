"""Who waits for whom: what a suspended task is found to wait for, who holds a lock, and the cycles."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import anyio
import pytest
import trio

from aiodist import CollectiveError, ReplicaContext
from aiodist._runtime.inspection import WaitGraph, look_at_loop
from tests.runtime.programs import Program, mirrored, run

pytestmark = pytest.mark.anyio
Look = Callable[[WaitGraph], None]


async def look_at(program: Program, check: Look, replicas: int = 2) -> None:
    """Run a program until nothing in it moves any more, look who waits for whom, and end it."""
    async with anyio.create_task_group() as tasks:

        async def looker() -> None:
            for _ in range(50 + 2 * replicas):
                await anyio.lowlevel.checkpoint()
            try:
                check(look_at_loop())
            finally:
                tasks.cancel_scope.cancel()

        tasks.start_soon(looker)
        with contextlib.suppress(CollectiveError):  # cancelled out of collectives
            await run(mirrored(replicas), program)


def lines_of(graph: WaitGraph) -> list[str]:
    """Return what is said of replicas and their tasks, without directories."""
    return [re.sub(r" \(\S+:\d+\)", "", line) for line in graph.lines() if line.startswith("replica")]


# What a task waits for.


async def sleeper() -> None:
    await anyio.sleep(1000)


async def notified(condition: Any) -> None:
    async with condition:
        await condition.wait()


async def receives() -> None:
    send, receive = anyio.create_memory_object_stream[int](1)
    with send, receive:
        await receive.receive()


async def sends() -> None:
    send, receive = anyio.create_memory_object_stream[int](0)
    with send, receive:
        await send.send(1)


async def in_a_group() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleeper, name="loader")


async def steps() -> AsyncIterator[int]:
    await anyio.sleep(7)
    yield 1


async def in_a_generator() -> None:
    async with contextlib.aclosing(steps()) as found:  # type: ignore[type-var]
        async for _ in found:
            pass


async def in_asyncios_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sleeper(), name="loader")


async def shielded() -> None:
    task = asyncio.create_task(sleeper(), name="inner")
    try:
        await asyncio.shield(task)
    finally:
        task.cancel()


async def timed() -> None:
    await asyncio.wait_for(asyncio.create_task(sleeper(), name="timed"), 1000)


async def gathered() -> None:
    await asyncio.gather(sleeper(), sleeper())


async def puts() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(1)
    await queue.put(1)
    await queue.put(2)


async def trio_receives() -> None:
    _send, receive = trio.open_memory_channel[int](0)
    await receive.receive()


async def in_a_nursery() -> None:
    async with trio.open_nursery() as tasks:
        tasks.start_soon(sleeper, name="loader")


Ways = Mapping[str, Callable[[], Awaitable[Any]]]
OF_ANYIO: Ways = {
    "waits for an anyio.Event to be set": lambda: anyio.Event().wait(),
    "waits for an anyio.Semaphore": lambda: anyio.Semaphore(0).acquire(),
    "waits for an anyio.Condition to be notified": lambda: notified(anyio.Condition()),
    "waits for an item of an anyio.MemoryObjectReceiveStream": receives,
    "waits for room in an anyio.MemoryObjectSendStream": sends,
    "waits for the task 'loader'": in_a_group,
    "waits for anyio.sleep(7)": in_a_generator,
    "waits forever: sleep_forever()": anyio.sleep_forever,
}
OF_ASYNCIO: Ways = {
    "waits for an asyncio.Event to be set": lambda: asyncio.Event().wait(),
    "waits for an asyncio.Semaphore": lambda: asyncio.Semaphore(0).acquire(),
    "waits for an item of an asyncio.Queue": lambda: asyncio.Queue[int]().get(),
    "waits for asyncio.sleep(1000)": lambda: asyncio.sleep(1000),
    "waits for a future": lambda: asyncio.get_running_loop().create_future(),
    "waits for I/O: StreamReader.readline()": lambda: asyncio.StreamReader().readline(),
    "waits for an asyncio.Condition to be notified": lambda: notified(asyncio.Condition()),
    "waits for room in an asyncio.Queue": puts,
    "waits for 2 tasks of gather()": gathered,
    "waits for the task 'loader'": in_asyncios_group,
    "waits for the task 'inner'": shielded,
    "waits for the task 'timed'": timed,
}
OF_TRIO: Ways = {
    "waits for a trio.Event to be set": lambda: trio.Event().wait(),
    "waits for a trio.Semaphore": lambda: trio.Semaphore(0).acquire(),
    "waits for trio.sleep(1000)": partial(trio.sleep, 1000),
    "waits forever: sleep_forever()": trio.sleep_forever,
    "waits for a trio.Condition to be notified": lambda: notified(trio.Condition()),
    "waits for an item of a trio.MemoryReceiveChannel": trio_receives,
    "waits for the task 'loader'": in_a_nursery,
}


@pytest.mark.every_loop
@pytest.mark.parametrize("library", ["anyio", "its own"])
async def test_what_tasks_wait_for_is_told(library: str, anyio_backend_name: str) -> None:
    ways = OF_ANYIO if library == "anyio" else OF_TRIO if anyio_backend_name == "trio" else OF_ASYNCIO

    async def program(ctx: ReplicaContext) -> None:
        await list(ways.values())[ctx.replica_id_in_sync_group]()

    def check(graph: WaitGraph) -> None:
        lines = lines_of(graph)
        assert [line for line in lines if "'s task" not in line] == [f"replica {i} {w}" for i, w in enumerate(ways)]
        assert any(line.endswith("'s task 'loader' waits for anyio.sleep(1000)") for line in lines)

    await look_at(program, check, len(ways))


async def test_work_in_a_thread_is_told() -> None:
    go_on = threading.Event()

    def work() -> None:
        go_on.wait(30)

    async def program(ctx: ReplicaContext) -> None:
        await (anyio.to_thread.run_sync(work) if ctx.replica_id_in_sync_group else ctx.run_sync(work))

    def check(graph: WaitGraph) -> None:
        go_on.set()
        assert lines_of(graph) == [
            "replica 0 waits for work() in the device's thread",
            "replica 1 waits for work() in a thread",
        ]

    await look_at(program, check)


async def test_a_merge_function_that_hangs_is_shown_with_those_who_wait_for_it() -> None:
    async def merge(strategy: Any) -> None:
        await anyio.Event().wait()

    def check(graph: WaitGraph) -> None:
        assert [re.sub(r" \(\S+:\d+\)", "", line) for line in graph.lines(replicas_alone=True)] == [
            "replicas 0 and 1 wait in merge_call #0 for the merge function of #0",
            "the merge function of #0 waits for an anyio.Event to be set",
        ]

    await look_at(lambda ctx: ctx.merge_call(merge), check)


# Cycles.


@pytest.mark.every_loop
async def test_a_lock_held_across_a_collective_is_a_cycle() -> None:
    lock = anyio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        async with lock:
            await ctx.barrier()

    def check(graph: WaitGraph) -> None:
        assert lines_of(graph) == [
            "replica 0 waits in barrier #0 for replica 1",
            "replica 1 waits for an anyio.Lock, which replica 0 holds",
        ]
        line = program.__code__.co_firstlineno + 2
        text = " ".join(re.sub(r"\(\S*test_waits.py", "(a.py", graph.cycle_text()).split())
        assert text == (
            f"The cycle: replica 0 waits in barrier #0 (a.py:{line}) for replica 1, "
            f"which waits for an anyio.Lock (a.py:{line - 1}) that replica 0 holds."
        )

    await look_at(program, check)


@pytest.mark.every_loop("asyncio", "uvloop")
async def test_who_holds_a_lock_of_asyncio_is_found_by_looking() -> None:
    locks = asyncio.Lock(), asyncio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        mine = ctx.replica_id_in_sync_group
        async with locks[mine]:
            await anyio.lowlevel.checkpoint()
            async with locks[1 - mine]:
                pass

    def check(graph: WaitGraph) -> None:
        assert [waiter.who for waiter in graph.cycle] == ["replica 0", "replica 1"]
        assert graph.is_certain

    await look_at(program, check)


async def test_a_lock_taken_without_a_with_has_no_holder_to_be_seen() -> None:
    lock = asyncio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        await lock.acquire()
        await ctx.barrier()

    def check(graph: WaitGraph) -> None:
        assert "; who took it cannot be seen" in graph.lines()[1]
        assert [bool(graph.enders(waiter)) for waiter in graph.cycle] == [True, False]

    await look_at(program, check)


async def test_a_crowd_that_waits_for_a_crowd_is_looked_at_in_one_pass() -> None:
    never = anyio.Event()

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group % 2:
            await never.wait()
        await ctx.barrier()

    def check(graph: WaitGraph) -> None:
        assert [bool(graph.enders(waiter)) for waiter in graph.cycle] == [True, False]
        assert len(lines_of(graph)) == 2
        assert all(len(line) < 150 for line in lines_of(graph))

    await look_at(program, check, 300)
