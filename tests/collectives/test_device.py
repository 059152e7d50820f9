"""Plans on devices: every kind of collective has NumPy's bits, in any order that streams and events allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist._arrays.leaves import Spec
from aiodist._collectives import kinds
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import Collective
from aiodist._collectives.work import Work
from aiodist._gpu import enqueue, steps
from aiodist_kernels import ReduceOp, reduce
from tests.collectives.reference import CASES, Case, spec_of
from tests.gpu.conftest import Machine, Plant, PlantedArray
from tests.kernels import arrays
from tests.kernels.arrays import SINGLE, assert_same_bits

ORDINALS = {1: [0], 2: [0, 1], 3: [0, 0, 1], 5: [1, 0, 1, 2, 0]}
WALLS = {frozenset({0, 1})}


def finished(work: Any) -> Any:
    assert type(work) is Work
    return work.carry_out()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("walls", [set(), WALLS], ids=["peers", "no peers"])
@pytest.mark.parametrize("shards", [False, True])
def test_arrays_on_devices(
    case: Case, size: int, walls: Any, plant: Plant, monkeypatch: pytest.MonkeyPatch, *, shards: bool
) -> None:
    monkeypatch.setattr(steps, "SHARD_FROM", 0 if shards else 1 << 60)
    machine, ordinals = plant(3, walls=walls, unloaded=shards), ORDINALS[size]
    columns = [case.inputs(size, SINGLE, seed=seed) for seed in range(3)]
    with np.errstate(all="ignore"):
        wanted = [case.wanted(column) for column in columns]
    there = [[machine.put(value, ordinal) for value, ordinal in zip(c, ordinals, strict=True)] for c in columns]
    values: list[Any] = [[there[0][i], columns[1][i], there[2][i]] for i in range(size)]  # one leaf on the host
    mark: Any = spec_of(values[0]).marks[0]
    asked = case.collective(values[0], size)
    taking_part = [[mark.view(row[0]), row[1], mark.view(row[2])] for row in values]
    results = finished(executor(asked, size).run(taking_part))
    alone = case.collective(values[0][0], size)
    single = finished(executor(alone, size).run([row[0] for row in taking_part]))
    for replica in range(size):
        for leaf, result in enumerate([*results[replica], single[replica]]):
            array = result
            if leaf != 1:
                assert isinstance(result, PlantedArray)
                assert result.ordinal == ordinals[replica]
                array = result.numpy()
            assert_same_bits(array, wanted[leaf % 3][replica])
    assert len({id(row[leaf].memory) for row in results for leaf in (0, 2)}) == 2 * size


def column_of(machine: Machine, values: list[np.ndarray], ordinals: list[int]) -> tuple[Any, list[Any]]:
    put = [machine.put(value, ordinal) for value, ordinal in zip(values, ordinals, strict=True)]
    mark: Any = spec_of(put[0]).marks[0]
    return mark, [mark.view(array) for array in put]


def test_plan_is_cached(plant: Plant) -> None:
    machine = plant(2)
    values = arrays.buffers(1, 3, (50,), SINGLE)
    mark, column = column_of(machine, values, [0, 0, 1])
    found = executor(Collective(kinds.ALL_REDUCE, ReduceOp.SUM, None, Spec(((50,),), (SINGLE,), (mark,), True)), 3)
    for _ in range(3):
        for result in finished(found.run(column)):
            assert_same_bits(result.numpy(), reduce(ReduceOp.SUM, values))
    assert len(enqueue.queue().known) == 1


def test_result_moves_to_each_device_once(plant: Plant) -> None:
    machine = plant(2)
    mark, column = column_of(machine, [np.ones(4, SINGLE)] * 4, [0, 1, 1, 1])
    asked = Collective(kinds.BROADCAST, None, 0, Spec(((4,),), (SINGLE,), (mark,), True))
    finished(executor(asked, 4).run(column))
    copies = [entry for entry in machine.driver.log if entry[0] == "copy"]
    assert copies == [("copy", 0, 0), ("copy", 1, 0), ("copy", 1, 1), ("copy", 1, 1)]


def test_replicas_that_have_joined_contribute_nothing(plant: Plant) -> None:
    machine = plant(3)
    mark, column = column_of(machine, [np.full(2, i, SINGLE) for i in range(3)], [0, 1, 2])
    spec = Spec(((2,),), (SINGLE,), (mark,), True)
    column[1] = None
    for asked, wanted in (
        (Collective(kinds.ALL_GATHER, None, (0,), kinds.ragged(spec, (0,))), [0, 0, 2, 2]),
        (Collective(kinds.BROADCAST, None, 2, spec), [2, 2]),
        (Collective(kinds.ALL_REDUCE, ReduceOp.MEAN, None, spec), [1, 1]),
    ):
        first, absent, last = finished(executor(asked, 3, (1,)).run(column))
        assert absent is None
        assert (first.numpy().tolist(), last.numpy().tolist()) == (wanted, wanted)
