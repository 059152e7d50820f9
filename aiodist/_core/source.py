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


def _between(a: Location, b: Location) -> list[_Block]:
    """Return the branches that contain two lines in different arms, or only one of them, in the order of the source."""
    return [one for one in _blocks(a.file, *_BRANCHES) if a.line != b.line and _arm(one, a.line) != _arm(one, b.line)]


def line_at(location: Location) -> str:
    """Return the source line at a place, without its indentation; empty if it is not available."""
    return cut(linecache.getline(location.file, location.line).strip(), _LONGEST_LINE)


def branch_between(a: Location, b: Location) -> Location | None:
    """Return the branch that has two lines of one function in different arms; None if there is none.

    An `if` without an `else` counts if one line is in it, and the other after it or, in the same loop, before it. The
    answer is also None if the paths to both lines need not pass the branch, as when another branch or loop contains
    only one of the lines.
    """
    between = _between(a, b)
    both = [one for one in between if _arm(one, a.line) is not None and _arm(one, b.line) is not None]
    if both:
        is_branch = isinstance(both[0], (ast.If, ast.Match, ast.IfExp))
        return a._replace(line=both[0].lineno) if is_branch else None
    if len(between) != 1 or not isinstance(between[0], ast.If):
        return None
    branch = a._replace(line=between[0].lineno)
    outside = b if _arm(between[0], a.line) is not None else a
    if outside.line == max(a.line, b.line):
        return branch
    loops = _around(outside.file, outside.line, *_LOOPS)
    passed = loops and not any(isinstance(one, ast.Continue) for one in ast.walk(loops[-1]))
    return branch if passed else None


def handler_between(inside: Location, outside: Location) -> Location | None:
    """Return the `except` or `with suppress` by which an exception at one line leads to the other."""
    for one in _around(inside.file, inside.line, ast.Try, *_WITHS):
        if isinstance(one, ast.Try) and one.handlers and _arm(one, outside.line) != "body":
            return inside._replace(line=one.handlers[0].lineno)
        if "suppress" in _names_of(one) and not one.lineno <= outside.line <= (one.end_lineno or one.lineno):
            return inside._replace(line=one.lineno)
    return None


def is_optional(at: Location, other: Location) -> bool:
    """Return whether a line is in a branch (not a loop) that may or may not be taken on the way to the other line."""
    between = _between(at, other)
    if not between or at.line >= other.line:
        return False
    return not any(isinstance(one, _LOOPS) or _arm(one, other.line) or _leaves(one, at.line) for one in between)


def _leaves(branch: _Block, line: int) -> bool:
    """Return whether the arm that contains a line ends by leaving the branch, such as by `return`."""
    arm = getattr(branch, _arm(branch, line) or "", None)
    return isinstance(arm, list) and isinstance(arm[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def loop_left(inside: Location, outside: Location) -> Location | None:
    """Return the outermost loop that contains one line and not the other."""
    loops = (one for one in _between(inside, outside) if isinstance(one, _LOOPS))
    lines = (one.lineno for one in loops if _arm(one, inside.line) in ("body", "test"))
    return next((inside._replace(line=line) for line in lines), None)


def conditions_in(loop: Location) -> dict[str, list[Location]]:
    """Return a loop's `if` statements that end in `break`, and those that end in `continue`.

    Only those directly in the loop's body count: every round that reaches them evaluates them.
    """
    found: dict[str, list[Location]] = {}
    for block in _blocks(loop.file, *_LOOPS):
        for one in getattr(block, "body", ()) if block.lineno == loop.line else ():
            last = one.body[-1] if isinstance(one, ast.If) else None
            if isinstance(last, (ast.Break, ast.Continue)):
                found.setdefault(type(last).__name__.lower(), []).append(loop._replace(line=one.lineno))
            if isinstance(last, ast.Continue):
                break  # not every round reaches the conditions after it
    return found


def is_in_one_loop(at: Location, other: Location) -> bool:
    """Return whether the body of one loop contains both lines."""
    return any(one.lineno < at.line and _arm(one, other.line) == "body" for one in _around(at.file, at.line, *_LOOPS))


def is_in_loop(at: Location) -> bool:
    """Return whether a line is in the body of a loop, or in a comprehension."""
    return bool(_around(at.file, at.line, *_LOOPS, *_COMPREHENSIONS))


def condition_of(at: Location) -> Location | None:
    """Return the innermost `if` whose body contains a line."""
    lines = [one.lineno for one in _around(at.file, at.line, ast.If)]
    return at._replace(line=max(lines)) if lines else None


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
