"""Ten thousand replicas in one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.replica.programs import here, mirrored, replica


@pytest.mark.asyncio
async def test_ten_thousand_replicas_meet() -> None:
    count = 10_000
    order = []

    async def program() -> int:
        await here().barrier()
        order.append(replica())
        total = await here().all_reduce("SUM", np.full(1, replica()))
        return int(total[0]) if replica() % 5000 == 0 else 0

    result = await mirrored(count).run(program)
    assert order == list(range(count))
    assert sum(result.values) == 2 * (count * (count - 1) // 2)
