"""Many checks in one process of their own: it must be prepared before anything is imported, and takes long to start."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING, TypeAlias

import pytest

from tests.project.paths import ROOT, environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Outcomes: TypeAlias = dict[str, str | None]
"""For each check the traceback of what went wrong, or None."""


def outcomes_of(module: str, **variables: str) -> Outcomes:
    """Run a module that calls `report`, with these environment variables; return what it reports."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Outcomes = json.loads(done.stdout)
    return found


def report(checks: Mapping[str, Callable[[], None]]) -> None:
    """Make each check, and print what it came to."""
    outcomes: Outcomes = {}
    for name, check in checks.items():
        try:
            check()
        except Exception:  # noqa: BLE001  (whatever it is, it is the outcome of this check)
            outcomes[name] = traceback.format_exc()
        else:
            outcomes[name] = None
    json.dump(outcomes, sys.stdout)


def pass_or_fail(outcome: str | None) -> None:
    """Fail the test with what went wrong there."""
    if outcome is not None:
        pytest.fail(outcome, pytrace=False)
