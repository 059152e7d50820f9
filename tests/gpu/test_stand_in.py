"""The real driver room through cuda.core, on a library that stands in for the driver's, in a process of its own."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest

from tests.gpu import stand_in
from tests.project.apart import Outcomes, outcomes_of, pass_or_fail

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What each job came to."""
    folder: Path = tmp_path_factory.mktemp("driver")
    if sys.platform != "linux" or importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda.core is not installed")
    if not stand_in.build(folder):
        pytest.skip("there is no compiler for C")
    return outcomes_of("tests.gpu.stand_in", LD_LIBRARY_PATH=str(folder))


@pytest.mark.timeout(600)  # the first of them waits for the process
@pytest.mark.parametrize("job", stand_in.jobs())
def test_driver_room_works_on_a_stand_in(job: str, outcomes: Outcomes) -> None:
    pass_or_fail(outcomes[job])
