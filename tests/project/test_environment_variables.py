"""Environment variables are read in one file, so that one place tells which there are.

The agent of `aiodist run`, a script that starts without the package, is told by its arguments which one to read. Ranks
of a torch.distributed script each get an environment of their own in one process; that code writes to `os.environ`.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.project.paths import ROOT, python_files

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOWED = ("aiodist/_arrays/environment.py", "aiodist/_tools/launch/agent.py", "aiodist/_torch/")
READERS = {"environ", "environb", "getenv", "getenvb"}


def reads(source: str) -> Iterator[int]:
    """Yield the lines that reach for the environment through `os`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attr, lineno=line) if attr in READERS:
                yield line
            case ast.ImportFrom(module="os", names=names, lineno=line) if READERS & {alias.name for alias in names}:
                yield line


def test_only_one_file_reads_the_environment() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in python_files()}
    found = {name: [*reads(path.read_text(encoding="utf-8"))] for name, path in files.items()}
    assert {name: lines for name, lines in found.items() if lines and not name.startswith(ALLOWED)} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nos.environ['A']\nos.getenv('A')", [2, 3]),
        ("from os import environ\nfrom os import path, getenv as g", [1, 2]),
        ("import os\nos.path.join('a', 'b')\nos.cpu_count()", []),
    ],
)
def test_planted_reads_are_found(source: str, lines: list[int]) -> None:
    assert list(reads(source)) == lines
