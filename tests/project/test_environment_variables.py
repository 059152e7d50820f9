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

THE_ONE_FILE = ROOT / "aiodist" / "_arrays" / "environment.py"
OF_RANKS = ROOT / "aiodist" / "_torch"
AGENT = ROOT / "aiodist" / "_tools" / "launch" / "agent.py"
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
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files()
        if path not in (THE_ONE_FILE, AGENT) and path.parent != OF_RANKS
        for line in reads(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "\nfrom os import environ",
        "\nfrom os import path, getenv as g",
    ],
)
def test_planted_read_is_found(source: str) -> None:
    assert list(reads(source)) == [2]


def test_other_uses_of_os_are_fine() -> None:
    assert list(reads("import os\nos.path.join('a', 'b')\nos.cpu_count()")) == []
