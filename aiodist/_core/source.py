"""The program's source around calls: lines to show, the branch between two lines, the loop around only one of them.

The source is read when a report is written. If it is not available (a notebook cell that is gone, a string that was
executed), the answers are None, and the report says less.
"""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from typing import Any, TypeAlias

from aiodist._core.terms import Location
from aiodist._core.text import cut, place

_LOOPS = (ast.While, ast.For, ast.AsyncFor)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BRANCHES = (ast.If, *_LOOPS, ast.Try, ast.Match, ast.IfExp)
_WITHS = (ast.With, ast.AsyncWith)
_TIME_LIMITS = {"timeout", "timeout_at", "move_on_after", "move_on_at", "fail_after", "fail_at", "CancelScope"}
_LONGEST_LINE = 90

_Block: TypeAlias = Any
"""A branch, a loop, a `with`, a comprehension or a call."""


@lru_cache(maxsize=16)
def _parsed(text: str) -> tuple[_Block, ...]:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, SystemError):  # CPython 3.11 raises the last when two threads parse at a time
        nodes = []
    blocks = [node for node in nodes if isinstance(node, (*_BRANCHES, *_WITHS, *_COMPREHENSIONS, ast.Call))]
    return tuple(sorted(blocks, key=lambda node: (node.lineno, node.col_offset)))


def _arm(node: _Block, line: int) -> str | None:
    """Return the arm that contains a line: ``body``, ``orelse``, a handler or a case; None if none does."""
    if not node.lineno <= line <= node.end_lineno:
        return None
    if isinstance(node, (ast.Call, *_COMPREHENSIONS)):
        return "body"
    for name, value in ast.iter_fields(node):
        if name in ("handlers", "cases"):
            arms = [(f"{name}{i}", getattr(one, "pattern", one), one.body[-1]) for i, one in enumerate(value)]
        elif value and (name in ("body", "orelse", "finalbody") or (name == "test" and isinstance(node, ast.While))):
            arms = [(name, value[0], value[-1])] if isinstance(value, list) else [(name, value, value)]
        else:
            continue
        for arm, first, last in arms:
            if first.lineno <= line <= last.end_lineno:
                return arm
    return None


def _blocks(file: str, *kinds: type[ast.AST]) -> list[_Block]:
    """Return a file's blocks of these kinds in the order of the source."""
    return [node for node in _parsed("".join(linecache.getlines(file))) if isinstance(node, kinds)]


def _around(file: str, line: int, *kinds: type[ast.AST]) -> list[_Block]:
    """Return the blocks of these kinds whose body contains a line, outermost first."""
    return [block for block in _blocks(file, *kinds) if _arm(block, line) == "body"]


def _between(file: str, line: int, other: int) -> list[_Block]:
    """Return the branches that contain two lines in different arms, or only one of them, in the order of the source."""
    return [one for one in _blocks(file, *_BRANCHES) if line != other and _arm(one, line) != _arm(one, other)]


def line_at(location: Location) -> str:
    """Return the source line at a place, without its indentation; empty if it is not available."""
    return cut(linecache.getline(location.file, location.line).strip(), _LONGEST_LINE)


def branch_between(file: str, line: int, other: int) -> int | None:
    """Return the line of the branch that has two lines of one function in different arms; None if there is none.

    An `if` without an `else` counts if one line is in it, and the other after it or, in the same loop, before it. The
    answer is also None if the paths to both lines need not pass the branch, as when another branch or loop contains
    only one of the lines.
    """
    between = _between(file, line, other)
    both = [one for one in between if _arm(one, line) is not None and _arm(one, other) is not None]
    if both:
        return both[0].lineno if isinstance(both[0], (ast.If, ast.Match, ast.IfExp)) else None
    if len(between) != 1 or not isinstance(between[0], ast.If):
        return None
    outside = other if _arm(between[0], line) is not None else line
    if outside == max(line, other):
        return between[0].lineno
    loops = _around(file, outside, *_LOOPS)
    passed = loops and not any(isinstance(one, ast.Continue) for one in ast.walk(loops[-1]))
    return between[0].lineno if passed else None


def catches(file: str, inside: int, outside: int) -> int | None:
    """Return the line of an `except` or `with suppress` by which an exception at one line leads to the other."""
    for one in _around(file, inside, ast.Try, *_WITHS):
        if isinstance(one, ast.Try) and one.handlers and _arm(one, outside) != "body":
            return one.handlers[0].lineno
        if "suppress" in _names_of(one) and not one.lineno <= outside <= (one.end_lineno or one.lineno):
            return int(one.lineno)
    return None


def is_optional(file: str, line: int, other: int) -> bool:
    """Return whether ``line`` is in a branch (not a loop) that may or may not be taken on the way to ``other``."""
    between = _between(file, line, other)
    separate = (isinstance(one, _LOOPS) or _arm(one, other) is not None or _leaves(one, line) for one in between)
    return bool(between) and line < other and not any(separate)


def _leaves(branch: _Block, line: int) -> bool:
    """Return whether the arm that contains a line ends by leaving the branch, such as by `return`."""
    arm = getattr(branch, _arm(branch, line) or "", None)
    return isinstance(arm, list) and isinstance(arm[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def loop_left(file: str, inside: int, outside: int) -> int | None:
    """Return the line of the outermost loop that contains one line and not the other."""
    loops = (one for one in _between(file, inside, outside) if isinstance(one, _LOOPS))
    return next((one.lineno for one in loops if _arm(one, inside) in ("body", "test")), None)


def conditions_in(file: str, loop: int) -> dict[str, list[int]]:
    """Return the lines of a loop's `if` statements that end in `break`, and of those that end in `continue`.

    Only those directly in the loop's body count: every round that reaches them evaluates them.
    """
    found: dict[str, list[int]] = {}
    for block in _blocks(file, *_LOOPS):
        for one in getattr(block, "body", ()) if block.lineno == loop else ():
            last = one.body[-1] if isinstance(one, ast.If) else None
            if isinstance(last, (ast.Break, ast.Continue)):
                found.setdefault(type(last).__name__.lower(), []).append(one.lineno)
            if isinstance(last, ast.Continue):
                break  # not every round reaches the conditions after it
    return found


def is_in_one_loop(file: str, line: int, other: int) -> bool:
    """Return whether the body of one loop contains both lines."""
    return any(one.lineno < line and _arm(one, other) == "body" for one in _around(file, line, *_LOOPS))


def is_in_loop(file: str, line: int) -> bool:
    """Return whether a line is in the body of a loop, or in a comprehension."""
    return bool(_around(file, line, *_LOOPS, *_COMPREHENSIONS))


def condition_of(file: str, line: int) -> int | None:
    """Return the line of the innermost `if` whose body contains a line."""
    return max((one.lineno for one in _around(file, line, ast.If)), default=None)


def time_limit_around(file: str, line: int) -> str:
    """Return the innermost timeout, cancel scope or `wait_for` around a line, and its place; empty if there is none."""
    for one in reversed(_around(file, line, ast.Call, *_WITHS)):
        names = _names_of(one)
        for name, code in names.items():
            if name in (_TIME_LIMITS if isinstance(one, _WITHS) else {"wait_for"}):
                return f"`{code}` at {place(Location(file, one.lineno, ''))}"
    return ""


def _names_of(node: _Block) -> dict[str, str]:
    """Return the names of the functions that a `with` statement or a call calls, with the calls' code."""
    calls = [item.context_expr for item in node.items] if isinstance(node, _WITHS) else [node]
    functions = ((getattr(call, "func", None), call) for call in calls)
    return {str(getattr(f, "attr", getattr(f, "id", ""))): ast.unparse(call) for f, call in functions}
