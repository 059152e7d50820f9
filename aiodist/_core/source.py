"""The program's source around calls: lines to show, the branch between two lines, the loop that one has left.

Read when a report is written. Where the source is not to be had (a notebook's cell that is gone, a string that was
executed) the answers are None, and a report says less.
"""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from aiodist._core.report import Location
from aiodist._core.text import place

_LOOPS = (ast.While, ast.For, ast.AsyncFor)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BRANCHES = (ast.If, *_LOOPS, ast.Try, ast.Match, ast.IfExp)
_TIME_LIMITS = {"timeout", "timeout_at", "move_on_after", "move_on_at", "fail_after", "fail_at", "CancelScope"}
_LONGEST_LINE = 90

_With: TypeAlias = ast.With | ast.AsyncWith


class _Branch(NamedTuple):
    """A branch: its statement, its last line, and the first and last line of each arm."""

    node: ast.stmt | ast.expr
    end: int
    arms: tuple[tuple[str, int, int], ...]

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def is_loop(self) -> bool:
        return isinstance(self.node, _LOOPS)

    def arm(self, line: int) -> str | None:
        """Return in which arm a line stands: ``body``, ``orelse``, a handler or a case; None outside."""
        return next((name for name, first, last in self.arms if first <= line <= last), None)


class _Source(NamedTuple):
    """What is looked for in a file: its branches by their places, comprehensions, `with`, and calls of `wait_for`."""

    branches: tuple[_Branch, ...]
    comprehensions: tuple[ast.expr, ...]
    withs: tuple[_With, ...]
    waits: tuple[ast.Call, ...]


def _source_of(file: str) -> _Source:
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=16)
def _parsed(text: str) -> _Source:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, SystemError):  # the last: CPython 3.11 counts what two threads parse together
        nodes = []
    branches = [
        _Branch(node, node.end_lineno or node.lineno, _arms(node)) for node in nodes if isinstance(node, _BRANCHES)
    ]
    return _Source(
        tuple(sorted(branches, key=lambda branch: (branch.line, branch.node.col_offset))),
        tuple(node for node in nodes if isinstance(node, _COMPREHENSIONS)),
        tuple(node for node in nodes if isinstance(node, _With)),
        tuple(node for node in nodes if isinstance(node, ast.Call) and _name_called(node) == "wait_for"),
    )


def _arms(node: ast.AST) -> tuple[tuple[str, int, int], ...]:
    found = []
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.Match) and name == "cases":
            found += [(f"case{i}", one.pattern.lineno, _end(one.body[-1])) for i, one in enumerate(node.cases)]
        elif name == "handlers":
            found += [(f"handler{i}", one.lineno, _end(one)) for i, one in enumerate(value)]
        elif name in ("body", "orelse", "finalbody") or (name == "test" and isinstance(node, ast.While)):
            parts = value if isinstance(value, list) else [value]
            found += [(name, parts[0].lineno, _end(parts[-1]))] if parts else []
    return tuple(found)


def _end(node: ast.stmt | ast.expr | ast.excepthandler) -> int:
    return node.end_lineno or node.lineno


def _between(file: str, line: int, other: int) -> list[_Branch]:
    """Return the branches that hold two lines in different arms, or only one of them; the first one first."""
    return [one for one in _source_of(file).branches if line != other and one.arm(line) != one.arm(other)]


def line_at(location: Location) -> str:
    """Return the source line at a place, without its indentation; empty where there is none."""
    line = linecache.getline(location.file, location.line).strip()
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"


def branch_between(file: str, line: int, other: int) -> int | None:
    """Return the line of the branch in whose different arms two lines of one function stand; None for none.

    An `if` without an `else` counts where one line stands in it, and the other behind it or, in the same loop, before
    it. Where it cannot be known that both have passed the branch, as inside of other branches or loops that hold only
    one of the lines, the answer is None.
    """
    between = _between(file, line, other)
    both = [one for one in between if one.arm(line) is not None and one.arm(other) is not None]
    if both:
        return both[0].line if isinstance(both[0].node, (ast.If, ast.Match, ast.IfExp)) else None
    if len(between) != 1 or not isinstance(between[0].node, ast.If):
        return None
    outside = other if between[0].arm(line) is not None else line
    if outside > between[0].end:
        return between[0].line
    around = [one.node for one in _source_of(file).branches if one.is_loop and one.arm(outside) == "body"]
    passed = around and not any(isinstance(one, ast.Continue) for one in ast.walk(around[-1]))
    return between[0].line if passed else None


def catches(file: str, inside: int, outside: int) -> int | None:
    """Return the line of an `except` clause, or a `with suppress`, that catches what one line raises, for the other."""
    source = _source_of(file)
    for one in source.branches:
        if isinstance(one.node, ast.Try) and one.node.handlers and one.arm(inside) == "body" != one.arm(outside):
            return one.node.handlers[0].lineno
    for block in source.withs:
        within = block.body[0].lineno <= inside <= _end(block) and not block.lineno <= outside <= _end(block)
        if within and any(_name_called(item.context_expr) == "suppress" for item in block.items):
            return block.lineno
    return None


def is_optional(file: str, line: int, other: int) -> bool:
    """Whether ``line`` stands in a branch that may or may not be taken on the way to ``other``; loops left out."""
    between = _between(file, line, other)
    return (
        bool(between)
        and line < other
        and not any(one.is_loop or one.arm(other) is not None or _goes_elsewhere(one, line) for one in between)
    )


def _goes_elsewhere(branch: _Branch, line: int) -> bool:
    """Whether the arm in which a line stands ends by going elsewhere."""
    arm = getattr(branch.node, branch.arm(line) or "", None)
    return isinstance(arm, list) and isinstance(arm[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def loop_left(file: str, inside: int, outside: int) -> int | None:
    """Return the line of the outermost loop that one line stands in and the other does not."""
    loops = (one for one in _between(file, inside, outside) if one.is_loop)
    return next((one.line for one in loops if one.arm(inside) in ("body", "test")), None)


def conditions_in(file: str, loop: int) -> dict[str, list[int]]:
    """Return the lines of a loop's own `if` statements that end in `break`, and of those that end in `continue`.

    Only those that stand in the loop itself, and so are looked at in every round that comes to them.
    """
    found: dict[str, list[int]] = {}
    for branch in _source_of(file).branches:
        if branch.line == loop and isinstance(branch.node, _LOOPS):
            for one in branch.node.body:
                last = one.body[-1] if isinstance(one, ast.If) else None
                if isinstance(last, (ast.Break, ast.Continue)):
                    found.setdefault(type(last).__name__.lower(), []).append(one.lineno)
                if isinstance(last, ast.Continue):
                    break  # what stands behind it is not looked at in every round
    return found


def is_in_one_loop(file: str, line: int, other: int) -> bool:
    """Whether two lines stand in the body of a common loop."""
    loops = (one for one in _source_of(file).branches if one.is_loop and one.line < line)
    return any(one.arm(line) == one.arm(other) == "body" for one in loops)


def is_in_loop(file: str, line: int) -> bool:
    """Whether a line stands in the body of a loop, or in a comprehension."""
    source = _source_of(file)
    inside = any(one.lineno <= line <= _end(one) for one in source.comprehensions)
    return inside or any(one.is_loop and one.arm(line) == "body" for one in source.branches)


def condition_of(file: str, line: int) -> int | None:
    """Return the line of the innermost `if` in whose body a line stands."""
    around = [one.line for one in _source_of(file).branches if isinstance(one.node, ast.If) and one.arm(line) == "body"]
    return max(around, default=None)


def time_limit_around(file: str, line: int) -> str:
    """Return the innermost timeout, cancel scope or `wait_for` that a line stands in, and its place; empty for none."""
    source = _source_of(file)
    around: list[tuple[int, ast.expr]] = [(one.lineno, one) for one in source.waits if one.lineno <= line <= _end(one)]
    around += [
        (block.lineno, item.context_expr)
        for block in source.withs
        for item in block.items
        if block.body[0].lineno <= line <= _end(block) and _name_called(item.context_expr) in _TIME_LIMITS
    ]
    if not around:
        return ""
    first, code = max((first, ast.unparse(expression)) for first, expression in around)
    return f"`{code}` at {place(Location(file, first, ''))}"


def _name_called(expression: ast.expr) -> str:
    function = getattr(expression, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))
