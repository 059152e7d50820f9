"""The texts on runs that cannot go on, whole: golden/<program>.txt is what a person reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aiodist import get_replica_context
from tests.checking.programs import ended, mirrored

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


async def lock_across_a_collective(replicas: int) -> None:
    lock = asyncio.Lock()

    async def replica() -> None:
        async with lock:
            await get_replica_context().barrier()

    await mirrored(replicas).run(replica)


async def empty_queue(replicas: int) -> None:
    items: asyncio.Queue[int] = asyncio.Queue()

    async def replica() -> None:
        ctx = get_replica_context()
        if ctx.replica_id_in_sync_group == 1:
            await items.get()
        await ctx.all_reduce("SUM", 1.0)

    await mirrored(replicas).run(replica)


async def locks_in_opposite_order(replicas: int) -> None:
    locks = [asyncio.Lock(), asyncio.Lock()]

    async def replica() -> None:
        first = get_replica_context().replica_id_in_sync_group % 2
        async with locks[first]:
            await asyncio.sleep(1)
            async with locks[1 - first]:
                pass

    await mirrored(replicas).run(replica)


Program = Callable[[int], Coroutine[Any, Any, None]]
CASES: list[tuple[Program, int]] = [
    (lock_across_a_collective, 3),
    (empty_queue, 3),
    (locks_in_opposite_order, 2),
    (lock_across_a_collective, 1024),
]


@pytest.mark.parametrize(("program", "replicas"), CASES)
def test_a_standstill_reads_as_it_should(
    program: Program, replicas: int, update_golden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    error = ended(lambda: program(replicas)).error
    text = f"{type(error).__name__}: {error}\n"
    golden = HERE / "golden" / f"{program.__name__}_{replicas}.txt"
    if update_golden:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 24
