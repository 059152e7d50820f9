"""What tests of several workers get: the event loop they run on, and short pauses where they wait for a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aiodist._runtime import scheduler


@pytest.fixture
def anyio_backend() -> Any:
    """Run a test marked `anyio` on asyncio; where the loop makes a difference, tests say which (`simulated.LOOPS`)."""
    return "asyncio", {}


@pytest.fixture(scope="module")
def short_pauses() -> Iterator[None]:
    """Let looks for circles follow each other at once: each is a walk through all objects of this large process.

    What the looks find does not depend on their pace. That of programs is tested with real workers.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_PAUSE_SECONDS", 0.01)
        patch.setattr(scheduler, "_PAUSE_PER_LOOK", 1)
        yield
