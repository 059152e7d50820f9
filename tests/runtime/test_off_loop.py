"""Large values are reduced in worker threads: the loop runs on, and nothing that happens meanwhile does harm."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import CollectiveError, CommunicationOptions
from aiodist._collectives.work import thread_count
from aiodist_kernels import policy
from tests.runtime.held_threads import HeldThreads, hold
from tests.runtime.programs import here, mirrored, on_each, replica, still_works
from tests.runtime.warned import warned

pytestmark = pytest.mark.anyio

SIZE = 1 << 16


def part(index: int) -> np.ndarray:
    return np.random.default_rng(index).uniform(1, 2, SIZE).astype(np.float32)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldThreads:
    return hold(monkeypatch)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await checkpoint()


async def test_handle_is_done_when_the_work_is(held: HeldThreads) -> None:
    async def program() -> None:
        handle = here().all_reduce("SUM", part(replica()))
        await turns()
        if replica() == 1:
            assert not handle.done()
            held.go_on()
            await turns()
            assert handle.done()
        result = await handle
        assert result.tobytes() == (part(0) + part(1)).tobytes()
        assert not result.flags.writeable

    await mirrored(2).run(program)


async def test_reductions_under_way_together_complete_each_when_it_is_done(held: HeldThreads) -> None:
    async def program() -> list[Any]:
        handles = [here().all_reduce("SUM", part(i + replica()), name=str(i)) for i in range(3)]
        if replica() == 1:
            await turns()
            held.given.reverse()
            held.go_on()
        return [(await handle).tobytes() for handle in handles]

    assert (await on_each(2, program))[0] == [(part(i) + part(i + 1)).tobytes() for i in range(3)]


class Meanwhile(Exception):  # noqa: N818
    """What a replica raises while the work is under way."""


@pytest.mark.parametrize("what", [Meanwhile, KeyboardInterrupt, "another collective"])
async def test_failure_of_another_replica_meanwhile_waits_for_the_work(what: Any, held: HeldThreads) -> None:
    results: list[Any] = []

    async def program() -> None:
        handle = here().all_reduce("SUM", part(replica()))
        if replica() == 1:
            await turns()
            assert held.given
            tasks.start_soon(release)
            if what != "another collective":
                raise what
            await here().barrier()
        with anyio.CancelScope(shield=replica() == 2):
            if what == "another collective" and replica() == 0:
                await here().all_reduce("SUM", 1.0)
            results.append((await handle).shape)

    async def release() -> None:
        await turns()
        assert held.taken == thread_count()
        held.go_on()

    strategy = mirrored(3)
    caught: Any = None
    async with anyio.create_task_group() as tasks:
        try:
            await strategy.run(program)
        except (Meanwhile, KeyboardInterrupt, CollectiveError) as error:
            caught = error
    assert results == [(SIZE,)]  # who is shielded gets what all have contributed to
    if what == "another collective":
        assert caught.report.sequence_number == 1
    else:
        assert type(caught) is what
    assert held.taken == 0
    await still_works(strategy)


async def test_timeout_counts_until_all_have_arrived(held: HeldThreads) -> None:
    options = CommunicationOptions(timeout_seconds=1e-9)

    async def program() -> Any:
        handle = here().all_reduce("SUM", part(replica()), options)
        if replica() == 0:
            tasks.start_soon(release)
        return (await handle).shape

    async def release() -> None:
        await turns()
        held.go_on()

    async with anyio.create_task_group() as tasks:
        assert await on_each(2, program) == ((SIZE,),) * 2


async def test_work_that_nobody_awaited_ends_before_the_run(held: HeldThreads) -> None:
    async def program() -> Any:
        handles.append(here().all_reduce("SUM", part(replica())))
        if replica() == 0:
            tasks.start_soon(release)

    async def release() -> None:
        await turns()
        held.go_on()

    handles: list[Any] = []
    with warned() as told:
        async with anyio.create_task_group() as tasks:
            await mirrored(2).run(program)
            assert held.taken == 0
    assert all(handle.done() for handle in handles)
    assert ["never awaited" in warning.text for warning in told] == [True, True]


async def test_error_in_a_worker_thread_is_raised_in_every_replica(held: HeldThreads) -> None:
    async def program() -> str:
        handle = here().all_reduce("SUM", part(replica()))
        if replica() == 1:
            await turns()
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


async def test_contributions_are_let_go_when_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1)
    alive: list[Any] = []

    async def program() -> None:
        for _ in range(2):
            mine = part(replica())
            alive.append(weakref.ref(mine))
            await here().all_reduce("SUM", mine)

    await mirrored(2).run(program)
    while any(thread.name == "aiodist reduction" for thread in threading.enumerate()):
        await checkpoint()  # what has ended the work is about to let go of it
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4
