# SPDX-License-Identifier: Apache-2.0
"""Every kernel, on simulated threads, gives the bits of the NumPy tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.cuda import simulate
from tests.project.paths import ROOT, environment


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """What each job came to in one process with the simulator, where all of them run."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda.simulate"],
        cwd=ROOT,
        env=environment() | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(180)  # the first of them waits for the process
@pytest.mark.parametrize("job", simulate.jobs())
def test_simulated_kernel_gives_the_bits_of_numpy(job: str, outcomes: dict[str, str | None]) -> None:
    error = outcomes[job]
    if error is not None:
        pytest.fail(error, pytrace=False)


def test_simulator_is_off_in_this_process() -> None:
    assert os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "0"
