"""The real driver module through cuda.core, on a library that stands in for the driver's, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import stand_in
from tests.project.paths import ROOT, environment


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is a library for Linux")
@pytest.mark.timeout(600)
def test_driver_works_on_a_stand_in(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    if not stand_in.build(tmp_path):
        pytest.skip("there is no compiler for C")
    command = [sys.executable, "-m", "tests.gpu.stand_in"]
    variables = environment() | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
