"""Fixtures for tests of runs."""

from __future__ import annotations

import pytest

from tests.runtime.programs import HeldThreads


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldThreads:
    """Hold the work of reduction threads until the test releases it."""
    return HeldThreads(monkeypatch)
