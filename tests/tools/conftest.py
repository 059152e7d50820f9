"""Tools run on one event loop in tests; replicas are tested on every one elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
