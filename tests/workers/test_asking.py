"""Asking for several requests in one event loop: nobody keeps it while another's is complete."""

from __future__ import annotations

import time

import anyio
import pytest

from aiodist.replica.awaiting import Bell, asked_until, until

pytestmark = pytest.mark.anyio


class _Asked:
    """A request that is complete when it has been asked so often."""

    def __init__(self, times: float) -> None:
        self.left = times

    def test(self) -> bool:
        self.left -= 1
        return self.left < 0


async def test_one_that_asks_gives_way_to_another_whose_request_is_complete() -> None:
    bell, other = Bell(lambda fn: fn()), _Asked(1000)
    never, begun = _Asked(float("inf")), time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until, other, bell)
        await anyio.wait_all_tasks_blocked()
        while other.left >= 0 and time.monotonic() < begun + 20:
            assert not asked_until(never, time.perf_counter() + 20)
    assert time.monotonic() < begun + 20
    assert not asked_until(never, time.perf_counter())
    assert asked_until(_Asked(5), time.perf_counter() + 20)
    bell.close()
