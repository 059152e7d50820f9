"""`aiodist doctor`: what it prints, and when it complains."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from aiodist.tools.cli import main
from aiodist.tools.doctor import libraries, reductions
from aiodist.tools.doctor.command import sections
from aiodist.tools.doctor.findings import Finding, Section, as_json, as_text, missing
from tests.project.paths import ROOT
from tests.tools.command import environment


def test_doctor_tells_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for line in (
        r"Python +3\.",
        r"cores +\d",
        r"threads of BLAS ",
        r"numpy +\d",
        r"NumPy +serves, always",
        r"Numba +serves large values; the first kernel compiled in \d",
        r"off the event loop's thread from, moved +4 MiB",
        r"memory, copied in one thread +\d+\.\d GB/s",
    ):
        assert re.search(f"^  {line}", printed, re.MULTILINE), line
    assert printed.endswith("All that is needed is there.\n")


def test_doctor_tells_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert list(told["sections"])[:3] == ["machine", "libraries", "reductions on the CPU"]
    assert told["sections"]["libraries"]["numpy"]["value"] == importlib.metadata.version("numpy")


def test_needed_library_that_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("optree", "trio"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(libraries, "version", version)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "not installed: pip install optree\n" in printed
    assert "not installed: pip install 'aiodist[trio]' to run replicas on trio\n" in printed
    assert printed.endswith("Missing: optree.\n")


def test_numba_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(reductions, "warm", fail)
    (numba,) = [finding for finding in reductions.reductions().findings if finding.name == "Numba"]
    assert (numba.value, numba.needed) == ("does not load: Numba needs NumPy 2.3 or less", True)
    assert numba.remedy == "pip install --upgrade numba"


def test_numba_that_is_not_installed_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "numba":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    def fail(_: object) -> None:
        raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr(libraries, "version", version)
    monkeypatch.setattr(reductions, "warm", fail)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert re.search("^  Numba +is not installed, so NumPy serves alone$", printed, re.MULTILINE)
    assert printed.endswith("Missing: numba.\n")


def test_kernels_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "is_ready", lambda _: False)
    (numba,) = [finding for finding in reductions.reductions().findings if finding.name == "Numba"]
    assert "NumPy serves alone" in str(numba.value)
    assert numba.remedy is None


def test_findings_as_text_and_as_json() -> None:
    found = [
        Section("one", [Finding("a", 1), Finding("longer", "gone", "install it", needed=True)]),
        Section("two", [Finding("b", "gone", "may be installed")]),
    ]
    assert as_text(found) == (
        "one\n  a       1\n  longer  gone: install it\n\ntwo\n  b  gone: may be installed\n\nMissing: longer."
    )
    assert as_json(found)["ok"] is False
    assert [finding.name for finding in missing(found)] == ["longer"]


def test_needed_libraries_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert list(libraries.NEEDED) == [re.split(r"[<>=]", line)[0] for line in project["dependencies"]]


def test_sections_are_looked_at_in_order() -> None:
    assert [look.__name__ for look in sections()][:3] == ["machine", "libraries", "reductions"]


def test_doctor_works_as_a_program() -> None:
    command = [sys.executable, "-m", "aiodist", "doctor"]
    variables = environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "machine" in done.stdout
