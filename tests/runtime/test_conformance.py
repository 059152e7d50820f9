"""What every event loop must give: asyncio, uvloop and trio run each of these; other tests run on asyncio alone.

The order of wake-ups, cancellation, shielding, exceptions, Ctrl-C at every step, timers, and trio as another's guest.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationOptions,
    DeadlockError,
    ReplicaContext,
)
from aiodist._collectives.work import thread_count
from aiodist._runtime import handle as handle_module
from aiodist._runtime import loop as loop_module
from aiodist._runtime import stall
from tests.runtime.held_threads import HeldThreads, hold
from tests.runtime.programs import Relay, error_of, here, mirrored, on_each, replica, results, run, still_works

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
Loop = tuple[str, dict[str, Any]]


def on(loop: Loop, main: Callable[..., Any], *args: Any) -> Any:
    """Run a coroutine function on an event loop of its own."""
    backend, options = loop
    return anyio.run(main, *args, backend=backend, backend_options=options)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await checkpoint()


# The order of wake-ups: replicas start, and go on after each collective, in the order of their ids.


def in_order(count: int, rounds: int) -> list[tuple[str, int]]:
    moments = ["start", *(f"after {number}" for number in range(rounds))]
    return [(moment, replica_id) for moment in moments for replica_id in range(count)]


async def log_of(count: int, orders: list[tuple[int, ...]]) -> list[tuple[str, int]]:
    """Return who did what, when replicas arrive at each round's barrier in that round's order."""
    log: list[tuple[str, int]] = []
    relays = [Relay(order) for order in orders]

    async def program() -> None:
        log.append(("start", replica()))
        for number, relay in enumerate(relays):
            await relay.turn()
            arrival = here().barrier()
            relay.pass_on()
            await arrival
            log.append((f"after {number}", replica()))

    await mirrored(count).run(program)
    return log


async def test_replicas_go_on_in_order_whoever_came_last() -> None:
    orders = list(itertools.permutations(range(4)))
    assert await log_of(4, orders) == in_order(4, len(orders))


@pytest.mark.parametrize("count", [1, 200])
async def test_crowds_go_on_in_order(count: int) -> None:
    assert await log_of(count, [tuple(range(count))[::-1], tuple(range(count))]) == in_order(count, 2)


async def test_replicas_go_on_in_order_after_collectives_of_every_kind() -> None:
    log: list[object] = []

    def merge(strategy: Any) -> None:
        log.append("merge")

    async def program() -> None:
        x, context = np.ones(3), here()
        for call in (
            lambda: context.all_reduce("SUM", {"x": x}),
            lambda: context.all_gather(x, 0),
            lambda: context.broadcast(x),
            lambda: context.reduce_scatter("SUM", x),
            lambda: context.all_to_all(x),
            context.barrier,
            lambda: context.merge_call(merge),
            context.join,
        ):
            await call()
            log.append(replica())

    await mirrored(3).run(program)
    assert log == [*[0, 1, 2] * 6, "merge", *[0, 1, 2] * 2]


async def test_last_arrival_that_works_on_before_it_awaits() -> None:
    """The others are resumed without it; from the next collective on, all are in order again."""
    log = []
    relay = Relay([2, 0, 1])

    async def program() -> None:
        await relay.turn()
        arrival = here().barrier(name="first")
        relay.pass_on()
        if replica() == 1:
            await turns(5)
        await arrival
        log.append(replica())
        await here().barrier()
        log.append(replica())

    await mirrored(3).run(program)
    assert log[:2] == [0, 2]
    assert log[-3:] == [0, 1, 2]


async def test_what_is_ready_goes_on_between_collectives() -> None:
    steps, over = 0, False

    async def neighbour() -> None:
        nonlocal steps
        while not over:
            steps += 1
            await checkpoint()

    async def program(context: ReplicaContext) -> None:
        for _ in range(30):
            await context.barrier()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(neighbour)
        await run(mirrored(2), program)
        over = True
    assert steps >= 30


async def test_plain_functions_run_in_one_go_and_in_order() -> None:
    log = []

    def program() -> int:
        log.append(replica())
        return replica() * 10

    assert await on_each(3, program) == (0, 10, 20)
    assert log == [0, 1, 2]


async def test_merge_functions_in_flight_begin_in_order_and_may_wait() -> None:
    log: list[int] = []

    async def merge(strategy: Any, which: Any) -> Any:
        log.append(which.values[0])
        await checkpoint()
        return which

    async def program() -> list[int]:
        pending = [here().merge_call(merge, args=(k,)) for k in range(3)]
        return [await handle for handle in reversed(pending)]

    assert await on_each(2, program) == ([2, 1, 0],) * 2
    assert sorted(log) == [0, 1, 2]


async def test_worker_threads_resume_replicas_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(monkeypatch)
    seen: list[object] = []

    async def program() -> None:
        await here().all_reduce("SUM", np.ones(1 << 16, np.float32))
        seen.append(replica())

    async def elsewhere() -> None:
        while not held.given:
            await checkpoint()
        await turns()
        seen.append("elsewhere")  # the loop runs on meanwhile
        held.go_on()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(elsewhere)
        await mirrored(3).run(program)
    assert seen == ["elsewhere", 0, 1, 2]


# Cancellation passes through a run, and leaves nothing behind.


async def in_barrier(last: Callable[[], Any]) -> None:
    """Wait in a barrier that never completes, once the last replica has called a function."""
    if replica() == 2:
        last()
        await anyio.sleep_forever()
    await here().barrier()


async def elsewhere(last: Callable[[], Any]) -> None:
    if replica() == 2:
        last()
    await anyio.sleep_forever()


async def in_merge(last: Callable[[], Any]) -> None:
    async def merge(strategy: Any) -> None:
        last()
        await anyio.sleep_forever()

    await here().merge_call(merge)


async def in_a_child(last: Callable[[], Any]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_barrier, last)


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


PLACES = pytest.mark.parametrize("place", [in_barrier, elsewhere, in_merge, in_a_child, at_once, in_step_after_step])


@PLACES
async def test_cancel_of_a_scope_around_the_run(place: Any) -> None:
    strategy = mirrored(3)
    with anyio.CancelScope() as scope:
        await strategy.run(place, args=(scope.cancel,))
    assert scope.cancelled_caught
    await still_works(strategy)


async def test_scope_that_is_cancelled_before_the_run() -> None:
    async def program() -> None:
        await here().barrier()
        await checkpoint()

    strategy = mirrored(2)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await strategy.run(program)
        await checkpoint()
    assert scope.cancelled_caught
    await still_works(strategy)


@pytest.mark.parametrize("failing", [False, True])
async def test_every_replica_unwinds_and_a_failure_meanwhile_is_not_lost(failing: bool) -> None:
    """As in any task group: an exception of a child's comes out, the cancellation does not hide it."""
    unwound: list[int] = []
    notes: list[str] = []

    async def program(cancel: Any) -> None:
        try:
            await in_barrier(cancel)
        finally:
            unwound.append(replica())
            if failing and replica() == 1:
                raise LookupError("while unwinding")

    strategy = mirrored(3)
    with anyio.CancelScope() as scope:
        try:
            await strategy.run(program, args=(scope.cancel,))
        except LookupError as error:
            notes += error.__notes__
    assert [note.startswith("replica 1 of 3 on CPU:1") for note in notes] == [True] * failing
    assert sorted(unwound) == [0, 1, 2]
    await still_works(strategy)


async def test_timeouts_and_scopes_of_one_replica_do_not_disturb_the_others() -> None:
    async def program() -> tuple[bool, int]:
        with anyio.move_on_after(0) as scope:
            await anyio.sleep_forever() if replica() == 1 else await checkpoint()
        return scope.cancelled_caught, await here().all_reduce("SUM", 1)

    assert [total for _, total in await results(3, lambda _: program())] == [3, 3, 3]


@pytest.mark.parametrize("first", ["call", "cancel"])
@pytest.mark.parametrize("order", [(1, 2, 0), (0, 2, 1), (0, 1, 2), (2, 1, 0)], ids=str)
async def test_last_arrival_in_a_cancelled_scope(order: tuple[int, ...], first: str) -> None:
    """The collective is complete: the cancellation is only that, in this await or a later one, as the loop has it."""
    relay = Relay(order)

    async def program() -> int:
        await relay.turn()
        with anyio.CancelScope() as scope:
            last = replica() == order[-1]
            if last and first == "cancel":
                scope.cancel()
            handle = here().barrier(name="first")
            relay.pass_on()
            if last:
                scope.cancel()
            await handle
        total: int = await here().all_reduce("SUM", 1)
        return total

    assert await on_each(3, program) == (3, 3, 3)


async def test_replica_that_is_cancelled_in_the_turn_in_which_it_is_woken() -> None:
    """It was complete: the cancellation is only that, or comes too late."""
    scopes: dict[int, anyio.CancelScope] = {}

    async def program() -> int:
        with anyio.CancelScope() as scopes[replica()]:
            handle = here().barrier(name="first")
            if replica() == 2:
                scopes[0].cancel()
                scopes[1].cancel()
            await handle
        total: int = await here().all_reduce("SUM", 1)
        return total

    assert await on_each(3, program) == (3, 3, 3)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldThreads:
    return hold(monkeypatch)


async def test_cancelled_replica_is_held_back_until_nobody_reads_its_array(held: HeldThreads) -> None:
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
        while not held.given:
            await checkpoint()
        scope.cancel()
        with anyio.CancelScope(shield=True):
            await turns()
            events.append("release")
            held.go_on()

    assert await results(3, lambda _: program()) == (3, None, 3)
    assert events == ["release", "cancelled: True"]


async def test_run_that_is_cancelled_waits_for_its_work(held: HeldThreads) -> None:
    async def program() -> None:
        await here().all_reduce("SUM", np.ones(1 << 16, np.float32))

    async def cancel_then_release(scope: anyio.CancelScope) -> None:
        while not held.given:
            await checkpoint()
        scope.cancel()
        await turns()
        assert held.taken == thread_count()
        held.go_on()

    strategy = mirrored(3)
    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        with scope:
            tasks.start_soon(cancel_then_release, scope)
            await strategy.run(program)
    assert scope.cancelled_caught
    assert held.taken == 0
    await still_works(strategy)


# Shielding: where no cancellation reaches a replica, it is told that nobody will come.


@pytest.mark.parametrize("issued", ["before", "after"])
async def test_shielded_collective_of_a_cancelled_run_ends(issued: str) -> None:
    told = []

    async def program(cancel: Any) -> None:
        early = here().all_reduce("SUM", 1, name="early") if issued == "before" and replica() != 2 else None
        try:
            await in_barrier(cancel)
        finally:
            with anyio.CancelScope(shield=True):
                if replica() != 2:
                    with pytest.raises(CollectiveError):
                        await (here().barrier(name="clean-up") if early is None else early)
                    told.append(replica())

    strategy = mirrored(3)
    with anyio.CancelScope() as scope:
        await strategy.run(program, args=(scope.cancel,))
    assert scope.cancelled_caught
    assert sorted(told) == [0, 1]
    await still_works(strategy)


@pytest.mark.parametrize("awaited", ["before", "after"])
async def test_shielded_collective_ends_when_another_replica_fails(awaited: str) -> None:
    failed = anyio.Event()
    seen: list[str] = []

    async def program() -> None:
        if replica() == 1:
            await turns(3)
            failed.set()
            raise LookupError
        handle = here().barrier()
        with anyio.CancelScope(shield=True):
            if awaited == "after":
                await failed.wait()
                await checkpoint()
            with pytest.raises(CollectiveError) as caught:
                await handle
            seen.append(caught.value.report.reason)
        await checkpoint()  # here the cancellation takes effect
        seen.append("went on")

    strategy = mirrored(2)
    with pytest.raises(LookupError):
        await strategy.run(program)
    assert seen == ["exited"]
    await still_works(strategy)


async def test_replica_that_asks_again_and_again_after_the_end_can_be_cancelled() -> None:
    async def program(ctx: ReplicaContext) -> None:
        while True:
            with suppress(CollectiveError):
                await (ctx.barrier() if replica() else ctx.all_reduce("SUM", 1))

    assert isinstance(await error_of(program), CollectiveMismatchError)


# Exceptions: the cause is never lost, whatever a nursery or a task group makes of it.


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


async def test_cause_is_not_lost_among_the_cancellations_of_a_task_group() -> None:
    async def program() -> None:
        if replica() == 1:
            await unwind(OSError("while unwinding"))
        await turns(3)
        raise ValueError("the cause")

    strategy = mirrored(2)
    with pytest.raises(ExceptionGroup) as caught:  # no BaseExceptionGroup: nothing in it is a cancellation
        await strategy.run(program)
    first, second = caught.value.exceptions
    assert isinstance(first, ValueError)
    assert first.__notes__[0].startswith("replica 0 of 2")
    assert isinstance(second, ExceptionGroup)
    assert [type(error) for error in second.exceptions] == [OSError]
    await still_works(strategy)


async def test_report_is_not_lost_among_the_cancellations_of_a_task_group() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if replica() == 2:
            await unwind(OSError("while unwinding"))
        await (ctx.barrier() if replica() else ctx.all_reduce("SUM", 1))

    error = await error_of(program)
    assert isinstance(error, CollectiveMismatchError)
    assert ["replica 2 raised" in note for note in error.__notes__] == [True]


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

    strategy = mirrored(3)
    with pytest.raises(kind):
        on(anyio_backend, strategy.run, program)
    assert sorted(unwound) == [0, 1, 2]
    on(anyio_backend, still_works, strategy)


class CtrlC:
    """Presses Ctrl-C as the program comes to the n-th line of handles and event loops, by a trace function.

    Of each line the first three times count: for the first replica, another, and the last.
    """

    FILES = (loop_module.__file__, handle_module.AsyncioHandle.__await__.__code__.co_filename)

    def __init__(self, after: int) -> None:
        self.left = after
        self.met: Counter[tuple[str, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self.FILES or frame.f_code.co_name in ("__del__", "_warn"):
            return None  # Python swallows what a destructor raises
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and self.met[line] < 3:
            self.met[line] += 1
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def test_ctrl_c_at_every_line_of_the_adapters(anyio_backend: Loop) -> None:
    """Whatever it meets, it comes out as itself, every replica has unwound, and the strategy serves another run."""
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


async def test_smallest_of_several_timeouts_counts() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if replica() == 2:
            await anyio.sleep_forever()
        limits = [CommunicationOptions(timeout_seconds=seconds) for seconds in (60.0, 0.01, 30.0)]
        for handle in [ctx.all_reduce("SUM", 1, limit) for limit in limits]:
            await handle

    error = await error_of(program)
    assert (error.report.reason, error.report.sequence_number, error.report.suspects) == ("timeout", 1, (2,))


async def test_one_that_goes_on_and_on_is_not_waited_for() -> None:
    async def program(ctx: ReplicaContext) -> None:
        while replica() == 2:
            await checkpoint()
        await (ctx.barrier() if replica() == 0 else ctx.all_reduce("SUM", 1))

    error = await error_of(program, 4)
    assert [state.state for state in error.report.replicas] == ["waiting", "waiting", "running", "waiting"]


async def test_replicas_that_wait_for_each_other_elsewhere_are_found_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stall, "PROOF_SECONDS", 0.01)
    monkeypatch.setattr(stall, "_watches", {})
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0.02")
    lock = anyio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        async with lock:
            await ctx.barrier()

    assert isinstance(await error_of(program), DeadlockError)


# Several loops, and one inside of another.


async def test_several_runs_at_a_time_keep_apart() -> None:
    strategy = mirrored(3)
    totals: dict[int, Any] = {}

    async def program(which: int) -> int:
        total = 0
        for _ in range(which + 1):
            total += await here().all_reduce("SUM", which)
        if which == 4:
            raise LookupError
        return total

    async def run_one(which: int) -> None:
        with suppress(LookupError):
            totals[which] = await strategy.run(program, args=(which,))

    async with anyio.create_task_group() as tasks:
        for which in range(6):
            tasks.start_soon(run_one, which)
    expected = {which: 3 * which * (which + 1) for which in (0, 1, 2, 3, 5)}
    assert {which: set(total.values) for which, total in totals.items()} == {k: {n} for k, n in expected.items()}


@pytest.mark.every_loop("asyncio", "uvloop")
def test_trio_as_the_guest_of_another_loop(anyio_backend: Loop) -> None:
    trio = pytest.importorskip("trio")
    strategy = mirrored(3)

    async def host() -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        async def guest() -> None:
            await still_works(strategy)  # a host's task beside it uses the strategy, too
            with pytest.raises(CollectiveTimeoutError):
                await run(mirrored(2, timeout=0.01), in_barrier_of_two)
            with trio.CancelScope() as scope:
                await strategy.run(in_barrier, args=(scope.cancel,))
            assert scope.cancelled_caught
            await still_works(strategy)

        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            host_uses_signal_set_wakeup_fd=bool(anyio_backend[1]),  # uvloop does
            done_callback=lambda outcome: loop.call_soon(done.set_result, outcome),
        )
        await still_works(strategy)
        return (await done).unwrap()

    on(anyio_backend, host)


async def in_barrier_of_two(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group:
        await anyio.sleep_forever()
    await ctx.barrier()


# A task's own library, inside replicas.


@pytest.mark.every_loop("asyncio", "uvloop")
@PLACES
async def test_cancel_of_an_asyncio_task(place: Any) -> None:
    strategy = mirrored(3)
    reached = asyncio.Event()
    task = asyncio.ensure_future(strategy.run(place, args=(reached.set,)))
    if place is at_once:
        await asyncio.sleep(0)
    else:
        await reached.wait()
    task.cancel("outside")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await still_works(strategy)


@pytest.mark.every_loop("asyncio", "uvloop")
async def test_task_that_is_cancelled_again_and_again_waits_for_its_work(held: HeldThreads) -> None:
    async def program() -> None:
        await here().all_reduce("SUM", np.ones(1 << 16, np.float32))

    strategy = mirrored(2)
    task = asyncio.ensure_future(strategy.run(program))
    while not held.given:
        await checkpoint()
    for _ in range(5):
        task.cancel()
        await turns(3)
    assert not task.done()
    held.go_on()
    with pytest.raises(asyncio.CancelledError):
        await task
    await still_works(strategy)


@pytest.mark.every_loop("asyncio", "uvloop")
async def test_timeouts_and_task_groups_of_asyncio() -> None:
    strategy = mirrored(3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(strategy.run(in_barrier, args=(lambda: None,)), 0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await strategy.run(in_barrier, args=(lambda: None,))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0

    async def program() -> list[int]:
        async def call(value: int) -> int:
            total: int = await here().all_reduce("SUM", value)
            return total

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        async with asyncio.TaskGroup() as tasks:
            child = tasks.create_task(call(replica()))
        gathered = await asyncio.gather(*(here().all_reduce("SUM", k) for k in range(2)))
        return [child.result(), *gathered, await asyncio.wait_for(here().all_reduce("SUM", 2), 60)]

    assert await results(3, lambda _: program()) == ([3, 0, 3, 6],) * 3
    reached = asyncio.Event()

    async def fail() -> None:
        await reached.wait()
        raise LookupError("other child")

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(strategy.run(in_barrier, args=(reached.set,)))
            tasks.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        await both()
    assert [type(error) for error in caught.value.exceptions] == [LookupError]
    await still_works(strategy)
