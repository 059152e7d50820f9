"""Large values are assigned to variables as small ones are, by worker threads."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiodist import MirroredStrategy, Variable
from aiodist._strategy import state
from aiodist._strategy.aggregation import updated
from aiodist_kernels import policy, pool
from tests.runtime.programs import mirrored, replica, still_works

pytestmark = pytest.mark.anyio

AGGREGATIONS = ("sum", "mean", "only_first_replica", "none")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the worker thread that a new value is made in; every value counts as large."""
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 8)
    seen: list[int] = []
    loop = threading.get_ident()

    def spy(plain: Any, *args: Any, **settings: Any) -> Any:
        if threading.get_ident() != loop:
            seen.append(threading.get_ident())
        return plain(*args, **settings)

    monkeypatch.setattr(state, "updated", partial(spy, updated))
    return seen


def variable(strategy: MirroredStrategy, value: Any, aggregation: str) -> Variable:
    with strategy.scope():
        return Variable(value, aggregation=aggregation)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
async def test_large_assignments_leave_the_loop(threads: list[int], method: str, aggregation: str) -> None:
    brought = [np.linspace(0, 1, 7, dtype=np.float32) * (1 if aggregation == "none" else k + 1) for k in range(3)]
    strategy = mirrored(3)
    v = variable(strategy, np.ones(7, np.float32), aggregation)

    async def program() -> Any:
        assert await getattr(v, method)(brought[replica()]) is v
        return v.read_value().tobytes()

    large = strategy.experimental_local_results(await strategy.run(program))
    assert len(threads) == 1
    assert not v.read_value().flags.writeable
    assert not any(np.shares_memory(v.read_value(), array) for array in brought)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "BLOCKING_FROM_MOVED", 1 << 40)
        v.assign(np.ones(7, np.float32))
        assert strategy.experimental_local_results(await strategy.run(program)) == large
    assert len(threads) == 1


async def test_assignments_take_effect_in_order_also_where_nobody_awaits_between(threads: list[int]) -> None:
    strategy = mirrored(2)
    v = variable(strategy, np.zeros(5), "sum")

    async def program() -> None:
        handles = []
        for step in range(20):
            handles.append(v.assign_add(np.full(5, 1.0)))
            if step % 5 == 4:
                handles.append(v.assign(v.read_value() * 0 + step))
        for handle in handles:
            await handle

    await strategy.run(program)
    assert v.numpy().tolist() == [38.0] * 5
    assert len(threads) == 24


async def test_assignment_from_outside_waits_for_one_that_is_being_made(threads: list[int]) -> None:
    strategy = mirrored(2)
    v = variable(strategy, np.zeros(5), "sum")

    async def program() -> None:
        handle = v.assign_add(np.ones(5))
        await here_then_outside(v)
        await handle

    async def here_then_outside(v: Variable) -> None:
        if replica() == 1:  # both have arrived
            v.state.settle()
            assert v.read_value().tolist() == [2.0] * 5

    await strategy.run(program)
    assert v.numpy().tolist() == [2.0] * 5
    assert v.state.change is None


async def test_large_values_that_must_be_equal_and_are_not(threads: list[int]) -> None:
    strategy = mirrored(2)
    v = variable(strategy, np.zeros(5), "none")

    async def program() -> None:
        await v.assign(np.full(5, float(replica())))

    with pytest.raises(ValueError, match="replica 1's is not replica 0's"):
        await strategy.run(program)
    assert v.numpy().tolist() == [0.0] * 5
    v.assign_add(np.ones(5))
    assert v.numpy().tolist() == [1.0] * 5
    await still_works(strategy)


async def test_a_thousand_assignments_use_a_few_blocks(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POOLED_FROM", 16)
    monkeypatch.setattr(pool, "results", pool.Pool())
    blocks: list[int] = []
    plain = pool._Block

    def make(nbytes: int, kind: int) -> Any:
        blocks.append(nbytes)
        return plain(nbytes, kind)

    monkeypatch.setattr(pool, "_Block", make)
    strategy = mirrored(2)
    v = variable(strategy, np.zeros(5), "mean")

    async def program() -> None:
        for _ in range(1000):
            await v.assign_add(np.ones(5))

    await strategy.run(program)
    assert v.numpy().tolist() == [1000.0] * 5
    assert 1 <= len(blocks) <= 6
