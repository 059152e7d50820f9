"""No file grows beyond what a reader can hold."""

from __future__ import annotations

from tests.project.paths import ROOT, python_files

LIMIT = 400


def test_no_file_is_over_the_limit() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > LIMIT} == {}
