"""Branches in a program's source; tests/faults covers the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiodist._core import source
from aiodist._core.terms import Location

PROGRAM = """\
async def program(ctx, odd, scope):
    if odd:
        await ctx.barrier()
    await ctx.first()
    for _ in range(3):
        await ctx.second()
        if scope:
            await ctx.third()
            continue
        await ctx.fourth()
    while await ctx.fifth():
        pass
    match odd:
        case 1:
            await ctx.sixth()
        case _:
            await ctx.seventh()
    try:
        await ctx.eighth()
    except ValueError:
        await ctx.ninth()
    async with asyncio.timeout(0.02):
        with anyio.move_on_after(5), open(scope):
            await ctx.tenth()
        await ctx.eleventh()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


def line(text: str) -> int:
    """Return the number of the program's one line with that text."""
    (found,) = (number for number, one in enumerate(PROGRAM.splitlines(), 1) if text in one)
    return found


@pytest.mark.parametrize(
    ("one", "other", "branch"),
    [
        ("barrier", "first", "if odd"),
        ("second", "fifth", None),  # a loop is reported as one
        ("third", "fourth", "if scope"),
        ("sixth", "seventh", "match odd"),
        ("eighth", "ninth", None),  # a `try` is no branch
        ("third", "second", None),  # the loop has a `continue`, so the way between them is not known
        ("tenth", "eleventh", None),
    ],
)
def test_branch_between_two_lines(file: str, one: str, other: str, branch: str | None) -> None:
    a, b = (Location(file, line(f"{name}("), "program") for name in (one, other))
    expected = None if branch is None else a._replace(line=line(branch))
    assert source.branch_between(a, b) == source.branch_between(b, a) == expected


@pytest.mark.parametrize("text", [None, "def broken(:\n", "\x00"])
def test_unreadable_source_gives_no_answer(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert source.branch_between(Location(str(path), 1, "program"), Location(str(path), 2, "program")) is None
    assert not source.time_limit_around(str(path), 1)
