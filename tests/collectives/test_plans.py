"""Plans on the host: what comes out is what NumPy gives, in memory of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist._collectives import host
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import Collective
from aiodist._collectives.work import Work
from aiodist_kernels import policy
from tests.collectives.reference import CASES, Case

EXACT: list[np.dtype] = [np.dtype(np.int16), np.dtype(np.uint8)]
DTYPES = [np.dtype(np.float32), *EXACT]


def on_the_host(collective: Collective, values: list[Any], large: bool = False, **options: Any) -> list[Any]:
    """Return the result of each position; of large values, worker threads make it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BLOCKING_FROM_MOVED", "LEAST_MOVED_BY_A_THREAD") if large else ():
            patch.setattr(policy, name, 1)
        patch.setattr(host, "LOOK_FROM", 0 if large else host.LOOK_FROM)
        found = executor.__wrapped__(collective, len(values), **options)
        result = found.run(values)
        if isinstance(result, Work):
            result = result.carry_out()
    return [result] * len(values) if found.shared else result


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=25)
@given(
    size=st.integers(1, 5),
    layout=st.sampled_from(["C", "F", "big-endian", "mixed"]),
    seed=st.integers(0, 99),
    large=st.booleans(),
    single=st.booleans(),
)
def test_every_kind(case: Case, size: int, layout: str, seed: int, *, large: bool, single: bool) -> None:
    columns = [case.inputs(size, dtype, layout, seed + k) for k, dtype in enumerate(DTYPES)]
    rows: list[Any] = columns[0] if single else [list(row) for row in zip(*columns, strict=True)]
    with np.errstate(all="ignore"):
        case.check(columns, on_the_host(case.collective(rows[0], size), rows, large), single=single)
