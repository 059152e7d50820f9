"""One BLAS thread a replica, inside the block and there alone."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from aiodist.demos.blas import one_thread_each


def pools() -> list[Any]:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    assert (np.ones((2, 2)) @ np.ones((2, 2))).sum() == 8  # BLAS is loaded
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]


def test_products_keep_to_one_thread_inside_the_block() -> None:
    before = pools()
    with one_thread_each():
        assert set(pools()) <= {1}
    assert pools() == before


def test_without_threadpoolctl_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pools()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "threadpoolctl", None)
        block = one_thread_each()
    with block:
        assert pools() == before
