"""Every public name is documented, typed and in the API page, and static tools see the names that the runtime has."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import aiodist
from tests.project.paths import ROOT, environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMES = sorted(aiodist.__all__)
CLASSES = [name for name in NAMES if isinstance(getattr(aiodist, name), type)]
FUNCTIONS = [name for name in NAMES if isinstance(getattr(aiodist, name), FunctionType)]


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield a class's public methods and properties, also those inherited from a class of ours."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "aiodist":
            for name, member in vars(base).items():
                if not name.startswith("_") and isinstance(
                    member, FunctionType | property | classmethod | staticmethod
                ):
                    yield name, member


def functions_of(member: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions behind a method or property."""
    match member:
        case property():
            yield from (function for function in (member.fget, member.fset) if function)
        case classmethod() | staticmethod():
            yield member.__func__
        case FunctionType():
            yield member


def untyped_parts(function: Callable[..., Any], *, is_method: bool) -> Iterator[str]:
    """Name the parameters, and `return`, that have no annotation."""
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters[1:] if is_method else parameters:
        if parameter.annotation is parameter.empty:
            yield parameter.name
    if "return" not in function.__annotations__:
        yield "return"


def test_every_name_is_there_once() -> None:
    assert len(set(aiodist.__all__)) == len(aiodist.__all__)
    assert [name for name in NAMES if not hasattr(aiodist, name)] == []


def test_no_other_name_is_public() -> None:
    visible = {name for name, value in vars(aiodist).items() if not isinstance(value, ModuleType)}
    assert {name for name in visible if not name.startswith("_")} - {"annotations"} == set(NAMES)


def test_names_are_our_own() -> None:
    modules = {name: getattr(aiodist, name).__module__.partition(".")[0] for name in CLASSES + FUNCTIONS}
    assert {name: module for name, module in modules.items() if module not in {"aiodist", "aiodist_kernels"}} == {}


@pytest.mark.parametrize("name", CLASSES + FUNCTIONS)
def test_public_name_is_documented(name: str) -> None:
    text = vars(aiodist)[name].__doc__
    assert text
    assert not text.startswith(f"{name}("), "a dataclass without a docstring gets its signature for one"


@pytest.mark.parametrize("name", CLASSES)
def test_public_members_are_documented(name: str) -> None:
    cls = getattr(aiodist, name)
    assert [member for member, _ in members(cls) if not inspect.getdoc(getattr(cls, member))] == []


@pytest.mark.parametrize("name", CLASSES)
def test_docstrings_are_not_taken_for_types(name: str) -> None:
    """What stands before a colon in a property's first line, or in that of Returns, is a type to the API page."""
    cls = getattr(aiodist, name)
    first_lines = {
        member: [*(doc.splitlines()[:1] if isinstance(value, property) else []), *re.findall(r"Returns:\n +(.*)", doc)]
        for member, value in members(cls)
        if (doc := inspect.getdoc(getattr(cls, member)))
    }
    assert {member: lines for member, lines in first_lines.items() if any(": " in line for line in lines)} == {}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_function_is_typed(name: str) -> None:
    assert list(untyped_parts(getattr(aiodist, name), is_method=False)) == []


@pytest.mark.parametrize("name", CLASSES)
def test_public_members_are_typed(name: str) -> None:
    untyped = [
        f"{member}: {part}"
        for member, value in members(getattr(aiodist, name))
        for function in functions_of(value)
        for part in untyped_parts(function, is_method=not isinstance(value, staticmethod))
    ]
    assert untyped == []


def test_api_page_lists_every_name_once() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. auto\w+:: aiodist\.(\w+)$", page, flags=re.MULTILINE)
    assert sorted(listed) == NAMES


def test_init_is_a_list_that_any_tool_can_read() -> None:
    """Imports and literals: nothing that a parser of Python would have to run; also what is loaded later."""
    tree = ast.parse((ROOT / "aiodist" / "__init__.py").read_text(encoding="utf-8"))
    for_types = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    imported = [
        alias.asname or alias.name
        for node in (*tree.body, *for_types)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    literals = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
    }
    assert set(literals["__all__"]) == set(NAMES)
    assert set(NAMES) <= set(imported)


def test_type_checkers_see_the_same_names_and_know_all_types() -> None:
    command = [sys.executable, "-m", "pyright", "--verifytypes", "aiodist", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    found = json.loads(done.stdout)["typeCompleteness"]
    symbols = found["symbols"]
    exported = {symbol["name"] for symbol in symbols if symbol["isExported"]}
    assert {name for name in exported if name.count(".") == 1} == {f"aiodist.{name}" for name in NAMES}
    unknown = {symbol["name"]: symbol["diagnostics"] for symbol in symbols if not symbol["isTypeKnown"]}
    assert (unknown, found["completenessScore"]) == ({}, 1)
