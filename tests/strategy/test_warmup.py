"""Warming up compiles kernels, and changes no result."""

import numpy as np
import pytest

from aiodist import MirroredStrategy, PerReplica, get_replica_context
from aiodist_kernels import ReduceOp, plan_for

pytestmark = pytest.mark.anyio


async def _sums(strategy: MirroredStrategy, value: PerReplica) -> list[np.ndarray]:
    async def program(mine: np.ndarray) -> np.ndarray:
        result: np.ndarray = await get_replica_context().all_reduce("sum", mine)
        return result

    return list(strategy.experimental_local_results(await strategy.run(program, (value,))))


async def test_warmup_compiles_what_the_nests_need_and_changes_no_bit() -> None:
    strategy = MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    rng = np.random.default_rng(7)
    value = PerReplica([rng.standard_normal(1 << 18).astype(np.float32) for _ in range(3)])
    before = await _sums(strategy, value)
    await strategy.warmup({"w": value.values[0]})
    assert plan_for(ReduceOp.SUM, np.dtype(np.float32), 3, "native").kernel is not None
    for old, new in zip(before, await _sums(strategy, value), strict=True):
        assert old.tobytes() == new.tobytes()
