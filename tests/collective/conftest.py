"""An option that writes the texts under golden/ anew: pytest tests/collective --update-golden."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option; it is known where this folder is named on the command line."""
    parser.addoption("--update-golden", action="store_true", help="write the texts under golden/ anew")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether texts are to be written rather than compared."""
    return bool(request.config.getoption("--update-golden", default=False))
