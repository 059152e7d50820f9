"""The examples in README and docs do what the page says: the output that it shows, the error that it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sybil.example import SybilFailure

from tests.project.examples import examples_of, matches
from tests.project.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_do_what_the_page_says(document: Path, tmp_path: Path) -> None:
    for example in examples_of(document, tmp_path):
        example.evaluate()


def test_wrong_output_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\n# add.py\nprint(1 + 1)\n```\n\n```console\n$ python add.py\n3\n```\n")
    program, command = examples_of(page, tmp_path)
    program.evaluate()
    with pytest.raises(SybilFailure, match="printed:\n2"):
        command.evaluate()


def test_diff_changes_the_program(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# add.py\na = 1\nb = 2\nprint(a + b)\n```\n"
        "\n```diff\n--- add.py\n+++ add.py\n-b = 2\n+b = 3\n print(a + b)\n```\n"
        "\n```console\n$ python add.py\n4\n```\n"
    )
    for example in examples_of(page, tmp_path):
        example.evaluate()


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\nb", "a\nb\n", True),
        ("a\n...\nd", "a\nb\nc\nd\n", True),
        ("a\n...\nd", "a\nd\n", True),
        ("a ... c", "a b c", True),
        ("a ... c", "a b\nc", False),
        ("a.b", "axb", False),
    ],
)
def test_dots_stand_for_anything(expected: str, printed: str, same: bool) -> None:
    assert matches(expected, printed) is same
