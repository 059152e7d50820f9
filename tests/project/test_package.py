"""The package as users get it: public names, the modules that an import loads, and the files of the wheel."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

import aiodist
from tests.project.paths import PACKAGES, ROOT, run_python

# Public names: all are documented and on the API page, and static tools see the same as the runtime.

NAMES = sorted(aiodist.__all__)
CLASSES = [name for name in NAMES if isinstance(getattr(aiodist, name), type)]
FUNCTIONS = [name for name in NAMES if isinstance(getattr(aiodist, name), FunctionType)]


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class and of its bases in aiodist."""
    kinds = FunctionType | property | classmethod | staticmethod
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "aiodist":
            for name, member in vars(base).items():
                if not name.startswith("_") and isinstance(member, kinds):
                    yield name, member


def test_names_are_public_once_and_our_own() -> None:
    assert len(set(NAMES)) == len(NAMES)
    visible = {name for name, value in vars(aiodist).items() if not isinstance(value, ModuleType)}
    assert {name for name in visible if not name.startswith("_")} - {"annotations"} == set(NAMES)
    packages = {getattr(aiodist, name).__module__.partition(".")[0] for name in CLASSES + FUNCTIONS}
    assert packages == {"aiodist", "aiodist_kernels"}


@pytest.mark.parametrize("name", CLASSES + FUNCTIONS)
def test_public_name_and_its_members_are_documented(name: str) -> None:
    found = vars(aiodist)[name]
    assert found.__doc__
    assert not found.__doc__.startswith(f"{name}("), "a dataclass without a docstring gets its signature for one"
    for member, value in members(found) if isinstance(found, type) else ():
        doc = inspect.getdoc(getattr(found, member))
        assert doc, member
        # The API page takes text before a colon there for a type.
        typed = [*(doc.splitlines()[:1] if isinstance(value, property) else []), *re.findall(r"Returns:\n +(.*)", doc)]
        assert not any(": " in line for line in typed), member


def test_api_page_lists_every_name_once() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. auto\w+:: aiodist\.(\w+)$", page, flags=re.MULTILINE)
    assert sorted(listed) == NAMES


def test_init_names_everything_in_imports_and_literals() -> None:
    """Static tools read it without running it, lazily loaded names included."""
    tree = ast.parse((ROOT / "aiodist" / "__init__.py").read_text(encoding="utf-8"))
    for_types = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    imports = [node for node in (*tree.body, *for_types) if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    literals = {ast.unparse(node.targets[0]): ast.literal_eval(node.value) for node in assigned}
    assert set(literals["__all__"]) == set(NAMES) <= imported


# Imports, in a fresh process.

HEAVY = {"numba", "llvmlite", "trio", "uvloop", "rich", "sklearn", "scipy", "torch", "jax", "tensorflow", "ml_dtypes"}


def test_import_loads_nothing_heavy_and_does_not_warn(tmp_path: Path) -> None:
    program = "import aiodist, sys, threading; print(*sys.modules, threading.active_count())"
    *loaded, threads = run_python(["-W", "error", "-X", "dev", "-c", program], tmp_path).split()
    assert loaded[0] == "sys"
    assert {"aiodist", "numpy"} <= set(loaded)
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()
    assert threads == "1"


LATER = {
    "aiodist._core.analysis", "aiodist._core.render", "aiodist._collectives.device", "aiodist._gpu.steps",
    "aiodist._runtime.inspection", "aiodist._tools.trace.file", "aiodist._workers", "json", "pathlib",
}  # fmt: skip
FIRST_RUN = """
import asyncio, sys
import numpy as np
before = set(sys.modules)  # with those that .pth files of the environment import when Python starts
import aiodist

async def step():
    return await aiodist.get_replica_context().all_reduce("SUM", {"w": np.ones(3, np.float32)})

asyncio.run(aiodist.MirroredStrategy(["CPU:0", "CPU:1"]).run(step))
print(*set(sys.modules) - before)
"""


def test_modules_that_a_successful_run_does_not_need_are_not_loaded(tmp_path: Path) -> None:
    assert all(map(find_spec, LATER))
    assert set(run_python(["-c", FIRST_RUN], tmp_path).split()) & LATER == set()


LAZY_NAME = """
import pickle, aiodist
print("MultiWorkerMirroredStrategy" in dir(aiodist), hasattr(aiodist, "MultiWorkerStrategy"))
from aiodist import *
print(pickle.loads(pickle.dumps(MultiWorkerMirroredStrategy)) is aiodist.MultiWorkerMirroredStrategy)
"""


def test_a_name_that_is_loaded_later_is_seen_by_dir_star_imports_and_pickle(tmp_path: Path) -> None:
    assert run_python(["-c", LAZY_NAME], tmp_path).split() == ["True", "False", "True"]


# The wheel: both packages, their type markers, the licence and the command, and nothing else.

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
    paths = [(path, path.relative_to(package.parent)) for package in PACKAGES for path in package.rglob("*")]
    return {str(place) for path, place in paths if path.is_file() and path.suffix != ".pyc"}


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
