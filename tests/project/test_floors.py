"""The floors hold, and the reader that says so can be trusted: every planted violation is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.project.floors import floor_of, read_tree, violations
from tests.project.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SOUND = {
    "kernels/aiodist_kernels/__init__.py": "from aiodist_kernels.sums import fold",
    "kernels/aiodist_kernels/sums.py": "import functools\nimport numpy as np\nfold = functools.reduce",
    "aiodist/__init__.py": "from aiodist._strategy.mirrored import Mirror as Mirror",
    "aiodist/__main__.py": "from aiodist._tools.cli import main",
    "aiodist/_arrays/__init__.py": "",
    "aiodist/_arrays/words.py": "import optree",
    "aiodist/_collectives/__init__.py": "",
    "aiodist/_collectives/meeting.py": "import aiodist_kernels\nfrom .._arrays import words\nfrom . import names",
    "aiodist/_collectives/names.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import meeting",
    "aiodist/_strategy/mirrored.py": "def later():\n    from aiodist._collectives.meeting import words",
    "aiodist/_tools/cli.py": "from aiodist._demos import text\nfrom aiodist.testing_helpers import check",
    "aiodist/_demos/text.py": "import aiodist\nfrom aiodist._strategy import mirrored",
    "aiodist/testing_helpers.py": "",
}


def plant(root: Path, files: dict[str, str]) -> list[str]:
    """Write a small checkout, and judge it."""
    for name, text in (SOUND | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return violations(read_tree(root))


def test_floors_hold() -> None:
    modules = read_tree(ROOT)
    assert {floor_of(name) for name in modules} >= {0, 1, 2, 4, 5, 8, 12, 13}
    assert violations(modules) == []


def test_sound_tree_has_no_violation(tmp_path: Path) -> None:
    assert plant(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("aiodist/_arrays/words.py", "import aiodist._strategy.mirrored", "(floor 2) imports aiodist._strategy"),
        ("aiodist/_arrays/words.py", "from aiodist import Mirror", "(floor 2) imports aiodist (floor 12)"),
        ("aiodist/_arrays/words.py", "from aiodist._collectives import names", "imports aiodist._collectives.names"),
        ("aiodist/_arrays/words.py", "from .._collectives import names", "imports aiodist._collectives.names"),
        ("aiodist/_arrays/__init__.py", "from .._collectives.names import x", "imports aiodist._collectives.names"),
        ("aiodist/_arrays/words.py", "def f():\n    from .._runtime import context", "words:2 (floor 2)"),
        ("aiodist/_arrays/words.py", "import importlib\nimportlib.import_module('aiodist._demos')", "words:2"),
        (
            "aiodist/_arrays/words.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from aiodist._runtime import context",
            "words:3 (floor 2)",
        ),
        ("aiodist/_demos/text.py", "import aiodist.__main__", "(floor 12) imports aiodist.__main__ (floor 13)"),
        ("aiodist/strangers.py", "", "aiodist.strangers stands on no floor"),
        ("kernels/aiodist_kernels/sums.py", "import aiodist._arrays.words", "(floor 0) imports aiodist._arr"),
        ("kernels/aiodist_kernels/sums.py", "def f():\n    import torch.cuda", "sums:2 (floor 0) imports torch.cuda"),
        ("aiodist/_core/ledger.py", "import numpy", "(floor 1) imports numpy from outside"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, text: str, expected: str) -> None:
    found = plant(tmp_path, {file: text})
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    "text", ["from aiodist._collectives import meeting", "def f():\n    from aiodist._collectives import meeting"]
)
def test_import_circle_inside_a_floor_is_found(tmp_path: Path, text: str) -> None:
    (found,) = plant(tmp_path, {"aiodist/_collectives/names.py": text})
    assert found.startswith("floor 4: import circle")
    assert "aiodist._collectives.names -> aiodist._collectives.meeting" in found


def test_public_names_cannot_lead_to_a_program_that_uses_them(tmp_path: Path) -> None:
    (found,) = plant(tmp_path, {"aiodist/__init__.py": "from aiodist._tools.cli import main as main"})
    assert found.startswith("floor 12: import circle")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- `words`: one.\n- `texts`: two.", []),
        (
            "- `texts`: two.\n- `words`: one.",
            ["texts:3 imports aiodist._arrays.words, which aiodist._arrays lists"],
        ),
        ("- `texts`: two.", ["aiodist._arrays does not list words"]),
    ],
)
def test_package_lists_its_modules_in_order(tmp_path: Path, text: str, expected: list[str]) -> None:
    texts = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import words"
    files = {"aiodist/_arrays/__init__.py": f'"""What a leaf is.\n\n{text}\n"""', "aiodist/_arrays/texts.py": texts}
    for found, part in zip(plant(tmp_path, files), expected, strict=True):
        assert part in found
