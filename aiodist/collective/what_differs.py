"""What differs inside the calls: of all that they ask for, the first field that is not the same, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType

from aiodist._arrays import nests
from aiodist._core.report import Reason
from aiodist.collective import signature as sig
from aiodist.collective.describe import FunctionKey, leaf_text
from aiodist.collective.findings import Findings
from aiodist.collective.signature import Signature
from aiodist.collective.wording import ids_briefly, shown_file

_MOST_CAMPS = 12
_MOST_PATHS = 4


def what_differs(findings: Findings) -> list[str]:
    """Return the lines on the one thing that differs first: the leaf by its path, the merge functions, the columns."""
    if len(findings.camps) < 2:
        return []
    if findings.reason in (Reason.AXIS, Reason.SOURCE):
        return _values_differ(findings)
    if findings.reason is Reason.CALL_SITE:
        return _columns_differ(findings)
    tell = _BETWEEN_TWO.get(findings.reason)
    (members, majority), *odd = findings.camps
    return [] if tell is None else tell(findings, majority, members, *_other_side(findings, majority, odd))


def _structures_differ(
    _: Findings, a: Signature, a_members: Sequence[int], b: Signature, b_members: Sequence[int]
) -> list[str]:
    left, right = a[sig.STRUCTURE], b[sig.STRUCTURE]
    if left is None or right is None:
        single, nest = (a_members, b_members) if left is None else (b_members, a_members)
        return [f"The structures differ: a single value on {ids_briefly(single)}, a nest on {ids_briefly(nest)}."]
    if a[sig.SHAPES] is None:
        return _arguments_differ(left, a_members, right, b_members)
    here, there = (dict.fromkeys(nests.leaf_paths(structure, "value")) for structure in (left, right))
    alone = [(path, a_members) for path in here if path not in there]
    alone += [(path, b_members) for path in there if path not in here]
    if not alone:
        sides = ids_briefly(a_members), ids_briefly(b_members)
        return [f"The structures differ: {nests.difference(left, right, 'value', *sides)}."]
    told = [f"{path} stands on {ids_briefly(members)} only" for path, members in alone[:_MOST_PATHS]]
    more = f", and {len(alone) - _MOST_PATHS} more" if len(alone) > _MOST_PATHS else ""
    return [f"The structures differ: {', '.join(told)}{more}."]


def _arguments_differ(
    a: nests.Structure, a_members: Sequence[int], b: nests.Structure, b_members: Sequence[int]
) -> list[str]:
    """Tell the arguments of merge functions apart: a list of the positional ones, and a dict of those with names."""
    (left, left_names), (right, right_names) = a.children(), b.children()
    if left.num_children != right.num_children:
        numbers = f"{left.num_children} against {right.num_children} positional arguments"
        return [f"The arguments differ: {numbers}, {ids_briefly(a_members)} against {ids_briefly(b_members)}."]
    names = sorted(set(left_names.entries()) ^ set(right_names.entries()))
    if names:
        return [f"The arguments differ: {', '.join(names)} stands on one side only."]
    differ = nests.difference(a, b, "arguments", ids_briefly(a_members), ids_briefly(b_members))
    return [f"The arguments differ: {differ}."]


def _values_differ(findings: Findings) -> list[str]:
    """Tell axes and sources by replica."""
    values = [
        f"{signature[sig.DETAIL]} on {ids_briefly(members)}" for members, signature in findings.camps[:_MOST_PATHS]
    ]
    more = ", …" if len(findings.camps) > _MOST_PATHS else ""
    return [f"The {findings.reason} differs: {', '.join(values)}{more}."]


def _columns_differ(findings: Findings) -> list[str]:
    """Tell calls apart that stand on one line."""
    location_of = {replica.replica_id: replica.location for replica in findings.replicas}
    places = {location_of[members[0]] for members, _ in findings.camps}
    if len(places) > 1 or None in findings.columns:
        return []
    columns = [
        f"column {(column or 0) + 1} on {ids_briefly(members)}"
        for (members, _), column in zip(findings.camps, findings.columns, strict=True)
    ]
    return [f"They are different calls on one line: {', '.join(columns[:_MOST_CAMPS])}."]


_FIELDS = {
    Reason.MERGE_FN: sig.DETAIL,
    Reason.STRUCTURE: sig.STRUCTURE,
    Reason.SHAPE: sig.SHAPES,
    Reason.DTYPE: sig.DTYPES,
    Reason.DEVICE: sig.TYPES,
}


def _other_side(
    findings: Findings, majority: Signature, odd: Sequence[tuple[Sequence[int], Signature]]
) -> tuple[Signature, Sequence[int]]:
    """Return the first camp that differs from the majority in the reason given."""
    field = _FIELDS[findings.reason]
    return next(((s, m) for m, s in odd if s[field] != majority[field]), (odd[0][1], odd[0][0]))


def _merge_functions_differ(
    _: Findings, a: Signature, a_members: Sequence[int], b: Signature, b_members: Sequence[int]
) -> list[str]:
    left, right = _function(a[sig.DETAIL]), _function(b[sig.DETAIL])
    what = "merge functions" if a[sig.KIND].name == "merge_call" else "functions"
    return [f"The {what} differ: {left} on {ids_briefly(a_members)}, {right} on {ids_briefly(b_members)}."]


def _function(key: FunctionKey) -> str:
    """Return a merge function as text, with the place where it is defined if it has one."""
    if isinstance(key.code, CodeType):
        return f"{key.name} at {shown_file(key.file)}:{key.code.co_firstlineno}"
    return key.name


def _leaf_differs(
    findings: Findings, a: Signature, a_members: Sequence[int], b: Signature, b_members: Sequence[int]
) -> list[str]:
    if a[sig.STRUCTURE] is None:
        return []
    paths = nests.leaf_paths(a[sig.STRUCTURE], "value")
    for path, mine, theirs in zip(paths, sig.leaf_fields(a), sig.leaf_fields(b), strict=True):
        if mine != theirs:
            left, right = leaf_text(*mine), leaf_text(*theirs)
            sides = f"{left} on {ids_briefly(a_members)}, {right} on {ids_briefly(b_members)}"
            what = "array type" if findings.reason is Reason.DEVICE else findings.reason
            return [f"The {what} differs at {path}: {sides}."]
    return []


_BETWEEN_TWO = {
    Reason.STRUCTURE: _structures_differ,
    Reason.MERGE_FN: _merge_functions_differ,
    Reason.SHAPE: _leaf_differs,
    Reason.DTYPE: _leaf_differs,
    Reason.DEVICE: _leaf_differs,
}
