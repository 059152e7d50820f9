"""The program's source around calls: lines to show, the branch that parts two lines, the loop that one has left.

Read when a report is written. Where the source is not to be had (a notebook's cell that is gone, a string that was
executed) the answers are None, and a report says less.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from functools import lru_cache

from aiodist._core.report import Location

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


def parting_line(file: str, line: int, other: int) -> int | None:
    """Return the line of the branch that parts two lines of one function.

    It is the first that does, and of those inside it that part them in the same way the innermost.
    """
    parting = _parting(file, line, other)
    if not parting:
        return None
    first = parting[0]
    taken = _arm(first, line) is not None
    return max(n.lineno for n in parting if n.lineno <= _end(first) and (_arm(n, line) is not None) is taken)


def passes_by(file: str, line: int, other: int) -> bool:
    """Whether ``line`` stands in a branch that the way to ``other`` can go past, or through; loops left out."""
    parting = _parting(file, line, other)
    return (
        bool(parting)
        and line < other
        and not any(isinstance(node, _LOOPS) or _arm(node, other) is not None for node in parting)
        and not any(_leaves(node, line) for node in parting)
    )


def _leaves(node: ast.AST, line: int) -> bool:
    """Whether the arm in which a line stands ends by going elsewhere."""
    name = _arm(node, line)
    arm = getattr(node, name, None) if name is not None else None
    return isinstance(arm, list) and isinstance(arm[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def loop_left(file: str, inside: int, outside: int) -> int | None:
    """Return the line of the outermost loop that one line stands in and the other does not."""
    loops = [node.lineno for node in _parting(file, inside, outside) if isinstance(node, _LOOPS)]
    return min((line for line in loops if _stands_in_loop(file, line, inside)), default=None)


def breaks(file: str, loop: int) -> list[int]:
    """Return the lines of the `break` statements that leave the loop at a line."""
    return sorted({line for node in _nodes(file) if isinstance(node, _LOOPS) and node.lineno == loop
                   for line in _breaks(node.body)})  # fmt: skip


def _breaks(nodes: Iterable[ast.AST]) -> Iterator[int]:
    for node in nodes:
        if isinstance(node, ast.Break):
            yield node.lineno
        elif isinstance(node, _LOOPS):
            yield from _breaks(node.orelse)
        elif not isinstance(node, _SCOPES):
            yield from _breaks(ast.iter_child_nodes(node))


def condition_of(file: str, line: int) -> int | None:
    """Return the line of the innermost `if` in whose body a line stands."""
    return max((n.lineno for n in _nodes(file) if isinstance(n, ast.If) and _arm(n, line) == "body"), default=None)


def _stands_in_loop(file: str, loop: int, line: int) -> bool:
    return any(isinstance(n, _LOOPS) and n.lineno == loop and _arm(n, line) in ("body", "test") for n in _nodes(file))


def _parting(file: str, line: int, other: int) -> list[ast.stmt | ast.expr]:
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


def time_limit_around(file: str, line: int) -> tuple[int, str] | None:
    """Return line and code of the innermost timeout or cancel scope whose block a line stands in."""
    found = [
        (node.lineno, ast.unparse(item.context_expr))
        for node in _with_blocks("".join(linecache.getlines(file)))
        for item in node.items
        if node.body[0].lineno <= line <= (node.end_lineno or line) and _limits_time(item.context_expr)
    ]
    return max(found, default=None)


def _limits_time(expression: ast.expr) -> bool:
    if not isinstance(expression, ast.Call):
        return False
    name = expression.func.attr if isinstance(expression.func, ast.Attribute) else getattr(expression.func, "id", "")
    return name in _TIME_LIMITS


@lru_cache(maxsize=16)
def _with_blocks(source: str) -> tuple[ast.With | ast.AsyncWith, ...]:
    return tuple(node for node in _parsed(source) if isinstance(node, (ast.With, ast.AsyncWith)))
