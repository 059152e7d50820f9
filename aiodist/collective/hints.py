"""Hints: what usually causes a disagreement, what to do about it, and the branch that was taken, if it shows."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from pathlib import Path

from aiodist.vocabulary.reports import Location, Reason, ReplicaReport, ReplicaState

_BRANCHES = (ast.If, ast.While, ast.For, ast.AsyncFor, ast.Try, ast.Match, ast.IfExp)


def hints(reason: Reason, replicas: Sequence[ReplicaReport], suspects: Sequence[int]) -> list[str]:
    """Return the last lines of an account: the branch where replicas parted, and what to do."""
    if reason is Reason.TIMEOUT and all(replica.call is not None for replica in replicas):
        return ["The merge function runs in a task of its own: look at what it awaits."]
    if reason in _NOT_A_BRANCH:
        return _ADVICE[reason]
    parted = _branch(replicas, suspects)
    if parted is not None and reason is Reason.CALL_SITE:
        return [parted, *_ADVICE[reason]]
    if parted is not None:
        return [
            f"{parted} A condition on a replica's own data is the usual cause:",
            "  reduce the condition first, e.g.  stop = await ctx.all_reduce(ReduceOp.MAX, stop)",
        ]
    return _ADVICE.get(reason, [])


_ADVICE = {
    Reason.KIND: ["Every replica must issue the same collectives in the same order."],
    Reason.NAME: ["The names differ: calls that are meant to be one collective have the same name."],
    Reason.REDUCE_OP: ["The reduce op must be the same on every replica. If it is a variable, print it."],
    Reason.AXIS: ["The axis must be the same on every replica. Was the replica id passed?"],
    Reason.SOURCE: ["The source must be the same on every replica: the id of the one that has the value."],
    Reason.MERGE_FN: [
        "The merge function must be the same on every replica; it runs once. Pass what differs as an argument."
    ],
    Reason.STRUCTURE: ["Where a replica has no value, reduce zeros instead, or leave the leaf out everywhere."],
    Reason.SHAPE: ["Nothing is broadcast across replicas. Was it a last, smaller batch?"],
    Reason.DTYPE: ["Values are never cast across replicas. NumPy makes float64 by default."],
    Reason.DEVICE: ["Every replica must pass the same type of array or number."],
    Reason.CALL_SITE: [
        "Equal calls from different places are usually two collectives in swapped order: reduce one dict, or iterate",
        "over sorted keys. If the places are meant to meet, give both calls the same name=.",
    ],
    Reason.EXITED: [
        "Every replica must make as many collectives as the others: decide together when to stop, e.g.",
        "  done = await ctx.all_reduce(ReduceOp.MAX, done)",
    ],
    Reason.ABANDONED: [
        "A timeout or cancel scope around a collective of one replica leaves the others without it. Put it around the",
        "whole run, or set CommunicationOptions(timeout_seconds=...).",
    ],
    Reason.TIMEOUT: ["The places where the missing replicas are now are in report.replicas[i].stack."],
}
_NOT_A_BRANCH = (Reason.EXITED, Reason.ABANDONED, Reason.TIMEOUT)


def _branch(replicas: Sequence[ReplicaReport], suspects: Sequence[int]) -> str | None:
    """Say where the first suspect left the others: the branch around its call that is not around theirs."""
    odd = next((r for r in replicas if r.replica_id in suspects and r.location is not None), None)
    others = [r.location for r in replicas if r.replica_id not in suspects and r.location is not None]
    if odd is None or odd.location is None or not others or odd.state is not ReplicaState.WAITING:
        return None
    found = branch(odd.location, others[0])
    if found is None:
        return None
    line, taken = found
    verb = "took" if taken else "did not take"
    return f"Replica {odd.replica_id} {verb} the branch at {Path(odd.location.file).name}:{line}."


def branch(odd: Location, other: Location) -> tuple[int, bool] | None:
    """Return the branch that parts two calls of a function: its line, and whether the odd one is in it.

    It is the first that does, and of those inside it that part them in the same way the innermost.
    """
    if odd.file != other.file or odd.function != other.function or odd.line == other.line:
        return None
    try:
        tree = ast.parse("".join(linecache.getlines(odd.file)))
    except (SyntaxError, ValueError):
        return None
    parting = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _BRANCHES) and _arm(node, odd.line) != _arm(node, other.line)
    ]
    if not parting:
        return None
    first = min(parting, key=lambda node: node.lineno)
    taken = _arm(first, odd.line) is not None
    inside = [n.lineno for n in parting if n.lineno <= _end(first) and (_arm(n, odd.line) is not None) is taken]
    return max(inside), taken


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _arm(node: ast.AST, line: int) -> str | None:
    """Return in which arm of a branch a line stands: ``body``, ``orelse``, a handler or a case; None outside."""
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
            if first is not None and last is not None and first <= line <= last:
                return f"{name}{index}" if name in ("handlers", "cases") else name
    return None
