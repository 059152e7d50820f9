"""A masked array is refused wherever its mask would be lost, and what it hides would count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiodist import IndexedSlices, MirroredStrategy, PerReplica, Variable
from tests.runtime.programs import mirrored

pytestmark = pytest.mark.anyio

MASKED = np.ma.masked_array([1.0, 2.0], [False, True])
BOTH = PerReplica([np.ones(2), MASKED])


@pytest.mark.parametrize(
    "operation",
    [
        lambda s: s.reduce("SUM", BOTH, None),
        lambda s: s.reduce("SUM", BOTH, 0),
        lambda s: s.reduce("MEAN", MASKED, None),
        lambda s: s.gather(BOTH, 0),
        lambda s: s.extended.reduce_to("SUM", BOTH, "CPU:0"),
        lambda s: s.extended.broadcast_to(MASKED, "CPU:0"),
    ],
)
async def test_operations_outside_of_replicas(operation: Callable[[MirroredStrategy], Any]) -> None:
    with pytest.raises(TypeError, match="MaskedArray"):
        await operation(mirrored(2))


def test_rows() -> None:
    with pytest.raises(TypeError, match="a MaskedArray as the values of IndexedSlices"):
        IndexedSlices(MASKED, [0, 1])


def test_variables() -> None:
    with mirrored(2).scope():
        variable = Variable(np.zeros(2))
        for give in (Variable, variable.assign, variable.assign_add):
            with pytest.raises(TypeError, match="a MaskedArray for a variable"):
                give(MASKED)
    assert variable.numpy().tolist() == [0, 0]
