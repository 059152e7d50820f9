"""Memory of results, watched."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist_kernels import pool


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every result lie in a block of memory; return a list that grows by the size of each block that is made."""
    sizes: list[int] = []

    def allocate(nbytes: int) -> Any:
        sizes.append(nbytes)
        return pool._aligned(nbytes)

    monkeypatch.setattr(pool, "POOLED_FROM", 1)
    monkeypatch.setattr(pool, "POOLED_AMONG_FROM", 1)
    monkeypatch.setattr(pool, "results", pool.Pool(allocate=allocate))
    return sizes
