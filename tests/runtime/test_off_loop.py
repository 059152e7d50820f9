"""Large values are reduced in worker threads: the loop runs on, and nothing that happens meanwhile does harm."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import CollectiveError, CommunicationOptions, IndexedSlices
from aiodist_kernels import policy
from tests.runtime.held_threads import HeldThreads, hold
from tests.runtime.programs import here, mirrored, on_each, replica, still_works
from tests.runtime.warned import warned

pytestmark = pytest.mark.anyio

SIZE = 1 << 16


def part(index: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(index).uniform(1, 2, SIZE).astype(dtype)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldThreads:
    return hold(monkeypatch)


async def _turns(count: int = 10) -> None:
    for _ in range(count):
        await checkpoint()


async def test_loop_runs_on_while_a_reduction_is_held(held: HeldThreads) -> None:
    seen: list[str] = []

    async def program() -> np.ndarray:
        result: np.ndarray = await here().all_reduce("SUM", part(replica()))
        seen.append(f"resumed {replica()}")
        return result

    async def elsewhere() -> None:
        while not held.given:
            await checkpoint()
        await _turns()
        assert not seen
        seen.append("elsewhere")
        held.release()

    results: Any = ()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(elsewhere)
        results = await on_each(3, program)
    assert seen == ["elsewhere", "resumed 0", "resumed 1", "resumed 2"]
    assert all(result is results[0] for result in results)
    assert not results[0].flags.writeable
    assert results[0].tobytes() == functools.reduce(np.add, map(part, range(3))).tobytes()
    assert held.open == 0


async def test_small_values_stay_on_the_loop(held: HeldThreads) -> None:
    async def program() -> float:
        await here().all_reduce("SUM", {"w": np.ones(100), "b": 1.0})
        return float((await here().all_reduce("SUM", np.ones(1000)))[0])

    assert await on_each(2, program) == (2.0, 2.0)
    assert not held.given


async def test_handle_is_done_when_the_work_is(held: HeldThreads) -> None:
    async def program() -> None:
        handle = here().all_reduce("SUM", part(replica()))
        await _turns()
        if replica() == 1:
            assert not handle.done()
            held.release()
            await _turns()
            assert handle.done()
        await handle
        assert (await handle).shape == (SIZE,)

    await mirrored(2).run(program)


async def test_cancelled_replica_is_held_back_until_nobody_reads_its_array(held: HeldThreads) -> None:
    """It has contributed: the others get the right result whatever it does with its array afterwards."""
    events: list[str] = []

    async def program() -> np.ndarray:
        mine = part(replica())
        if replica() == 1:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(cancel_then_release, scope)
                    await here().all_reduce("SUM", mine, name="sum")
            assert scope.cancelled_caught
            events.append("cancelled")
            mine[:] = 0
            return mine
        result: np.ndarray = await here().all_reduce("SUM", mine, name="sum")
        return result

    async def cancel_then_release(scope: anyio.CancelScope) -> None:
        while not held.given:
            await checkpoint()
        scope.cancel()
        with anyio.CancelScope(shield=True):
            await _turns()
            events.append("release")
            held.release()

    results = await on_each(3, program)
    assert events == ["release", "cancelled"]
    assert results[0].tobytes() == functools.reduce(np.add, map(part, range(3))).tobytes()


async def test_run_that_is_cancelled_waits_for_its_work(held: HeldThreads) -> None:
    async def program() -> None:
        await here().all_reduce("SUM", part(replica()))

    async def cancel_then_release(scope: anyio.CancelScope) -> None:
        while not held.given:
            await checkpoint()
        scope.cancel()
        await _turns()
        assert held.open == 1
        held.release()

    strategy = mirrored(3)
    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        with scope:
            tasks.start_soon(cancel_then_release, scope)
            await strategy.run(program)
    assert scope.cancelled_caught
    assert held.open == 0
    await still_works(strategy)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_task_that_is_cancelled_again_and_again(anyio_backend: str, held: HeldThreads) -> None:
    async def program() -> None:
        await here().all_reduce("SUM", part(replica()))

    strategy = mirrored(2)
    task = asyncio.ensure_future(strategy.run(program))
    while not held.given:
        await checkpoint()
    for _ in range(5):
        task.cancel()
        await _turns(3)
    assert not task.done()
    held.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    await still_works(strategy)


async def test_failure_of_another_replica_meanwhile(held: HeldThreads) -> None:
    async def program() -> None:
        handle = here().all_reduce("SUM", part(replica()))
        if replica() == 1:
            await _turns()
            assert held.given
            tasks.start_soon(release)
            raise LookupError("meanwhile")
        await handle

    async def release() -> None:
        await _turns()
        assert held.open == 1
        held.release()

    strategy = mirrored(3)
    failures = []
    async with anyio.create_task_group() as tasks:
        try:
            await strategy.run(program)
        except LookupError as error:
            failures.append(str(error))
    assert failures == ["meanwhile"]
    await still_works(strategy)


async def test_mismatch_behind_a_reduction_that_is_under_way(held: HeldThreads) -> None:
    async def program() -> None:
        handle = here().all_reduce("SUM", part(replica()))
        if replica() == 1:
            tasks.start_soon(release)
            await here().barrier()
        else:
            await here().all_reduce("SUM", 1.0)
        await handle

    async def release() -> None:
        await _turns()
        held.release()

    strategy = mirrored(2)
    caught = None
    async with anyio.create_task_group() as tasks:
        try:
            await strategy.run(program)
        except CollectiveError as error:
            caught = error
    assert caught is not None
    assert caught.report.sequence_number == 1
    await still_works(strategy)


async def test_timeout_counts_until_all_have_arrived(held: HeldThreads) -> None:
    options = CommunicationOptions(timeout_seconds=1e-9)

    async def program() -> np.ndarray:
        handle = here().all_reduce("SUM", part(replica()), options)
        if replica() == 0:
            tasks.start_soon(release)
        result: np.ndarray = await handle
        return result

    async def release() -> None:
        await _turns()
        held.release()

    results: Any = ()
    async with anyio.create_task_group() as tasks:
        results = await on_each(2, program)
    assert results[0].shape == (SIZE,)


async def test_work_that_nobody_awaited_ends_before_the_run(held: HeldThreads) -> None:
    async def program() -> Any:
        handles.append(here().all_reduce("SUM", part(replica())))
        if replica() == 0:
            tasks.start_soon(release)

    async def release() -> None:
        await _turns()
        held.release()

    handles: list[Any] = []
    async with anyio.create_task_group() as tasks:
        await mirrored(2).run(program)
        assert held.open == 0
    assert all(handle.done() for handle in handles)
    with warned() as told:
        handles.clear()
    assert told
    assert all("never awaited" in warning.text for warning in told)


async def test_error_in_a_worker_thread_is_raised_in_every_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(monkeypatch)

    async def program() -> str:
        handle = here().all_reduce("SUM", part(replica()))
        if replica() == 1:
            await _turns()
            held.given[:] = [functools.partial(_with_failing_calls, fn) for fn in held.given]
            held.release()
        try:
            await handle
        except MemoryError as error:
            return str(error)
        return "no error"

    def _with_failing_calls(take: Any) -> None:
        take.__self__._calls[:] = [_fail] * len(take.__self__._calls)
        take()

    def _fail() -> None:
        raise MemoryError("no room")

    assert await on_each(2, program) == ("no room", "no room")


async def test_interruption_meanwhile(held: HeldThreads) -> None:
    async def program() -> None:
        handle = here().all_reduce("SUM", part(replica()))
        if replica() == 1:
            await _turns()
            tasks.start_soon(release)
            raise KeyboardInterrupt
        await handle

    async def release() -> None:
        await _turns()
        held.release()

    strategy = mirrored(2)
    interrupted = False
    async with anyio.create_task_group() as tasks:
        try:
            await strategy.run(program)
        except KeyboardInterrupt:
            interrupted = True
    assert interrupted
    await still_works(strategy)


async def test_reductions_under_way_together_complete_each_when_it_is_done(held: HeldThreads) -> None:
    async def program() -> list[Any]:
        handles = [here().all_reduce("SUM", part(i + replica()), name=str(i)) for i in range(3)]
        if replica() == 1:
            await _turns()
            held.given.reverse()
            held.release()
        return [await handle for handle in handles]

    results = (await on_each(2, program))[0]
    for i, result in enumerate(results):
        assert result.tobytes() == (part(i) + part(i + 1)).tobytes()


async def test_contributions_are_let_go_when_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1)
    alive: list[Any] = []

    async def program() -> None:
        for _ in range(2):
            mine = part(replica())
            alive.append(weakref.ref(mine))
            await here().all_reduce("SUM", mine)

    await mirrored(2).run(program)
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


def _value(kind: str, index: int) -> Any:
    return {
        "array": part(index),
        "half": part(index, np.float16),
        "nest": {"large": part(index), "small": [part(index)[:9], 2.5], "none": None, "int": np.arange(SIZE) + index},
        "rows": IndexedSlices(part(index).reshape(-1, 16), np.arange(SIZE // 16) // 2 + index, (SIZE, 16)),
        "strided": part(index)[::2],
    }[kind]


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("kind", ["array", "half", "nest", "rows", "strided"])
async def test_worker_threads_give_the_same_bits(kind: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def program() -> Any:
        return await here().all_reduce(op, _value(kind, replica()))

    on_loop = (await on_each(3, program))[0]
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1)
    monkeypatch.setattr(policy, "THREADS_FROM_MOVED", 1)
    monkeypatch.setattr(policy, "LEAST_MOVED_BY_A_THREAD", 1 << 16)
    in_threads = (await on_each(3, program))[0]
    assert repr(_bits(on_loop)) == repr(_bits(in_threads))


def _bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_bits(item) for item in value]
    if isinstance(value, IndexedSlices):
        return _bits([value.values, value.indices])
    return value.tobytes() if isinstance(value, np.ndarray) else value


MOVES = ["broadcast", "all_gather", "reduce_scatter", "all_to_all"]


@pytest.mark.parametrize("kind", MOVES)
async def test_other_collectives_in_worker_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def program() -> Any:
        ctx, mine = here(), {"a": part(replica()), "b": part(replica() + 5).reshape(4, -1)}
        if kind == "reduce_scatter":
            return await ctx.reduce_scatter("SUM", mine)
        return await getattr(ctx, kind)(mine, **({"axis": 0} if kind == "all_gather" else {}))

    on_loop = await on_each(2, program)
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1)
    in_threads = await on_each(2, program)
    for one, other in zip(on_loop, in_threads, strict=True):
        assert _bits(one) == _bits(other)
        assert not any(leaf.flags.writeable for leaf in other.values())


async def test_shielded_replica_gets_its_result_after_the_others_failed(held: HeldThreads) -> None:
    results: list[Any] = []

    async def program() -> None:
        handle = here().all_reduce("SUM", part(replica()))
        if replica() == 1:
            tasks.start_soon(release)
            raise LookupError
        with anyio.CancelScope(shield=True):
            results.append(await handle)

    async def release() -> None:
        await _turns()
        held.release()

    async with anyio.create_task_group() as tasks:
        with suppress(LookupError):
            await mirrored(2).run(program)
    assert [result.shape for result in results] == [(SIZE,)]
