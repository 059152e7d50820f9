"""The program's source around calls: lines to show, the branch between two lines, the loop that one has left.

Read when a report is written. Where the source is not to be had (a notebook's cell that is gone, a string that was
executed) the answers are None, and a report says less.
"""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache

from aiodist._core.report import Location
from aiodist._core.text import place

_LOOPS = (ast.While, ast.For, ast.AsyncFor)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_BRANCHES = (ast.If, *_LOOPS, ast.Try, ast.Match, ast.IfExp)
_ARMS = ("body", "orelse", "handlers", "cases", "finalbody")
_TIME_LIMITS = {"timeout", "timeout_at", "move_on_after", "move_on_at", "fail_after", "fail_at", "CancelScope"}
_LONGEST_LINE = 90


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
    between = _branches_between(file, line, other)
    both = [node for node in between if _arm(node, line) is not None and _arm(node, other) is not None]
    if both:
        return both[0].lineno if isinstance(both[0], (ast.If, ast.Match, ast.IfExp)) else None
    if len(between) != 1 or not isinstance(between[0], ast.If):
        return None
    outside = other if _arm(between[0], line) is not None else line
    if outside > _end(between[0]):
        return between[0].lineno
    loops = [node for node in _nodes(file) if isinstance(node, _LOOPS) and _arm(node, outside) == "body"]
    around = max(loops, key=lambda node: node.lineno, default=None)
    passed = around is not None and not any(isinstance(one, ast.Continue) for one in ast.walk(around))
    return between[0].lineno if passed else None


def catches(file: str, inside: int, outside: int) -> int | None:
    """Return the line of an `except` clause, or a `with suppress`, that catches what one line raises, for the other."""
    text = "".join(linecache.getlines(file))
    for node in _nodes(file):
        if isinstance(node, ast.Try) and node.handlers and _arm(node, inside) == "body" != _arm(node, outside):
            return node.handlers[0].lineno
    for block in _with_blocks(text):
        within = block.body[0].lineno <= inside <= _end(block) and not block.lineno <= outside <= _end(block)
        if within and any(_name_called(item.context_expr) == "suppress" for item in block.items):
            return block.lineno
    return None


def is_optional(file: str, line: int, other: int) -> bool:
    """Whether ``line`` stands in a branch that may or may not be taken on the way to ``other``; loops left out."""
    between = _branches_between(file, line, other)
    return (
        bool(between)
        and line < other
        and not any(isinstance(node, _LOOPS) or _arm(node, other) is not None for node in between)
        and not any(_leaves(node, line) for node in between)
    )


def _leaves(node: ast.AST, line: int) -> bool:
    """Whether the arm in which a line stands ends by going elsewhere."""
    name = _arm(node, line)
    arm = getattr(node, name, None) if name is not None else None
    return isinstance(arm, list) and isinstance(arm[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def loop_left(file: str, inside: int, outside: int) -> int | None:
    """Return the line of the outermost loop that one line stands in and the other does not."""
    loops = [node.lineno for node in _branches_between(file, inside, outside) if isinstance(node, _LOOPS)]
    return min((line for line in loops if _stands_in_loop(file, line, inside)), default=None)


def conditions_in(file: str, loop: int) -> dict[str, list[int]]:
    """Return the lines of a loop's own `if` statements that end in `break`, and of those that end in `continue`.

    Only those that stand in the loop itself, and so are looked at in every round that comes to them.
    """
    found: dict[str, list[int]] = {}
    for node in _nodes(file):
        if isinstance(node, _LOOPS) and node.lineno == loop:
            for one in node.body:
                last = one.body[-1] if isinstance(one, ast.If) else None
                if isinstance(last, (ast.Break, ast.Continue)):
                    found.setdefault(type(last).__name__.lower(), []).append(one.lineno)
                if isinstance(last, ast.Continue):
                    break  # what stands behind it is not looked at in every round
    return found


def is_in_one_loop(file: str, line: int, other: int) -> bool:
    """Whether two lines stand in the body of a common loop."""
    return any(
        isinstance(node, _LOOPS) and node.lineno < line and _arm(node, line) == _arm(node, other) == "body"
        for node in _nodes(file)
    )


def condition_of(file: str, line: int) -> int | None:
    """Return the line of the innermost `if` in whose body a line stands."""
    return max((n.lineno for n in _nodes(file) if isinstance(n, ast.If) and _arm(n, line) == "body"), default=None)


def _stands_in_loop(file: str, loop: int, line: int) -> bool:
    return any(isinstance(n, _LOOPS) and n.lineno == loop and _arm(n, line) in ("body", "test") for n in _nodes(file))


def _branches_between(file: str, line: int, other: int) -> list[ast.stmt | ast.expr]:
    """Return the branches that hold two lines in different arms, or only one of them; the first one first."""
    if line == other:
        return []
    found = [node for node in _nodes(file) if _arm(node, line) != _arm(node, other)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _nodes(file: str) -> tuple[ast.stmt | ast.expr, ...]:
    return _branches("".join(linecache.getlines(file)))


@lru_cache(maxsize=16)
def _branches(source: str) -> tuple[ast.stmt | ast.expr, ...]:
    return tuple(node for node in _parsed(source) if isinstance(node, _BRANCHES))


def _parsed(source: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, SystemError):  # the last: CPython 3.11 counts what two threads parse together
        return []


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _arm(node: ast.AST, line: int) -> str | None:
    """Return in which arm of a branch a line stands: ``body``, ``orelse``, a handler or a case; None outside."""
    for name, value in ast.iter_fields(node):
        if name not in _ARMS and not (name == "test" and isinstance(node, ast.While)):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
            if name == "cases":
                first, last = child.pattern.lineno, child.body[-1].end_lineno
            if first is not None and last is not None and first <= line <= last:
                return f"{name}{index}" if name in ("handlers", "cases") else name
    return None


def time_limit_around(file: str, line: int) -> str:
    """Return the innermost timeout, cancel scope or `wait_for` that a line stands in, and its place; empty for none."""
    text = "".join(linecache.getlines(file))
    found = [(node.lineno, ast.unparse(node)) for node in _waits_for(text) if node.lineno <= line <= _end(node)]
    found += [
        (node.lineno, ast.unparse(item.context_expr))
        for node in _with_blocks(text)
        for item in node.items
        if node.body[0].lineno <= line <= (node.end_lineno or line) and _name_called(item.context_expr) in _TIME_LIMITS
    ]
    if not found:
        return ""
    first, code = max(found)
    return f"`{code}` at {place(Location(file, first, ''))}"


def _name_called(expression: ast.expr) -> str:
    function = getattr(expression, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


@lru_cache(maxsize=16)
def _with_blocks(source: str) -> tuple[ast.With | ast.AsyncWith, ...]:
    return tuple(node for node in _parsed(source) if isinstance(node, (ast.With, ast.AsyncWith)))


@lru_cache(maxsize=16)
def _waits_for(source: str) -> tuple[ast.Call, ...]:
    calls = (node for node in _parsed(source) if isinstance(node, ast.Call))
    return tuple(node for node in calls if _name_called(node) == "wait_for")
