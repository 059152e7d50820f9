"""The GPU benchmark's own logic: on planted GPUs, with leaves some thousand times smaller."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist._arrays import gpus
from tests.benchmarks import cuda_reductions
from tests.benchmarks.cuda_cases import KIB, Case, Row, cases, write
from tests.gpu.fake_driver import FakeDriver, FakeMemory, placed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class PlantedLab:
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


def run(lab: Any, chosen: list[Case], seconds: float, others: dict[str, float] | None = None) -> Any:
    return cuda_reductions.run(lab, chosen, seconds, lambda _: others or {}, lambda _: None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    monkeypatch.setattr(cuda_reductions, "BEYOND_CACHE", 16 * KIB)
    return [case.smaller(1 << 15) for case in cases()]


def test_every_case_is_measured_and_has_the_right_bits(small: list[Case], tmp_path: Path) -> None:
    outcome = run(PlantedLab(), small, 60, {"torch": 1.5})
    rows = outcome.rows
    assert outcome.copy > 0
    assert not outcome.left_out
    assert not outcome.failures
    assert [row.case for row in rows] == small
    assert all(row.bits for row in rows)
    write(tmp_path, {"device": "planted"}, rows)
    text = (tmp_path / "cuda-reductions.md").read_text()
    assert text.count("\n| SUM float32") > 5
    assert "torch takes 1.5 µs" in text
    assert len(json.loads((tmp_path / "cuda-reductions.json").read_text())["rows"]) == len(rows)


def test_wrong_bits_are_found(small: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    lab = PlantedLab()
    monkeypatch.setattr(lab, "get", lambda memory, nbytes: np.zeros(nbytes, np.uint8))
    assert run(lab, small[:1], 60).rows[0].failed()[0] == "other bits than on the CPU"


def test_gates(small: list[Case]) -> None:
    large = next(case for case in cases() if case.share)
    many = next(case for case in cases() if case.of_one)
    enqueued = next(case for case in cases() if case.enqueue)
    assert Row(large, 5, 100, 0.95, True, None, {"torch": 120}).failed() == []
    assert Row(large, 5, 100, 0.5, True, None, {}).failed() == ["50% of the copy, not 90%"]
    assert Row(many, 5, 100, 0.5, True, 1.5, {}).failed() == ["1.50 times one leaf, not 1.25"]
    assert Row(enqueued, 11, 100, 0.1, True, None, {}).failed() == ["11.0 µs to enqueue, not 10"]


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "find", lambda: gpus.Found(missing="no NVIDIA driver is installed"))
    assert cuda_reductions.main([str(tmp_path)]) == 0
    assert "There is no GPU to measure: no NVIDIA driver is installed" in capsys.readouterr().out
