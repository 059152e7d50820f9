# SPDX-License-Identifier: Apache-2.0
"""What a caller reads who passes something wrong; the texts are in errors.txt beside this file."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist_kernels import ReduceOp, check_number, cut, reduce, reduce_numbers, result_dtype
from tests.kernels.arrays import BFLOAT16

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = pathlib.Path(__file__).with_name("errors.txt")

SUM, MEAN, MIN, MAX, PRODUCT = ReduceOp
X = np.zeros(3, np.float32)
READ_ONLY = np.zeros(3, np.float32)
READ_ONLY.flags.writeable = False
ANY: Any = None

WRONG: dict[str, Callable[[], object]] = {
    "unknown op": lambda: ReduceOp("average"),
    "op of another type": lambda: reduce(ANY, [X]),
    "unknown accumulate": lambda: reduce(SUM, [X], accumulate="float32"),  # type: ignore[arg-type]
    "no buffers": lambda: reduce(SUM, []),
    "a list": lambda: reduce(SUM, [X, [1, 2, 3]]),  # type: ignore[list-item]
    "a number first": lambda: reduce(SUM, [1.5]),  # type: ignore[list-item]
    "a masked array": lambda: reduce(SUM, [X, np.ma.masked_array(X, X == 0)]),
    "a masked array alone": lambda: reduce(SUM, [np.ma.masked_array(X)]),
    "a masked array to be cut": lambda: cut(SUM, [X, X, np.ma.masked_array(X)]),
    "out is masked": lambda: reduce(SUM, [X], out=np.ma.masked_array(X)),
    "shapes differ": lambda: reduce(SUM, [X, X, X[:1]]),
    "dtypes differ": lambda: reduce(SUM, [X, X.astype(np.float64)]),
    "byte orders differ": lambda: reduce(SUM, [X, X.astype(">f4")]),
    "bool sum": lambda: reduce(SUM, [X > 0]),
    "bool mean": lambda: result_dtype(MEAN, np.dtype(bool)),
    "bool product": lambda: reduce(PRODUCT, [X > 0]),
    "complex min": lambda: reduce(MIN, [X * 1j]),
    "complex max": lambda: result_dtype(MAX, np.dtype(">c8")),
    "objects": lambda: reduce(SUM, [X.astype(object)]),
    "strings": lambda: reduce(MAX, [X.astype(str)]),
    "bytes": lambda: reduce(MAX, [X.astype(bytes)]),
    "dates": lambda: reduce(MIN, [X.astype("M8[s]")]),
    "time differences": lambda: reduce(SUM, [X.astype("m8[s]")]),
    "a structured dtype": lambda: reduce(SUM, [np.zeros(3, "f4,i4")]),
    "out is no array": lambda: reduce(SUM, [X], out=[0, 0, 0]),  # type: ignore[arg-type]
    "out of another dtype": lambda: reduce(MEAN, [X.astype(np.int32)], out=X),
    "out of another shape": lambda: reduce(SUM, [X], out=X[:2]),
    "out is read-only": lambda: reduce(SUM, [X], out=READ_ONLY),
    "bool numbers": lambda: reduce_numbers(SUM, [True]),
    "complex numbers": lambda: check_number(MIN, complex),
    "no number": lambda: check_number(SUM, str),
    "no numbers": lambda: reduce_numbers(SUM, []),
}


def told() -> str:
    lines = []
    for name, call in WRONG.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        lines.append(f"{name}\n    {caught.type.__name__}: {caught.value}\n")
    return "\n".join(lines)


def test_error_texts() -> None:
    assert told() == GOLDEN.read_text()


def test_an_error_leaves_the_next_call_alone() -> None:
    told()
    assert reduce(SUM, [X, X]).tolist() == [0, 0, 0]
    assert result_dtype(SUM, BFLOAT16) == BFLOAT16
