"""The GPU benchmark's own logic: on planted GPUs, with leaves some thousand times smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist._arrays import gpus
from tests.benchmarks import cuda_reductions
from tests.benchmarks.cuda_reductions import Case, Row, cases, run
from tests.benchmarks.timing import KIB
from tests.gpu.fake_driver import FakeDriver, FakeMemory, placed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class PlantedGpu(cuda_reductions.Gpu):
    """A device on which every round takes a microsecond on the host and two on the device."""

    def __init__(self) -> None:
        self.driver = FakeDriver(unloaded=True)

    def put(self, values: np.ndarray) -> FakeMemory:
        return placed(self.driver, 0, values)

    def get(self, memory: Any, nbytes: int) -> np.ndarray:
        self.driver.drain()
        found: np.ndarray = memory.array[:nbytes].copy()
        return found

    def measure(self, enqueue: Callable[[int], object], rounds: int) -> tuple[float, float]:
        enqueue(0)
        self.driver.drain()
        return 1.0, 2.0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    monkeypatch.setattr(cuda_reductions, "BEYOND_CACHE", 16 * KIB)
    monkeypatch.setattr(cuda_reductions, "times_of_others", lambda _: {"torch": 1.5})
    return [case.smaller(1 << 15) for case in cases()]


def test_every_case_is_measured_and_has_the_right_bits(small: list[Case], tmp_path: Path) -> None:
    rows = run(PlantedGpu(), small, 60, tmp_path, lambda _: {"device": "planted"})
    assert [row.case for row in rows] == small
    assert all(row.bits for row in rows)
    text = (tmp_path / "cuda-reductions.md").read_text()
    assert text.count("\n| SUM float32") > 5
    assert "torch takes 1.5 µs" in text


def test_wrong_bits_are_found(small: list[Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = PlantedGpu()
    monkeypatch.setattr(gpu, "get", lambda memory, nbytes: np.zeros(nbytes, np.uint8))
    assert run(gpu, small[:1], 60, tmp_path, lambda _: {})[0].failed()[0] == "other bits than on the CPU"


def test_gates() -> None:
    large, many, enqueued = (
        next(case for case in cases() if getattr(case, gate)) for gate in ("share", "of_one", "enqueue")
    )
    assert Row(large, True, 5, 5, 100, 0.95, None, {"torch": 120}).failed() == []
    assert Row(large, True, 5, 5, 100, 0.5).failed() == ["50% of the copy, not 90%"]
    assert Row(many, True, 5, 5, 100, 0.5, 1.5).failed() == ["1.50 times one leaf, not 1.25"]
    assert Row(enqueued, True, 11, 11, 100).failed() == ["11.0 µs to enqueue, not 10"]


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "find", lambda: gpus.Found(missing="no NVIDIA driver is installed"))
    assert cuda_reductions.main([str(tmp_path)]) == 0
    assert "There is no GPU to measure: no NVIDIA driver is installed" in capsys.readouterr().out
