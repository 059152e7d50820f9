"""Packages import only from lower floors and modules in their package's order; every planted violation is found.

A file imports only from lower floors or from its own package. Imports inside functions and for types alone count, too.
The docstring of a package lists its modules in an order in which each imports only from those above it, so that there
are no cycles.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.project.paths import ROOT

# The longest prefix of a module's name decides. Tools and demos use `aiodist`, the public names, as any program.
FLOORS: Mapping[str, int] = {
    "aiodist_kernels": 0,
    "aiodist._core": 1,
    "aiodist._version": 1,
    "aiodist._arrays": 2,
    "aiodist._gpu": 3,
    "aiodist._collectives": 4,
    "aiodist._runtime": 5,
    "aiodist._workers": 6,
    "aiodist._data": 7,
    "aiodist._strategy": 8,
    "aiodist._checking": 9,
    "aiodist._torch": 10,
    "aiodist.testing": 10,
    "aiodist._demos": 11,
    "aiodist._tools": 11,
    "aiodist": 11,
    "aiodist.__main__": 12,
}
SHARED_FLOOR = 11
"""The floor whose packages import from each other."""
MAY_IMPORT = {0: {"numpy", "llvmlite", "numba", "numba_cuda", *sys.stdlib_module_names}, 1: sys.stdlib_module_names}
"""By floor, what may be imported from outside of this project; anything on other floors."""


class Import(NamedTuple):
    target: str
    line: int


class Module(NamedTuple):
    floor: int | None
    imports: list[Import]
    order: list[str]  # of a package's modules, as its docstring lists them


def floor_of(name: str) -> int | None:
    """Return the floor of a module, None if it has none."""
    if name in FLOORS:
        return FLOORS[name]
    package, _, rest = name.rpartition(".")
    return floor_of(package) if rest and package != "aiodist" else None


def read_tree(root: Path) -> dict[str, Module]:
    files = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for source in (root, root / "kernels")
        for package in ("aiodist", "aiodist_kernels")
        for path in sorted((source / package).rglob("*.py"))
    }
    return {name: read(name, path, files) for name, path in files.items()}


def read(name: str, path: Path, files: Collection[str]) -> Module:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    imports = [
        Import(target, node.lineno)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        for node in ast.walk(tree)
        for target in targets(node, files)
    ]
    return Module(floor_of(name), imports, re.findall(r"^- `(\w+)`", ast.get_docstring(tree) or "", re.MULTILINE))


def targets(node: ast.AST, files: Collection[str]) -> Iterator[str]:
    """Yield the modules that a statement imports; ruff permits no relative imports."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(base), names=names):
            yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base for alias in names)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]):
            if name == "import_module":
                yield module


def package_of(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("aiodist.") else name.partition(".")[0]


def violations(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield a line for every import from a higher or equal floor, from outside, or against a package's order."""
    for name, module in modules.items():
        if module.floor is None:
            yield f"{name} stands on no floor"
            continue
        for target, line in module.imports:
            other, where = floor_of(target), f"{name}:{line} (floor {module.floor}) imports {target}"
            aside = other == module.floor != SHARED_FLOOR and package_of(name) != package_of(target)
            if other is not None and (other > module.floor or aside):
                yield f"{where} (floor {other})"
            allowed = MAY_IMPORT.get(module.floor)
            if other is None and allowed and target.partition(".")[0] not in allowed:
                yield f"{where} from outside"
    for package, listed in modules.items():
        if listed.order:
            yield from disorder(package, listed.order, modules)


def disorder(package: str, order: list[str], modules: Mapping[str, Module]) -> Iterator[str]:
    yield from (f"{package} lists {own}, which is not there" for own in order if f"{package}.{own}" not in modules)
    for name, module in modules.items():
        own = inner(package, name)
        if own and own not in order:
            yield f"{package} does not list {own}"
        elif own:
            for target, line in module.imports:
                if inner(package, target) in order[order.index(own) + 1 :]:
                    yield f"{name}:{line} imports {target}, which {package} lists below it"


def inner(package: str, name: str) -> str:
    """Return the first part of a module's name within a package, empty if it is not in it."""
    prefix, _, rest = name.partition(f"{package}.")
    return "" if prefix else rest.partition(".")[0]


def test_floors_hold() -> None:
    modules = read_tree(ROOT)
    assert {module.floor for module in modules.values()} >= set(range(13))
    assert list(violations(modules)) == []


def test_design_page_and_docstrings_have_these_floors_and_modules() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (`aiodist.*?) \|", page, re.MULTILINE)
    on_page = {name: int(floor) for floor, names in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert on_page == {name: floor for name, floor in FLOORS.items() if name in on_page}
    assert FLOORS.keys() - on_page.keys() == {"aiodist._version", "aiodist.__main__"}
    for name in re.findall(r"`(_\w+/\w+)(?:\.py)?`", page):
        assert (ROOT / "aiodist" / f"{name}.py").is_file(), name
    for name, floor in on_page.items():
        package = ROOT / ("kernels" if floor == 0 else "") / name.replace(".", "/") / "__init__.py"
        said = re.search(r"\(floor (\d+)\)", ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or "")
        assert said is None or int(said[1]) == floor, name


SOUND = {
    "kernels/aiodist_kernels/sums.py": "import functools\nimport numpy as np",
    "aiodist/__init__.py": "from aiodist._strategy.mirrored import Mirror as Mirror",
    "aiodist/_arrays/__init__.py": '"""- `words`: one."""',
    "aiodist/_arrays/words.py": "import optree",
    "aiodist/_collectives/meeting.py": "import aiodist_kernels\nfrom aiodist._arrays import words",
    "aiodist/_strategy/mirrored.py": "def later():\n    from aiodist._collectives.meeting import words",
    "aiodist/_tools/cli.py": "import aiodist\nfrom aiodist.testing.plugin import check",
    "aiodist/testing/plugin.py": "",
}
WORDS, LISTING = "aiodist/_arrays/words.py", "aiodist/_arrays/__init__.py"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ""),
        ({WORDS: "def f():\n    import aiodist._strategy"}, "words:2 (floor 2) imports aiodist._strategy (floor 8)"),
        ({WORDS: "from aiodist import Mirror"}, "(floor 2) imports aiodist (floor 11)"),
        ({WORDS: "import importlib\nimportlib.import_module('aiodist._demos')"}, "words:2"),
        ({WORDS: "if TYPE_CHECKING:\n    from aiodist._runtime import context"}, "words:2 (floor 2)"),
        ({"aiodist/strangers.py": ""}, "aiodist.strangers stands on no floor"),
        ({"kernels/aiodist_kernels/sums.py": "def f():\n    import torch.cuda"}, "imports torch.cuda from outside"),
        ({"aiodist/_torch/ranks.py": "import aiodist.testing.plugin"}, "imports aiodist.testing.plugin (floor 10)"),
        ({LISTING: '"""- `texts`: two.\n- `words`: one."""'}, "aiodist._arrays lists texts, which is not there"),
        ({LISTING: '"""Nothing.\n- `words`: one."""', "aiodist/_arrays/texts.py": ""}, "_arrays does not list texts"),
        (
            {
                LISTING: '"""- `texts`: two.\n- `words`: one."""',
                "aiodist/_arrays/texts.py": "if TYPE_CHECKING:\n    from aiodist._arrays import words",
            },
            "texts:2 imports aiodist._arrays.words, which aiodist._arrays lists below it",
        ),
    ],
)  # fmt: skip
def test_planted_violation_is_found(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name, text in (SOUND | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = list(violations(read_tree(tmp_path)))
    assert len(found) == bool(expected)
    assert expected in "".join(found)
