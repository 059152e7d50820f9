"""Cancellation from outside passes through a run, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import trio
from anyio.lowlevel import checkpoint

from aiodist import CollectiveError
from tests.runtime.programs import here, mirrored, replica, still_works

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


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


PLACES = pytest.mark.parametrize("place", [in_barrier, elsewhere, in_merge, in_a_child, at_once])


@PLACES
async def test_scope_around_the_run(place: Any) -> None:
    strategy = mirrored(3)
    with anyio.CancelScope() as scope:
        await strategy.run(place, args=(scope.cancel,))
    assert scope.cancelled_caught
    await still_works(strategy)


@PLACES
async def test_timeout_around_the_run(place: Any) -> None:
    strategy = mirrored(3)
    with pytest.raises(TimeoutError) as caught, anyio.fail_after(0.01):
        await strategy.run(place, args=(lambda: None,)) if place is not at_once else await anyio.sleep_forever()
    assert not isinstance(caught.value, CollectiveError)
    await still_works(strategy)


@PLACES
async def test_task_group_around_the_run(place: Any) -> None:
    strategy = mirrored(3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(strategy.run, place, [tasks.cancel_scope.cancel])
    await still_works(strategy)


async def test_scope_that_is_cancelled_before_the_run() -> None:
    started = []

    async def program() -> None:
        started.append(replica())
        await here().barrier()
        await checkpoint()

    strategy = mirrored(2)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await strategy.run(program)
        await checkpoint()
    assert scope.cancelled_caught
    await still_works(strategy)


async def test_every_replica_unwinds() -> None:
    unwound = []

    async def program(cancel: Any) -> None:
        try:
            await in_barrier(cancel)
        finally:
            unwound.append(replica())

    strategy = mirrored(3)
    with anyio.CancelScope() as scope:
        await strategy.run(program, args=(scope.cancel,))
    assert sorted(unwound) == [0, 1, 2]


async def test_failure_while_unwinding_is_not_lost() -> None:
    """As in any task group: an exception of a child's comes out, the cancellation does not hide it."""

    async def program(cancel: Any) -> None:
        try:
            await in_barrier(cancel)
        finally:
            if replica() == 1:
                raise LookupError("while unwinding")

    strategy = mirrored(3)
    with anyio.CancelScope() as scope, pytest.raises(LookupError, match="while unwinding") as caught:
        await strategy.run(program, args=(scope.cancel,))
    assert "replica 1 of 3 on CPU:1" in caught.value.__notes__[0]
    await still_works(strategy)


async def test_shielded_clean_up_with_a_collective_does_not_hang() -> None:
    """Replica 2 never comes; the others' clean-up learns that instead of waiting for it."""
    caught = []

    async def program(cancel: Any) -> None:
        try:
            await in_barrier(cancel)
        finally:
            with anyio.CancelScope(shield=True):
                if replica() != 2:
                    try:
                        await here().barrier(name="clean-up")
                    except CollectiveError as error:
                        caught.append((replica(), str(error.report.reason)))

    strategy = mirrored(3)
    with anyio.CancelScope() as scope:
        await strategy.run(program, args=(scope.cancel,))
    assert scope.cancelled_caught
    assert [replica_id for replica_id, _ in sorted(caught)] == [0, 1]
    await still_works(strategy)


@PLACES
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_cancel_of_an_asyncio_task(anyio_backend: str, place: Any) -> None:
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


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_wait_for_of_asyncio(anyio_backend: str) -> None:
    strategy = mirrored(3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(strategy.run(in_barrier, args=(lambda: None,)), 0.01)
    await still_works(strategy)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_timeout_of_asyncio(anyio_backend: str) -> None:
    strategy = mirrored(3)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await strategy.run(in_barrier, args=(lambda: None,))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await still_works(strategy)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_task_group_of_asyncio_whose_other_child_fails(anyio_backend: str) -> None:
    strategy = mirrored(3)
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


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_interruption_raised_in_a_replica(kind: type[BaseException], backend: str) -> None:
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

    async def main() -> None:
        await strategy.run(program)

    with pytest.raises(kind):
        anyio.run(main, backend=backend)
    assert sorted(unwound) == [0, 1, 2]
    anyio.run(still_works, strategy, backend=backend)


def test_interruption_that_trio_has_for_the_caller_of_the_run() -> None:
    unwound = []

    @trio.lowlevel.enable_ki_protection
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    async def program() -> None:
        try:
            if replica() == 1:
                interrupt()
            await here().barrier()
            await anyio.sleep_forever()
        finally:
            unwound.append(replica())

    with pytest.raises(KeyboardInterrupt):
        trio.run(mirrored(3).run, program)
    assert sorted(unwound) == [0, 1, 2]
