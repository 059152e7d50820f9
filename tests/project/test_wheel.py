"""The wheel holds both packages, their type markers, the licence and the command, and nothing else."""

from __future__ import annotations

import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import aiodist
from tests.project.paths import PACKAGES, ROOT, run_python

INFO = f"aiodist-{aiodist.__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the checkout, without a network."""
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
    return Path(built)


@pytest.fixture(scope="module")
def files(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def sources() -> set[str]:
    """Return the files that belong in the wheel, by their paths in it."""
    return {
        str(path.relative_to(package.parent))
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_changelog_and_citation_are_of_this_version() -> None:
    assert f"\n## [{aiodist.__version__}] - 2" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {aiodist.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_wheel_holds_both_packages_and_nothing_else(wheel: Path, files: dict[str, str]) -> None:
    assert wheel.name == f"aiodist-{aiodist.__version__}-py3-none-any.whl"
    info = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert files.keys() == sources() | info
    assert {"aiodist/py.typed", "aiodist_kernels/py.typed"} <= files.keys()
    assert {Path(name).suffix for name in sources()} <= {".py", ".typed", ".html", ".css", ".js"}


def test_wheel_names_licence_pythons_extras_and_the_command(files: dict[str, str]) -> None:
    metadata = message_from_string(files[f"{INFO}/METADATA"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.11"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(metadata.get_all("Provides-Extra") or ()) == set(project["optional-dependencies"])
    command = "[console_scripts]\naiodist = aiodist._tools.cli:main\n"
    assert files[f"{INFO}/entry_points.txt"].startswith(command)


def test_wheel_is_importable_alone(wheel: Path, tmp_path: Path) -> None:
    program = "import aiodist, aiodist_kernels, aiodist._tools.cli; print(aiodist.__file__, aiodist_kernels.__file__)"
    printed = run_python(["-c", program], tmp_path, sources=[wheel])
    assert printed.split() == [str(wheel / "aiodist/__init__.py"), str(wheel / "aiodist_kernels/__init__.py")]
