"""The examples in README and docs give the output and the errors that the page shows.

Four kinds of fenced blocks are examples:

- `python` whose first line is a comment with a file name, `# train.py`: the block is written to that file.
- `diff`: a change to such a file, headed `--- train.py` and `+++ train.py`.
- `console`: a command, `$ python train.py`, run beside the document's files, and its output. A line `...` stands for
  any lines, and `...` in a line for any text.
- `python` without a file name: run in place, in a namespace that the document's blocks share; `>>>` makes it a doctest.
"""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from sybil import Document, Example, Sybil
from sybil.example import SybilFailure
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from sybil.region import Region

from tests.project.paths import ROOT, run_python

FILE_NAME = re.compile(r"# ([a-z_]+\.py)\n")
ANY_LINES, ANY_TEXT = re.escape("\n...\n"), re.escape("...")


class PythonParser(PythonCodeBlockParser):
    """Finds programs, which are written to files, and snippets, which run in place."""

    def __init__(self, folder: Path) -> None:
        super().__init__(doctest_optionflags=doctest.ELLIPSIS)
        self.folder = folder

    def __call__(self, document: Document) -> Iterable[Region]:
        for region in super().__call__(document):
            if FILE_NAME.match(str(region.parsed)):
                region.evaluator = partial(write_program, self.folder)
            yield region


def write_program(folder: Path, example: Example) -> None:
    name = example.parsed.partition("\n")[0].removeprefix("# ")
    (folder / name).write_text(example.parsed, encoding="utf-8")


def change_program(folder: Path, example: Example) -> None:
    """Replace the old lines of a diff by the new ones in the program that it names."""
    before, after, *lines = example.parsed.splitlines()
    assert before.removeprefix("--- ") == after.removeprefix("+++ ")
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
    program = folder / before.removeprefix("--- ")
    text = program.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{program.name} does not have these lines once:\n{old}"
    program.write_text(text.replace(old, new), encoding="utf-8")


def run_command(folder: Path, example: Example) -> str | None:
    """Run a command; return a message if its output is not as expected."""
    command, _, expected = example.parsed.partition("\n")
    dollar, python, *arguments = shlex.split(command)
    assert (dollar, python) == ("$", "python"), f"an example runs Python, not {command!r}"
    printed = run_python(arguments, folder)
    return None if matches(expected, printed) else f"expected:\n{expected}\nprinted:\n{printed}"


def matches(expected: str, printed: str) -> bool:
    """Compare two outputs, with `...` as a wildcard."""
    pattern = re.escape(f"\n{expected.strip()}\n")
    while ANY_LINES in pattern:
        pattern = pattern.replace(ANY_LINES, r"\n(?:.*\n)*?")
    pattern = pattern.replace(ANY_TEXT, "[^\n]*")
    return re.fullmatch(pattern, "\n" + re.sub(r"[ \t]+$", "", printed.strip(), flags=re.MULTILINE) + "\n") is not None


def examples_of(document: Path, folder: Path) -> list[Example]:
    """Find the examples of a Markdown file, whose own files are in `folder`."""
    diff = CodeBlockParser("diff", partial(change_program, folder))
    console = CodeBlockParser("console", partial(run_command, folder))
    return list(Sybil([PythonParser(folder), diff, console]).parse(document))


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
