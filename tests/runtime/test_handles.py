"""A collective is issued by the call and completed by the await."""

from __future__ import annotations

import asyncio
import gc
import inspect
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import CollectiveHandle, MirroredStrategy, get_replica_context
from tests.runtime.programs import Relay, here, mirrored, on_each, replica
from tests.runtime.warned import warned

pytestmark = pytest.mark.anyio


async def test_several_in_flight_are_in_the_order_of_the_calls() -> None:
    async def program() -> list[int]:
        pending = [here().all_reduce("SUM", k + replica()) for k in range(5)]
        return [await handle for handle in reversed(pending)][::-1]

    assert await on_each(3, program) == ([3, 6, 9, 12, 15],) * 3


async def test_several_in_flight_of_different_kinds() -> None:
    async def program() -> tuple[Any, ...]:
        context = here()
        total, most, whole = (
            context.all_reduce("SUM", 1),
            context.all_reduce("MAX", replica()),
            context.all_gather(np.array([replica()]), 0),
        )
        await context.barrier()
        return (await whole).tolist(), await most, await total

    assert await on_each(3, program) == (([0, 1, 2], 2, 3),) * 3


async def test_done_says_whether_an_await_would_wait_for_others() -> None:
    seen = {}
    relay = Relay([0, 1])

    async def program() -> None:
        await relay.turn()
        handle = here().barrier()
        seen[replica()] = handle.done()
        relay.pass_on()
        await handle
        assert handle.done()

    await mirrored(2).run(program)
    assert seen == {0: False, 1: True}


async def test_handles_of_replicas_that_are_cancelled_are_not_complained_of() -> None:
    async def program() -> None:
        for handle in [here().all_reduce("SUM", k) for k in range(3)]:
            await handle
            if replica() != 1:
                await anyio.sleep_forever()
        raise LookupError

    with warned() as told, pytest.raises(LookupError):
        await mirrored(3).run(program)
    assert told == []


def test_handles_of_a_run_that_is_cancelled_are_not_complained_of() -> None:
    async def program() -> None:
        for handle in [here().all_reduce("SUM", k) for k in range(3)]:
            await handle
            await asyncio.sleep(60)

    async def main() -> None:
        async with asyncio.timeout(0.01):
            await mirrored(3).run(program)

    with warned() as told, pytest.raises(TimeoutError):
        asyncio.run(main())
    assert told == []


async def test_handle_is_a_collective_handle_and_awaitable() -> None:
    async def program() -> None:
        handle = here().barrier()
        assert isinstance(handle, CollectiveHandle)
        assert inspect.isawaitable(handle)
        await handle

    await mirrored(2).run(program)


async def test_handle_awaited_twice_gives_the_result_twice() -> None:
    async def program() -> None:
        handle = here().all_reduce("SUM", {"x": np.ones(2)})
        first, second = await handle, await handle
        assert first["x"] is second["x"]
        assert first is not second

    await mirrored(3).run(program)


async def test_handle_awaited_from_a_child_task() -> None:
    async def program() -> int:
        results = []

        async def child(handle: Any) -> None:
            results.append(await handle)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child, here().all_reduce("SUM", 1))
        return int(results[0])

    assert await on_each(3, program) == (3, 3, 3)


async def test_handle_awaited_by_several_tasks_of_one_replica() -> None:
    async def program() -> int:
        results: list[int] = []
        handle = here().all_reduce("SUM", 1)

        async def child() -> None:
            results.append(await handle)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(child)
            await handle
        return sum(results)

    assert await on_each(3, program) == (12, 12, 12)


async def test_collective_issued_in_a_child_task_is_its_replicas() -> None:
    async def program() -> int:
        results = []

        async def child() -> None:
            results.append(await here().all_reduce("SUM", replica()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
        return int(results[0])

    assert await on_each(3, program) == (3, 3, 3)


async def test_errors_of_arguments_are_raised_by_the_call_not_the_await() -> None:
    async def program() -> None:
        with pytest.raises(ValueError, match="reduce op"):
            here().all_reduce("AVERAGE", 1)
        await here().barrier()

    await mirrored(2).run(program)


async def test_dropped_handle_has_contributed_and_warns_with_its_call_site() -> None:
    async def program() -> Any:
        handle = here().all_reduce("SUM", np.float32(replica()))
        if replica() == 1:
            del handle  # line of the warning: the call's, above
            gc.collect()
            await here().barrier(name="later")
            return None
        result = await handle
        await here().barrier(name="later")
        return result

    with warned() as told:
        results = await on_each(3, program)
    assert results == (3.0, None, 3.0)
    (warning,) = told
    first = inspect.getsourcelines(program)[1]
    assert warning.category is RuntimeWarning
    assert (warning.file, warning.line) == (__file__, first + 1)
    assert "replica 1 never awaited all_reduce(SUM, np.float32)" in warning.text
    assert "it has contributed" in warning.text


async def test_handle_that_was_awaited_once_is_silent() -> None:
    async def program() -> None:
        await here().barrier()
        gc.collect()

    with warned() as told:
        await mirrored(2).run(program)
    assert told == []


async def test_handle_awaited_after_the_others_have_gone_on() -> None:
    async def program() -> int:
        handle = here().all_reduce("SUM", 1)
        if replica() == 2:
            for _ in range(10):
                await checkpoint()
        total: int = await handle
        return total

    assert await on_each(3, program) == (3, 3, 3)


async def test_many_in_flight_on_many_replicas() -> None:
    async def program() -> int:
        pending = [here().all_reduce("SUM", k) for k in range(50)]
        return sum([await handle for handle in pending])

    assert await on_each(20, program) == (20 * sum(range(50)),) * 20


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncio_gather_over_handles(anyio_backend: str) -> None:
    async def program() -> list[int]:
        return list(await asyncio.gather(*(here().all_reduce("SUM", k) for k in range(3))))

    assert await on_each(2, program) == ([0, 2, 4],) * 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncio_wait_for_a_handle(anyio_backend: str) -> None:
    async def program() -> int:
        total: int = await asyncio.wait_for(here().all_reduce("SUM", 1), 60)
        return total

    assert await on_each(2, program) == (2, 2)


async def test_every_replica_gets_its_own_order_of_keys() -> None:
    async def program() -> list[tuple[str, float]]:
        keys = "ba" if get_replica_context().replica_id_in_sync_group == 0 else "ab"
        mine = {key: np.full(1, ord(key), float) for key in keys}
        result = await get_replica_context().all_reduce("mean", mine)
        return [
            (key, float(result[key][0]) - float(value[0])) for key, value in zip(result, mine.values(), strict=True)
        ]

    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    first, second = strategy.experimental_local_results(await strategy.run(program))
    assert first == [("b", 0.0), ("a", 0.0)]
    assert second == [("a", 0.0), ("b", 0.0)]


async def test_a_merge_call_dropped_outside_any_run_leaves_nothing_open() -> None:
    ctx = get_replica_context()
    before = dict(ctx.member.group.open)
    with warned() as told:
        ctx.merge_call(len)
    assert ["never awaited merge_call" in warning.text for warning in told] == [True]
    assert ctx.member.group.open == before
