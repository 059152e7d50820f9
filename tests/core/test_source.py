"""What is read from a program's source: branches, loops, ways that pass by a line, and time limits."""

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
        if odd:
            continue_with = 1
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
    with lock:
        await ctx.twelfth()
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
        ("third", "fourth", "if odd"),
        ("sixth", "seventh", "match odd"),
        ("eighth", "ninth", None),  # nobody branches at the `try`
        ("third", "second", None),  # whether it went on is not known: the loop has a `continue`
        ("tenth", "eleventh", None),
    ],
)
def test_the_branch_between_two_lines(file: str, one: str, other: str, branch: str | None) -> None:
    expected = None
    if branch is not None:
        before = PROGRAM.splitlines()[: line(f"{one}(") - 1]
        expected = max(number for number, text in enumerate(before, 1) if text.strip().startswith(branch))
    assert source.branch_between(file, line(f"{one}("), line(f"{other}(")) == expected
    assert source.branch_between(file, line(f"{other}("), line(f"{one}(")) == expected


@pytest.mark.parametrize(
    ("one", "other", "optional"),
    [
        ("barrier", "first", True),  # in a branch, and then there
        ("first", "barrier", False),  # behind it
        ("first", "second", False),  # in no branch
        ("third", "fourth", False),  # its branch ends by going elsewhere
        ("second", "fifth", False),  # a loop is reported as one
        ("sixth", "seventh", False),  # one or the other
    ],
)
def test_a_line_that_is_optional_on_the_way(file: str, one: str, other: str, *, optional: bool) -> None:
    assert source.is_optional(file, line(f"{one}("), line(f"{other}(")) is optional


def test_the_loop_that_a_line_has_left(file: str) -> None:
    assert source.loop_left(file, line("second("), line("eighth(")) == line("for _")
    assert source.loop_left(file, line("fifth("), line("eighth(")) == line("while")
    assert source.loop_left(file, line("second("), line("fourth(")) is None
    assert source.loop_left(file, line("eighth("), line("first(")) is None


def test_the_conditions_on_which_a_loop_or_a_round_of_it_is_left_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "loops.py"
    path.write_text(
        "while True:\n"  # 1
        "    if odd:\n"  # 2
        "        break\n"
        "    for _ in things:\n"  # 4
        "        if even:\n"  # 5
        "            continue\n"
        "        if behind:\n"
        "            break\n"
        "    if other:\n"  # 9
        "        log()\n"
        "        break\n"
    )
    assert source.conditions_in(str(path), 1) == {"break": [2, 9]}
    assert source.conditions_in(str(path), 4) == {"continue": [5]}
    assert source.conditions_in(str(path), 2) == {}
    assert source.condition_of(str(path), 3) == 2
    assert source.is_in_one_loop(str(path), 4, 9)
    assert not source.is_in_one_loop(str(path), 1, 9)


def test_the_innermost_time_limit_around_a_line(file: str) -> None:
    inside = f"`%s` at {file}:%s"
    assert source.time_limit_around(file, line("tenth(")) == inside % ("anyio.move_on_after(5)", line("with anyio"))
    limit = inside % ("asyncio.timeout(0.02)", line("asyncio.timeout"))
    assert source.time_limit_around(file, line("eleventh(")) == limit
    assert not source.time_limit_around(file, line("twelfth("))
    assert not source.time_limit_around(file, line("first("))


def test_a_source_line_is_shown_without_indentation_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text(f"if True:\n    x = {'1' * 200}\n", encoding="utf-8")
    shown = source.line_at(Location(str(path), 2, "f"))
    assert shown.startswith("x = 111")
    assert shown.endswith("1…")
    assert len(shown) == 90


@pytest.mark.parametrize("text", [None, "def broken(:\n", "\x00"])
def test_source_that_is_not_to_be_had_says_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert source.branch_between(str(path), 1, 2) is None
    assert source.loop_left(str(path), 1, 2) is None
    assert not source.time_limit_around(str(path), 1)
