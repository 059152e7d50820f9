"""The examples in README and docs do what the page says: the output that it shows, the error that it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sybil.example import SybilFailure

from tests.project.examples import examples_of
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
    page.write_text("```python\n# add.py\nprint(1 + 1)\n```\n\n```console\n$ python add.py\n...\n3\n```\n")
    program, command = examples_of(page, tmp_path)
    program.evaluate()
    with pytest.raises(SybilFailure, match="printed:\n2"):
        command.evaluate()
