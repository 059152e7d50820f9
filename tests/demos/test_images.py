"""The digits, and what is said without scikit-learn."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from aiodist.demos.endings import MissingExtraError
from aiodist.demos.images import load_digits


def test_digits_are_cut_into_two_parts_of_all_classes() -> None:
    pytest.importorskip("sklearn")
    digits = load_digits()
    for (images, classes), size in ((digits.train, 1438), (digits.held_out, 359)):
        assert images.shape == (size, 64)
        assert images.dtype == np.float32
        assert (images.min(), images.max()) == (0, 1)
        assert set(classes.tolist()) == set(range(10))
    assert load_digits().digest == digits.digest


def test_missing_scikit_learn_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'aiodist\[examples\]'"):
        load_digits()
