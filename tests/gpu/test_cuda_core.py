"""The driver without a GPU: on a stand-in for CUDA's library, and without its packages."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiodist._gpu.cuda_core import CudaCore
from tests.gpu import stand_in
from tests.project.paths import ROOT, environment


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModuleNotFoundError("No module named 'cuda'"), r"are missing here.* \(No module named"),
        (ImportError("cydriver does not export a function"), r"or do not fit.* \(cydriver does not"),
        (None, r"\(cuda-core is 0.7.0, and must be 1.0 or newer\)"),
    ],
)
def test_unusable_packages_are_named(monkeypatch: pytest.MonkeyPatch, error: ImportError | None, text: str) -> None:
    def module(name: str) -> SimpleNamespace:
        if error is not None:
            raise error
        return SimpleNamespace(__version__="0.7.0")

    monkeypatch.setattr(importlib, "import_module", module)
    with pytest.raises(ImportError, match=text) as caught:
        CudaCore()
    assert "'aiodist[cuda]'" in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is a library for Linux")
@pytest.mark.timeout(600)
def test_driver_works_on_a_stand_in(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    pytest.importorskip("aiodist_kernels.cuda.compiled", exc_type=ImportError)  # where numba-cuda is
    if not stand_in.build(tmp_path):
        pytest.skip("there is no compiler for C")
    command = [sys.executable, "-m", "tests.gpu.stand_in"]
    variables = environment() | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
