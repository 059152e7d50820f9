# SPDX-License-Identifier: Apache-2.0
"""What the compiler asks of the interpreter ends with it, and leaves alone what the program asks."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

import pytest

from aiodist_kernels.beside import SWITCH_SECONDS, considerately

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    if frozen:
        gc.freeze()


def make_garbage() -> list[int]:
    """Make what the collector has to look at, much of it kept; return the generations that it has collected."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        kept = [[[place]] for place in range(300_000)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == 300_000
    return found


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this interpreter collects in steps")
def test_no_full_collection_meanwhile_and_none_right_after() -> None:
    assert 2 in make_garbage()  # it would come
    with considerately():
        collected = make_garbage()
        assert collected
        assert 2 not in collected
    assert gc.get_count()[2] == 0


def test_young_garbage_is_collected_meanwhile() -> None:
    with considerately():
        before = len(gc.get_objects())
        for _ in range(100_000):
            cycle: list[object] = []
            cycle.append(cycle)
        assert len(gc.get_objects()) < before + 50_000


def test_all_is_as_before_afterwards_whatever_happens() -> None:
    def fail() -> None:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        raise LookupError

    sys.setswitchinterval(0.25)
    gc.set_threshold(500, 7, 9)
    with pytest.raises(LookupError), considerately():
        fail()
    assert sys.getswitchinterval() == pytest.approx(0.25)
    assert gc.get_threshold()[:2] == (500, 7)


def test_what_the_program_sets_meanwhile_stays() -> None:
    with considerately():
        sys.setswitchinterval(0.125)
        gc.set_threshold(300, 3, 3)
    assert sys.getswitchinterval() == pytest.approx(0.125)
    assert gc.get_threshold()[0] == 300


def test_shorter_interval_stays() -> None:
    sys.setswitchinterval(0.0005)
    with considerately():
        assert sys.getswitchinterval() == pytest.approx(0.0005)


def test_what_the_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with considerately():
        pass
    assert gc.get_freeze_count() >= count - 1000
