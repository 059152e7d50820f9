"""Tests of calls as data."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from aiodist import IndexedSlices
from aiodist._collectives import kinds
from aiodist._core.call import is_of_the_program
from aiodist._runtime.requests import described, request


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "f2", "f8", "c8", "g", "U3", "S5", "M8[ns]", "V4"])
def test_bytes_of_an_array_are_those_of_numpy(dtype: str) -> None:
    array = np.zeros((2, 3), dtype)
    assert request(kinds.BROADCAST, None, 0, None, *described(array)[:2]).call.nbytes == array.nbytes


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [([True, 1, 1.0, 1j], 1 + 8 + 8 + 16), (IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2)), None)],
)
def test_bytes_of_other_values(value: Any, nbytes: int | None) -> None:
    assert request(kinds.BROADCAST, None, 0, None, *described(value)[:2]).call.nbytes == nbytes


@pytest.mark.parametrize("name", ["aiodist", "aiodist_kernels", "anyio", "asyncio", "contextlib", "trio"])
def test_event_loops_and_aiodist_are_not_of_the_program(name: str) -> None:
    assert not is_of_the_program(str(pytest.importorskip(name).__file__))


@pytest.mark.parametrize("file", [__file__, np.__file__, json.__file__, "/home/me/asyncio/train.py", "<string>"])
def test_anything_else_is_of_the_program(file: str) -> None:
    assert is_of_the_program(file)
