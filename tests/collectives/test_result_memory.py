"""Large results lie in memory that is used again, but never while anybody can see it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist_kernels import policy, pool
from tests.runtime.programs import here, mirrored, replica

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 1 << 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> pool.Pool:
    fresh = pool.Pool()
    monkeypatch.setattr(pool, "POOLED_FROM", 1)
    monkeypatch.setattr(pool, "results", fresh)
    return fresh


class Step:
    """One step of a program: what is reduced, what becomes of the result, and what happens to the run."""

    def __init__(self, keep: str, ending: str, off_loop: bool, nest: bool) -> None:
        self.keep = keep
        self.ending = ending
        self.off_loop = off_loop
        self.nest = nest


KEEP: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda array: None,
    "array": lambda array: array,
    "slice": lambda array: array[5:9],
    "view": lambda array: array.reshape(2, -1).T[::2],
    "memoryview": lambda array: memoryview(array)[3:],
}
steps = st.builds(
    Step,
    keep=st.sampled_from(list(KEEP)),
    ending=st.sampled_from(["return", "raise", "cancel"]),
    off_loop=st.booleans(),
    nest=st.booleans(),
)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=15)
@given(program=st.lists(steps, min_size=2, max_size=12))
def test_what_is_kept_stays_as_it_is(backend: str, program: list[Step]) -> None:
    kept: list[tuple[Any, bytes]] = []

    async def one(number: int, step: Step) -> None:
        mine = np.full(SIZE, number * 10 + replica(), np.float32)
        result = await here().all_reduce("SUM", {"w": mine, "b": mine[:7]} if step.nest else mine)
        array = result["w"] if step.nest else result
        assert (array == number * 20 + 1).all()
        held = KEEP[step.keep](array)
        if held is not None:
            kept.append((held, bytes(np.ascontiguousarray(held))))
        if step.ending == "raise":
            raise LookupError
        if step.ending == "cancel" and replica() == 0:
            scopes[-1].cancel()
        await here().barrier()

    async def main() -> None:
        strategy = mirrored(2)
        for number, step in enumerate(program):
            scopes.append(anyio.CancelScope())
            with pytest.MonkeyPatch.context() as patch, suppress(LookupError), scopes[-1]:
                patch.setattr(policy, "BLOCKING_FROM_MOVED", 1 if step.off_loop else 1 << 40)
                await strategy.run(one, (number, step))
            for held, wanted in kept:
                assert bytes(np.ascontiguousarray(held)) == wanted
            del kept[::3]

    scopes: list[anyio.CancelScope] = []
    anyio.run(main, backend=backend)


def test_steps_use_the_same_memory_again(small_blocks: pool.Pool) -> None:
    places: set[int] = set()

    async def train() -> None:
        state = None
        for _ in range(500):
            state = await here().all_reduce("SUM", np.ones(SIZE))
            places.add(state.ctypes.data)

    async def main() -> None:
        await mirrored(3).run(train)

    anyio.run(main)
    assert len(places) <= 3
    assert small_blocks.idle_bytes <= 3 * SIZE * 8
