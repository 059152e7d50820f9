"""The schedule, pinned: replicas start, and go on after each collective, in the order of their ids."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tests.runtime.programs import Relay, here, mirrored, on_each, replica

pytestmark = pytest.mark.anyio

ORDERS = [*itertools.permutations(range(3)), *[(3, 1, 0, 2), (1, 3, 2, 0), (2, 0, 3, 1), (3, 2, 1, 0)]]


async def log_of(count: int, rounds: int, orders: list[tuple[int, ...]]) -> list[tuple[str, int]]:
    """Return who did what, when replicas arrive at each round's barrier in that round's order."""
    log: list[tuple[str, int]] = []
    relays = [Relay(orders[k % len(orders)]) for k in range(rounds)]

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


def in_order(count: int, rounds: int) -> list[tuple[str, int]]:
    moments = ["start", *(f"after {number}" for number in range(rounds))]
    return [(moment, replica_id) for moment in moments for replica_id in range(count)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
async def test_schedule_for_every_order_of_arrival(order: tuple[int, ...]) -> None:
    assert await log_of(len(order), 4, [order]) == in_order(len(order), 4)


async def test_schedule_when_many_arrive_backwards() -> None:
    assert await log_of(600, 2, [tuple(range(599, -1, -1))]) == in_order(600, 2)


async def test_schedule_when_every_round_has_another_order() -> None:
    orders = list(itertools.permutations(range(4)))
    assert await log_of(4, len(orders), orders) == in_order(4, len(orders))


@pytest.mark.parametrize("count", [1, 2, 16, 600])
async def test_schedule_with_nothing_outside_to_wait_for(count: int) -> None:
    log = []

    async def program() -> None:
        log.append(("start", replica()))
        for number in range(3):
            await here().all_reduce("SUM", 1.0)
            log.append((f"after {number}", replica()))

    await mirrored(count).run(program)
    assert log == in_order(count, 3)


async def test_schedule_of_collectives_of_every_kind() -> None:
    log: list[object] = []

    def merge(strategy: Any) -> None:
        log.append("merge")

    async def program() -> None:
        import numpy as np

        x, context = np.ones(2), here()
        for call in (
            lambda: context.all_reduce("SUM", {"x": x}),
            lambda: context.all_gather(x, 0),
            lambda: context.broadcast(x),
            lambda: context.reduce_scatter("SUM", x),
            lambda: context.all_to_all(x),
            context.barrier,
            lambda: context.merge_call(merge),
        ):
            await call()
            log.append(replica())

    await mirrored(2).run(program)
    assert log == [*[0, 1] * 6, "merge", 0, 1]


async def test_last_arrival_that_works_on_before_it_awaits() -> None:
    """The others are resumed without it; from the next collective on, all are in order again."""
    log = []
    relay = Relay([2, 0, 1])

    async def program() -> None:
        await relay.turn()
        arrival = here().barrier(name="first")
        relay.pass_on()
        if replica() == 1:
            for _ in range(5):
                await checkpoint()
        await arrival
        log.append(replica())
        await here().barrier()
        log.append(replica())

    await mirrored(3).run(program)
    assert log[:2] == [0, 2]
    assert log[-3:] == [0, 1, 2]


async def test_same_program_has_the_same_schedule_every_time() -> None:
    async def log() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        async def program() -> None:
            for number in range(20):
                await here().all_reduce("MAX", replica() * number)
                seen.append((number, replica()))

        await mirrored(7).run(program)
        return seen

    logs = [await log() for _ in range(5)]
    assert all(one == logs[0] for one in logs)


async def test_replica_that_is_told_first_may_arrive_at_the_next_at_once() -> None:
    """Replica 0 is a collective ahead before replica 2 has been resumed from the last."""
    log = []

    async def program() -> None:
        for number in range(3):
            log.append(("in", number, replica()))
            await here().barrier()

    await mirrored(3).run(program)
    assert log == [("in", number, replica_id) for number in range(3) for replica_id in range(3)]


async def test_plain_function_runs_in_one_go_and_in_order() -> None:
    log = []

    def program() -> int:
        log.append(replica())
        return replica() * 10

    assert await on_each(3, program) == (0, 10, 20)
    assert log == [0, 1, 2]


async def test_awaitable_that_a_plain_function_returns_is_awaited() -> None:
    assert await on_each(3, lambda: here().all_reduce("SUM", 2)) == (6, 6, 6)


async def test_run_gives_the_loop_to_others_while_replicas_wait() -> None:
    opened = anyio.Event()

    async def program() -> None:
        await opened.wait()
        await here().barrier()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mirrored(2).run, program)
        await checkpoint()
        opened.set()
