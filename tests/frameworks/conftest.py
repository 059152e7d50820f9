"""Every test that asks for ``framework`` runs with each of them that is installed."""

from __future__ import annotations

import pytest

from tests.frameworks.frameworks import FRAMEWORKS, Framework


@pytest.fixture(params=list(FRAMEWORKS))
def framework(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]()
