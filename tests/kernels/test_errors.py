# SPDX-License-Identifier: Apache-2.0
"""What a caller reads who reduces something that has no such reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist_kernels import ReduceOp, reduce, result_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

SUM, MEAN, MIN, MAX, PRODUCT = ReduceOp
X = np.zeros(3, np.float32)
ANY: Any = None

ONE_OF = "one of SUM, MEAN, MIN, MAX, PRODUCT (ReduceOp.SUM, or the string 'SUM' in any case)"
CAST = "of bool: expected numbers, got bool; cast first, e.g. x.astype(np.int64) or int(x), or use MIN (all) or MAX"
NO_ORDER = "expected an ordered dtype, got complex numbers, which have no order; reduce abs(x), or x.real and x.imag"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ReduceOp("average"), ValueError, f"expected a reduce op, {ONE_OF}, got 'average'"),
        (lambda: ReduceOp(ANY), ValueError, f"expected a reduce op, {ONE_OF}, got None"),
        (lambda: reduce(SUM, [X > 0]), TypeError, f"SUM {CAST}"),
        (lambda: result_dtype(MEAN, np.dtype(bool)), TypeError, f"MEAN {CAST}"),
        (lambda: reduce(PRODUCT, [X > 0]), TypeError, f"PRODUCT {CAST}"),
        (lambda: result_dtype(SUM, bool), TypeError, f"SUM {CAST}"),
        (lambda: reduce(MIN, [X.astype(complex)]), TypeError, f"MIN of complex128: {NO_ORDER}"),
        (lambda: result_dtype(MAX, np.dtype(">c8")), TypeError, f"MAX of complex64: {NO_ORDER}"),
        (lambda: result_dtype(MIN, complex), TypeError, f"MIN of complex128: {NO_ORDER}"),
        (lambda: reduce(SUM, [X.astype(object)]), TypeError, "SUM of object: expected numbers, got objects"),
        (lambda: reduce(MAX, [X.astype(str)]), TypeError, "MAX of <U32: expected numbers, got strings; reduce"),
        (
            lambda: reduce(MIN, [X.astype("M8[s]")]),
            TypeError,
            "MIN of datetime64[s]: expected numbers, got another dtype; reduce",
        ),
    ],
)
def test_error_texts(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
