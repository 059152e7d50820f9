"""What tests of runs share."""

from __future__ import annotations

import pytest

from tests.runtime.programs import HeldThreads


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldThreads:
    """Hold the work of reduction threads until the test lets it go."""
    return HeldThreads(monkeypatch)
