# SPDX-License-Identifier: Apache-2.0
"""Every kernel, on simulated threads, gives the bits of the NumPy tier."""

from __future__ import annotations

import os

import pytest

from tests.kernels.cuda import simulate
from tests.project.apart import Outcomes, outcomes_of, pass_or_fail


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """What each job came to in one process with the simulator, where all of them run."""
    return outcomes_of("tests.kernels.cuda.simulate", NUMBA_ENABLE_CUDASIM="1")


@pytest.mark.timeout(180)  # the first of them waits for the process
@pytest.mark.parametrize("job", simulate.jobs())
def test_simulated_kernel_gives_the_bits_of_numpy(job: str, outcomes: Outcomes) -> None:
    pass_or_fail(outcomes[job])


def test_simulator_is_off_in_this_process() -> None:
    assert os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "0"
