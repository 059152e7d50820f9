"""Equal digests mean equal bits."""

from __future__ import annotations

import numpy as np
import pytest

from aiodist.demos.digest import weights_digest
from aiodist.demos.perceptron import Weights

WEIGHTS: Weights = {"a": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}


def test_equal_weights_have_equal_digests_in_any_order() -> None:
    assert weights_digest(WEIGHTS) == weights_digest({"b": WEIGHTS["b"].copy(), "a": WEIGHTS["a"].copy()})


@pytest.mark.parametrize(
    "other",
    [
        {"a": WEIGHTS["a"], "b": -WEIGHTS["b"]},  # equal as numbers, not in bits
        {"a": WEIGHTS["a"], "c": WEIGHTS["b"]},
        {"a": WEIGHTS["a"].T, "b": WEIGHTS["b"]},
        {"a": np.nextafter(WEIGHTS["a"], np.float32(2)), "b": WEIGHTS["b"]},
        {"a": WEIGHTS["a"], "b": WEIGHTS["b"].view(np.int32)},
        {"a": WEIGHTS["a"]},
    ],
)
def test_any_difference_shows(other: Weights) -> None:
    assert weights_digest(other) != weights_digest(WEIGHTS)
