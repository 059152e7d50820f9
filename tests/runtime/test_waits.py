"""Who waits for whom: what a suspended task is found to wait for, who holds a lock, and the cycles."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
import trio

from aiodist import CollectiveError, ReplicaContext
from aiodist._runtime.inspection import WaitGraph, look_at_loop
from aiodist._runtime.waits import Awaited
from tests.runtime.programs import Program, mirrored, run

pytestmark = pytest.mark.anyio
on_asyncio = pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)
on_trio = pytest.mark.parametrize("anyio_backend", [("trio", {})], ids=["trio"])
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


def expect(*lines: str) -> Look:
    def check(graph: WaitGraph) -> None:
        assert lines_of(graph) == list(lines)

    return check


async def one_each(ctx: ReplicaContext, *waits: Callable[[], Awaitable[Any]]) -> None:
    """Let each replica wait in its own way."""
    await waits[ctx.replica_id_in_sync_group]()


async def sleeper() -> None:
    await anyio.sleep(1000)


async def test_what_anyio_has_to_wait_in() -> None:
    async def notify() -> None:
        condition = anyio.Condition()
        async with condition:
            await condition.wait()

    async def receive() -> None:
        send, receive = anyio.create_memory_object_stream[int](1)
        with send, receive:
            await receive.receive()

    async def put() -> None:
        send, receive = anyio.create_memory_object_stream[int](0)
        with send, receive:
            await send.send(1)

    async def group() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleeper, name="loader")

    async def steps() -> AsyncIterator[int]:
        await anyio.sleep(7)
        yield 1

    async def step() -> None:
        async with contextlib.aclosing(steps()) as found:  # type: ignore[type-var]
            async for _ in found:
                pass

    waits: list[Callable[[], Awaitable[Any]]] = [
        lambda: anyio.Event().wait(),
        lambda: anyio.Semaphore(0).acquire(),
        notify,
        receive,
        put,
        group,
        step,
        anyio.sleep_forever,
    ]
    await look_at(
        lambda ctx: one_each(ctx, *waits),
        expect(
            "replica 0 waits for an anyio.Event to be set",
            "replica 1 waits for an anyio.Semaphore",
            "replica 2 waits for an anyio.Condition to be notified",
            "replica 3 waits for an item of an anyio.MemoryObjectReceiveStream",
            "replica 4 waits for room in an anyio.MemoryObjectSendStream",
            "replica 5 waits for the task 'loader'",
            "replica 5's task 'loader' waits for anyio.sleep(1000)",
            "replica 6 waits for anyio.sleep(7)",
            "replica 7 waits forever: sleep_forever()",
        ),
        len(waits),
    )


@on_asyncio
async def test_what_asyncio_has_to_wait_in() -> None:
    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper(), name="loader")

    async def gathered() -> None:
        await asyncio.gather(sleeper(), sleeper())

    async def notify() -> None:
        condition = asyncio.Condition()
        async with condition:
            await condition.wait()

    async def shielded() -> None:
        task = asyncio.create_task(sleeper(), name="inner")
        try:
            await asyncio.shield(task)
        finally:
            task.cancel()

    async def timed() -> None:
        await asyncio.wait_for(asyncio.create_task(sleeper(), name="timed"), 1000)

    async def put() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        await queue.put(1)
        await queue.put(2)

    waits: list[Callable[[], Awaitable[Any]]] = [
        lambda: asyncio.Event().wait(),
        lambda: asyncio.Semaphore(0).acquire(),
        lambda: asyncio.Queue[int]().get(),
        lambda: asyncio.sleep(1000),
        lambda: asyncio.get_running_loop().create_future(),
        lambda: asyncio.StreamReader().readline(),
        notify,
        put,
        gathered,
        group,
        shielded,
        timed,
    ]

    def check(graph: WaitGraph) -> None:
        main = [line for line in lines_of(graph) if "'s task" not in line and not line.startswith("2 times")]
        assert main == [
            "replica 0 waits for an asyncio.Event to be set",
            "replica 1 waits for an asyncio.Semaphore",
            "replica 2 waits for an item of an asyncio.Queue",
            "replica 3 waits for asyncio.sleep(1000)",
            "replica 4 waits for a future",
            "replica 5 waits for I/O: StreamReader.readline()",
            "replica 6 waits for an asyncio.Condition to be notified",
            "replica 7 waits for room in an asyncio.Queue",
            "replica 8 waits for 2 tasks of gather()",
            "replica 9 waits for the task 'loader'",
            "replica 10 waits for the task 'inner'",
            "replica 11 waits for the task 'timed'",
        ]
        assert "replica 9's task 'loader' waits for anyio.sleep(1000)" in lines_of(graph)

    await look_at(lambda ctx: one_each(ctx, *waits), check, len(waits))


@on_trio
async def test_what_trio_has_to_wait_in() -> None:
    async def notify() -> None:
        condition = trio.Condition()
        async with condition:
            await condition.wait()

    async def receive() -> None:
        _send, receive = trio.open_memory_channel[int](0)
        await receive.receive()

    async def nursery() -> None:
        async with trio.open_nursery() as tasks:
            tasks.start_soon(sleeper, name="loader")

    waits: list[Callable[[], Awaitable[Any]]] = [
        lambda: trio.Event().wait(),
        lambda: trio.Semaphore(0).acquire(),
        partial(trio.sleep, 1000),
        trio.sleep_forever,
        notify,
        receive,
        nursery,
    ]
    await look_at(
        lambda ctx: one_each(ctx, *waits),
        expect(
            "replica 0 waits for a trio.Event to be set",
            "replica 1 waits for a trio.Semaphore",
            "replica 2 waits for trio.sleep(1000)",
            "replica 3 waits forever: sleep_forever()",
            "replica 4 waits for a trio.Condition to be notified",
            "replica 5 waits for an item of a trio.MemoryReceiveChannel",
            "replica 6 waits for the task 'loader'",
            "replica 6's task 'loader' waits for anyio.sleep(1000)",
        ),
        len(waits),
    )


async def test_work_in_a_thread_is_told() -> None:
    go_on = threading.Event()

    def work() -> None:
        go_on.wait(30)

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group:
            await anyio.to_thread.run_sync(work)
        else:
            await ctx.run_sync(work)

    def check(graph: WaitGraph) -> None:
        go_on.set()
        assert [w.kind for w in graph.waits() if w.replica_id is not None] == [Awaited.THREAD, Awaited.THREAD]
        assert lines_of(graph) == [
            "replica 0 waits for work() in the device's thread",
            "replica 1 waits for work() in a thread",
        ]

    await look_at(program, check)


async def test_a_merge_function_that_hangs_is_shown_with_those_who_wait_for_it() -> None:
    async def merge(strategy: Any) -> None:
        await anyio.Event().wait()

    def check(graph: WaitGraph) -> None:
        assert [(w.who, w.kind, w.on) for w in graph.waits()][:3] == [
            ("replica 0", Awaited.COLLECTIVE, ("the merge function of #0",)),
            ("replica 1", Awaited.COLLECTIVE, ("the merge function of #0",)),
            ("the merge function of #0", Awaited.EVENT, ()),
        ]

    await look_at(lambda ctx: ctx.merge_call(merge), check)


async def test_a_lock_held_across_a_collective_is_a_cycle() -> None:
    lock = anyio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        async with lock:
            await ctx.barrier()

    def check(graph: WaitGraph) -> None:
        zero, one, *_ = graph.waits()
        assert (zero.kind, zero.on) == (Awaited.COLLECTIVE, ("replica 1",))
        assert (one.kind, one.on) == (Awaited.LOCK, ("replica 0",))
        assert zero.location is not None
        text = " ".join(re.sub(r"\(\S*test_waits.py", "(a.py", graph.cycle_text()).split())
        assert text == (
            f"replica 0 waits in barrier #0 (a.py:{zero.location.line}) for replica 1, "
            f"which waits for an anyio.Lock (a.py:{zero.location.line - 1}) that replica 0 holds"
        )

    await look_at(program, check)


@on_asyncio
async def test_who_holds_a_lock_of_asyncio_is_found_by_looking() -> None:
    locks = asyncio.Lock(), asyncio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        mine = ctx.replica_id_in_sync_group
        async with locks[mine]:
            await anyio.lowlevel.checkpoint()
            async with locks[1 - mine]:
                pass

    def check(graph: WaitGraph) -> None:
        assert [(edge.waiter.who, edge.on.who, edge.certain) for edge in graph.cycle()] == [
            ("replica 0", "replica 1", True),
            ("replica 1", "replica 0", True),
        ]

    await look_at(program, check)


@on_asyncio
async def test_a_lock_taken_without_a_with_has_no_holder_to_be_seen() -> None:
    lock = asyncio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        await lock.acquire()
        await ctx.barrier()

    def check(graph: WaitGraph) -> None:
        assert graph.waits()[1].on == ()
        assert "; who took it cannot be seen" in graph.lines()[1]
        assert [edge.certain for edge in graph.cycle()] == [True, False]

    await look_at(program, check)


async def test_queues_in_a_ring_are_a_cycle_by_what_is_at_hand() -> None:
    streams = [anyio.create_memory_object_stream[int](1) for _ in range(3)]

    async def program(ctx: ReplicaContext) -> None:
        mine = ctx.replica_id_in_sync_group
        await streams[mine][1].receive()
        await streams[(mine + 1) % 3][0].send(1)

    def check(graph: WaitGraph) -> None:
        assert lines_of(graph) == ["replicas 0-2 wait for an item of an anyio.MemoryObjectReceiveStream"]

    await look_at(program, check, 3)
    for send, receive in streams:
        send.close()
        receive.close()


async def test_a_crowd_that_waits_for_a_crowd_is_looked_at_in_one_pass() -> None:
    never = anyio.Event()

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group % 2:
            await never.wait()
        await ctx.barrier()

    def check(graph: WaitGraph) -> None:
        assert [edge.certain for edge in graph.cycle()] == [True, False]
        assert [len(w.on) for w in graph.waits()[:2]] == [150, 0]
        assert len(lines_of(graph)) == 2
        assert all(len(line) < 150 for line in lines_of(graph))

    await look_at(program, check, 300)
