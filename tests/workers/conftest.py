"""What tests of several workers get: the event loop they run on."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> Any:
    """Run a test marked `anyio` on asyncio; where the loop makes a difference, tests say which (`simulated.LOOPS`)."""
    return "asyncio", {}
