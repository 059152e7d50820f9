"""The blocks of results, recorded."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist_kernels import pool


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put every result in a block; return a list to which each new block adds its size."""
    sizes: list[int] = []

    def allocate(nbytes: int) -> Any:
        sizes.append(nbytes)
        return pool._aligned(nbytes)

    monkeypatch.setattr(pool, "POOLED_FROM", 1)
    monkeypatch.setattr(pool, "POOLED_AMONG_FROM", 1)
    monkeypatch.setattr(pool, "results", pool.Pool(allocate=allocate))
    return sizes
