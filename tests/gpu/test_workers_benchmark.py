"""The benchmark of GPU values over several workers: on planted GPUs, with values some thousand times smaller."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist._arrays import devices
from tests.benchmarks import cuda_workers
from tests.gpu.conftest import Machine, PlantedArray

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"4 B": (1, 2), "2 KiB": (512, 2)}
LEAVES = 5, 40, 1


class PlantedLab(cuda_workers.Gpu):
    """The planted framework's arrays; ``spoils`` what is taken from them."""

    def __init__(self, machine: Machine, *, spoils: bool = False) -> None:
        self.machine = machine
        self.spoils = spoils

    def put(self, values: np.ndarray, ordinal: int) -> PlantedArray:
        return self.machine.put(values, ordinal)

    def get(self, array: Any) -> np.ndarray:
        found: np.ndarray = array.numpy()
        return found + self.spoils


@pytest.mark.parametrize("spoils", [False, True])
def test_every_line_is_measured_and_compared(
    plant: Callable[..., Machine], capsys: pytest.CaptureFixture[str], *, spoils: bool
) -> None:
    strategy, rows = asyncio.run(cuda_workers.simulated(PlantedLab(plant(1), spoils=spoils), SIZES, LEAVES))
    assert len(rows) == 3 * len(SIZES) + 2
    assert all(row.host > 0 and row.gpu > 0 for row in rows)
    assert all(bool(row.wrong) is spoils for row in rows)
    cuda_workers.show(strategy, rows)
    told = capsys.readouterr().out
    assert "through host memory" in told
    assert ("WRONG: 1 values, first 2.0 for 1.0 at 0 of leaf 0" in told) is spoils


@pytest.mark.skipif(bool(devices.find_gpus().gpus), reason="there is a GPU")
def test_it_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_workers.main() == 0
    assert capsys.readouterr().out.startswith("There is no GPU to measure: ")
