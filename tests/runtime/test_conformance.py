"""Conformance of event loops: these tests run on asyncio, uvloop and trio; most others run on asyncio alone.

The order of wake-ups, cancellation, shielding, exceptions, Ctrl-C at every line, timers, and trio as another's guest.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationOptions,
    ReplicaContext,
)
from aiodist._collectives.work import thread_count
from aiodist._runtime import handle as handle_module
from aiodist._runtime import loop as loop_module
from tests.runtime.programs import (
    HeldThreads,
    Relay,
    error_of,
    here,
    mirrored,
    on_each,
    replica,
    results,
    run,
    still_works,
    turns,
)

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
Loop = tuple[str, dict[str, Any]]


def on(loop: Loop, main: Callable[..., Any], *args: Any) -> Any:
    """Run a coroutine function on an event loop of its own."""
    backend, options = loop
    return anyio.run(main, *args, backend=backend, backend_options=options)


# The order of wake-ups: replicas start, and continue after each collective, in the order of their ids.


@pytest.mark.parametrize(
    ("count", "orders"),
    [(4, [*itertools.permutations(range(4))]), (1, [(0,)] * 2), (200, [tuple(range(200))[::-1], tuple(range(200))])],
    ids=["any order", "one", "a crowd"],
)
async def test_replicas_continue_in_order_whoever_arrives_last(count: int, orders: list[tuple[int, ...]]) -> None:
    log: list[tuple[int, int]] = []
    relays = [Relay(order) for order in orders]

    async def program() -> None:
        log.append((-1, replica()))
        for number, relay in enumerate(relays):
            await relay.turn()
            arrival = here().barrier()
            relay.pass_on()
            await arrival
            log.append((number, replica()))

    await mirrored(count).run(program)
    assert log == [(number, replica_id) for number in range(-1, len(orders)) for replica_id in range(count)]


async def test_other_tasks_run_between_collectives() -> None:
    steps, over = 0, False

    async def neighbour() -> None:
        nonlocal steps
        while not over:
            steps += 1
            await turns(1)

    async def program(context: ReplicaContext) -> None:
        for _ in range(30):
            await context.barrier()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(neighbour)
        await run(mirrored(2), program)
        over = True
    assert steps >= 30


# Cancellation passes through a run, and leaves nothing behind.


async def in_barrier(last: Callable[[], Any]) -> None:
    """Wait in a barrier that never completes, once the last replica has called a function."""
    if replica() == 2:
        last()
        await anyio.sleep_forever()
    await here().barrier()


async def in_merge(last: Callable[[], Any]) -> None:
    async def merge(strategy: Any) -> None:
        last()
        await anyio.sleep_forever()

    await here().merge_call(merge)


async def in_a_child(last: Callable[[], Any]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_barrier, last)


async def before(last: Callable[[], Any]) -> None:
    """Cancel before the run."""
    await here().barrier()


async def at_once(last: Callable[[], Any]) -> None:
    """Cancel before any replica waits."""
    if replica() == 0:
        last()
    await here().barrier()
    await here().barrier()


async def in_step_after_step(last: Callable[[], Any]) -> None:
    """Do nothing but collectives: in every turn of the loop each replica is about to be woken."""
    for step in itertools.count():
        if step == 10 and replica() == 2:
            last()
        await here().barrier()


PLACES = pytest.mark.parametrize("place", [in_barrier, in_merge, in_a_child, before, at_once, in_step_after_step])


@PLACES
async def test_cancel_of_a_scope_around_the_run(place: Any) -> None:
    strategy = mirrored(3)
    with anyio.CancelScope() as scope:
        if place is before:
            scope.cancel()
        await strategy.run(place, args=(scope.cancel,))
        await turns(1)
    assert scope.cancelled_caught
    await still_works(strategy)


@pytest.mark.every_loop("asyncio", "uvloop")
@PLACES
async def test_cancel_of_an_asyncio_task(place: Any) -> None:
    strategy = mirrored(3)
    reached = asyncio.Event()
    task = asyncio.ensure_future(strategy.run(place, args=(reached.set,)))
    if place is not before:
        await (asyncio.sleep(0) if place is at_once else reached.wait())
    task.cancel("outside")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await still_works(strategy)


async def test_failure_while_a_cancelled_run_unwinds_is_raised() -> None:
    """As in any task group, the cancellation does not hide it; every replica unwinds."""
    unwound: list[int] = []

    async def program(cancel: Any) -> None:
        try:
            await in_barrier(cancel)
        finally:
            unwound.append(replica())
            if replica() == 1:
                raise LookupError("while unwinding")

    strategy = mirrored(3)
    with anyio.CancelScope() as scope, pytest.raises(LookupError) as caught:
        await strategy.run(program, args=(scope.cancel,))
    assert [note.startswith("replica 1 of 3 on CPU:1") for note in caught.value.__notes__] == [True]
    assert sorted(unwound) == [0, 1, 2]
    await still_works(strategy)


@pytest.mark.parametrize("cancelled", ["before the call", "after the call", "when it is woken"])
@pytest.mark.parametrize("order", [(1, 2, 0), (0, 2, 1), (0, 1, 2), (2, 1, 0)], ids=str)
async def test_cancellation_in_a_complete_collective_abandons_nothing(order: tuple[int, ...], cancelled: str) -> None:
    """It is raised in this await or in a later one, as the loop has it, or comes too late."""
    relay = Relay(order)
    scopes: dict[int, anyio.CancelScope] = {}

    async def program() -> int:
        await relay.turn()
        last = replica() == order[-1]
        with anyio.CancelScope() as scopes[replica()]:
            if last and cancelled == "before the call":
                scopes[replica()].cancel()
            handle = here().barrier(name="first")
            relay.pass_on()
            for each in range(3):
                if last and cancelled == ("after the call" if each == replica() else "when it is woken"):
                    scopes[each].cancel()
            await handle
        total: int = await here().all_reduce("SUM", 1)
        return total

    assert await on_each(3, program) == (3, 3, 3)


# Threads that work on contributions: no replica continues before they have finished with its arrays.


async def test_cancelled_replica_is_held_back_until_its_array_is_no_longer_read(held: HeldThreads) -> None:
    events: list[str] = []

    async def program() -> Any:
        mine = np.ones(1 << 16, np.float32)
        if replica() != 1:
            return (await here().all_reduce("SUM", mine, name="sum"))[0]
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel_then_release, scope)
                await here().all_reduce("SUM", mine, name="sum")
        events.append(f"cancelled: {scope.cancelled_caught}")
        mine[:] = 0
        return None

    async def cancel_then_release(scope: anyio.CancelScope) -> None:
        await held.wait()
        scope.cancel()
        with anyio.CancelScope(shield=True):
            await turns()
            events.append("release")
            held.go_on()

    assert await results(3, lambda _: program()) == (3, None, 3)
    assert events == ["release", "cancelled: True"]


class Meanwhile(Exception):  # noqa: N818
    """Raised by a replica while the work is in progress."""


@pytest.mark.parametrize("what", [Meanwhile, KeyboardInterrupt, "another collective", "a cancelled scope"])
async def test_run_that_ends_meanwhile_waits_for_the_work(what: Any, held: HeldThreads) -> None:
    gathered: list[Any] = []
    caught: Any = None

    async def program() -> None:
        handle = here().all_reduce("SUM", np.ones(1 << 16, np.float32))
        if replica() == 1:
            await held.wait()
            tasks.start_soon(release)
            if what == "a cancelled scope":
                scope.cancel()
            elif what == "another collective":
                await here().barrier()
            else:
                raise what
        with anyio.CancelScope(shield=replica() == 2):
            if what == "another collective" and replica() == 0:
                await here().all_reduce("SUM", 1.0)
            gathered.append((await handle).shape)

    async def release() -> None:
        await turns()
        assert held.taken == thread_count()
        held.go_on()

    strategy = mirrored(3)
    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        with scope:
            try:
                await strategy.run(program)
            except (Meanwhile, KeyboardInterrupt, CollectiveError) as error:
                caught = error
    assert gathered == [(1 << 16,)]  # the shielded replica gets the result
    assert scope.cancelled_caught == (what == "a cancelled scope")
    if what == "another collective":
        assert caught.report.sequence_number == 1
    elif what != "a cancelled scope":
        assert type(caught) is what
    assert held.taken == 0
    await still_works(strategy)


@pytest.mark.every_loop("asyncio", "uvloop")
async def test_task_that_is_cancelled_repeatedly_waits_for_its_work(held: HeldThreads) -> None:
    strategy = mirrored(2)
    task = asyncio.ensure_future(run(strategy, lambda ctx: ctx.all_reduce("SUM", np.ones(1 << 16, np.float32))))
    await held.wait()
    for _ in range(5):
        task.cancel()
        await turns(3)
    assert not task.done()
    held.go_on()
    with pytest.raises(asyncio.CancelledError):
        await task
    await still_works(strategy)


# Shielding: a replica that no cancellation reaches gets an error, because the collective will never be complete.


@pytest.mark.parametrize("issued", ["awaited before", "before", "after"])
@pytest.mark.parametrize("fails", [True, False])
async def test_shielded_collective_of_a_run_that_ends(fails: bool, issued: str) -> None:
    over = anyio.Event()
    seen: list[str] = []

    async def program() -> None:
        handle = here().barrier() if issued != "after" and replica() != 2 else None
        if replica() == 2:
            await turns(3)
            over.set()
            if fails:
                raise LookupError
            scope.cancel()
            await anyio.sleep_forever()
        with anyio.CancelScope(shield=True):
            if issued != "awaited before":
                await over.wait()
                await turns(1)
            with pytest.raises(CollectiveError) as caught:
                await (here().barrier() if handle is None else handle)
            seen.append(caught.value.report.reason)
        await turns(1)  # here the cancellation takes effect
        seen.append("went on")

    strategy = mirrored(3)
    with anyio.CancelScope() as scope, pytest.raises(LookupError) if fails else nullcontext():
        await strategy.run(program)
    assert scope.cancelled_caught != fails
    assert seen == (["exited"] * 2 if fails else seen[:2])
    await still_works(strategy)


async def test_replica_that_catches_every_error_after_the_end_can_be_cancelled() -> None:
    async def program(ctx: ReplicaContext) -> None:
        while True:
            with suppress(CollectiveError):
                await (ctx.barrier() if replica() else ctx.all_reduce("SUM", 1))

    assert isinstance(await error_of(program), CollectiveMismatchError)


# Exceptions: the cause is never lost, whatever a nursery or a task group does with it.


async def unwind(error: Exception) -> None:
    """Wait until cancelled, in a task group with a child that then raises an error of its own."""

    async def child() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise error

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child)
        await anyio.sleep_forever()


async def test_neither_cause_nor_report_is_lost_among_the_cancellations_of_a_task_group() -> None:
    async def program(ctx: ReplicaContext, cause: Exception | None) -> None:
        if replica() == 2:
            await unwind(OSError("while unwinding"))
        if replica() == 0 and cause is not None:
            await turns(3)
            raise cause
        await (ctx.barrier() if replica() else ctx.all_reduce("SUM", 1))

    error = await error_of(partial(program, cause=None))
    assert isinstance(error, CollectiveMismatchError)
    assert ["replica 2 raised" in note for note in error.__notes__] == [True]
    with pytest.raises(ExceptionGroup) as caught:  # no BaseExceptionGroup: nothing in it is a cancellation
        await run(mirrored(3), partial(program, cause=ValueError("the cause")))
    first, second = caught.value.exceptions
    assert isinstance(first, ValueError)
    assert first.__notes__[0].startswith("replica 0 of 3")
    assert isinstance(second, ExceptionGroup)
    assert [type(error) for error in second.exceptions] == [OSError]


# Ctrl-C.


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interruption_that_a_replica_raises(kind: type[BaseException], anyio_backend: Loop) -> None:
    unwound = []

    async def program() -> None:
        try:
            await here().barrier()
            if replica() == 1:
                raise kind
            await here().barrier()
        finally:
            unwound.append(replica())
            if replica() == 0:
                raise LookupError("it does not hide that")

    strategy = mirrored(3)
    with pytest.raises(kind):
        on(anyio_backend, strategy.run, program)
    assert sorted(unwound) == [0, 1, 2]
    on(anyio_backend, still_works, strategy)


class CtrlC:
    """A trace function that presses Ctrl-C at the n-th line of handles and event loops.

    Of each line the first three executions count: for the first replica, another, and the last.
    """

    FILES = (loop_module.__file__, handle_module.AsyncioHandle.__await__.__code__.co_filename)

    def __init__(self, after: int) -> None:
        self.left = after
        self.met: Counter[tuple[str, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self.FILES or frame.f_code.co_name in ("__del__", "_warn"):
            return None  # Python ignores what a destructor raises
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and self.met[line] < 3:
            self.met[line] += 1
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def test_ctrl_c_at_every_line_of_the_adapters(anyio_backend: Loop) -> None:
    """Wherever it arrives, it is raised as itself, every replica unwinds, and the strategy can run again."""
    strategy = mirrored(3)
    unwound: list[int] = []

    async def program() -> None:
        with anyio.CancelScope():
            try:
                handle = here().all_reduce("SUM", 1)
                await here().barrier()
                await handle
            finally:
                unwound.append(replica())

    after = 0
    for after in itertools.count(1):
        press = CtrlC(after)
        unwound.clear()
        tracing = sys.gettrace()
        sys.settrace(press)
        try:
            on(anyio_backend, strategy.run, program)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        assert len(unwound) == len(set(unwound))
        if press.left > 0:
            break
    assert after > 50
    on(anyio_backend, still_works, strategy)


# Timers.


async def test_smallest_timeout_of_replicas_and_collectives_counts() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if replica() == 2:
            await anyio.sleep_forever()
        for seconds in (60.0, (30.0, 0.01)[replica()], 60.0):
            ctx.all_reduce("SUM", 1, CommunicationOptions(timeout_seconds=seconds))
        await ctx.barrier()

    error = await error_of(program)
    assert str(error).startswith("collective #1 timed out after 0.01 s: replica 2 has not arrived")
    assert (error.report.reason, error.report.suspects) == ("timeout", (2,))


# One loop inside another.


@pytest.mark.every_loop("asyncio", "uvloop")
def test_trio_as_the_guest_of_another_loop(anyio_backend: Loop) -> None:
    trio = pytest.importorskip("trio")
    strategy = mirrored(3)

    async def host() -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        async def guest() -> None:
            await still_works(strategy)  # the host uses the strategy at the same time
            with pytest.raises(CollectiveTimeoutError):
                await mirrored(3, timeout=0.01).run(partial(in_barrier, lambda: None))

        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            host_uses_signal_set_wakeup_fd=bool(anyio_backend[1]),  # uvloop does
            done_callback=lambda outcome: loop.call_soon(done.set_result, outcome),
        )
        await still_works(strategy)
        return (await done).unwrap()

    on(anyio_backend, host)
