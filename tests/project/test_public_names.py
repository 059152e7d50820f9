"""Every public name is documented and on the API page, and static tools see the same names as the runtime."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

import aiodist
from tests.project.paths import ROOT

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
