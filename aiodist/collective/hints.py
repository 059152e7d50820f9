"""Hints: what usually causes a disagreement, and what to do about it. Only what fits what was found."""

from __future__ import annotations

import numpy as np

from aiodist._core.report import Parting, Reason
from aiodist.collective import signature as sig
from aiodist.collective.findings import Findings
from aiodist.collective.signature import Signature

_BRANCHED = (Reason.KIND, Reason.STRUCTURE, Reason.SHAPE, Reason.DTYPE, Reason.REDUCE_OP, Reason.AXIS, Reason.SOURCE)


def hints(findings: Findings) -> list[str]:
    """Return the last lines of an account."""
    if findings.look.races and findings.sides is None and len(findings.camps) > 1:
        return [*findings.look.races[:2], *_RACE]
    found = _by_parting(findings)
    if found is not None:
        return found
    advice = _BY_REASON.get(findings.reason)
    return advice(findings) if advice is not None else _ADVICE.get(findings.reason, [])


def _by_parting(findings: Findings) -> list[str] | None:
    parting = findings.divergence.parting if findings.divergence is not None else None
    if _of_its_own(findings):
        return _of_its_own(findings)
    if parting is Parting.LEFT_LOOP:
        return _UNEVEN
    if parting is Parting.SWAPPED:
        return _SWAPPED
    one_more_or_less = parting in (Parting.SKIPPED, Parting.ADDED)
    if one_more_or_less and _on_one_line(findings):
        return _ITEMS
    if parting is not None and findings.reason in _BRANCHED:
        return _CONDITION
    return [*_CONDITION, *_NAME] if one_more_or_less else None


def _of_its_own(findings: Findings) -> list[str]:
    """Return what is to be said of joins and of the creation of groups alone."""
    if findings.joining and findings.reason is Reason.EXITED:
        return ["Where one replica joins, all must: await ctx.join() behind the loop, on every way out of it."]
    if findings.sequence_number < 0 and findings.reason is Reason.CALL_SITE:
        return ["Every member must make the group at the same place; where the places are to meet, give it a name."]
    return []


_JOIN = "One that has run out of data can stand by instead: await ctx.join()."
_UNEVEN = [
    "Give every replica equally many rounds: drop the remainder, or decide together when to stop, e.g.",
    "  done = await ctx.all_reduce(ReduceOp.MAX, done)",
    _JOIN,
]
_RACE = [
    "The order of racing tasks may differ on other replicas: await them one after the other, or give each a group of",
    "its own: ctx.new_group(range(ctx.num_replicas_in_sync)).",
]
_SWAPPED = ["Iterate over sorted keys, or reduce one dict: then the order is the same on every replica."]
_ITEMS = [
    "It is one line, in a loop over what differs by replica: give the loop the same items in the same order on every",
    "replica, with zeros where one has no value, or reduce one dict.",
]
_CONDITION = [
    "A condition on a replica's own data is the usual cause: reduce the condition first, e.g.",
    "  stop = await ctx.all_reduce(ReduceOp.MAX, stop)",
]
_NAME = ["If the places are meant to meet, give both calls the same name=."]
_ADVICE = {
    Reason.KIND: [
        "Every replica must issue the same collectives in the same order. Does one of these calls stand under a",
        "condition that depends on the replica?",
    ],
    Reason.NAME: ["The names differ: calls that are meant to be one collective have the same name."],
    Reason.DEVICE: ["Every replica must pass the same type of array or number."],
    Reason.CALL_SITE: [
        "Equal calls from different places are usually two collectives in swapped order: reduce one dict, or iterate",
        "over sorted keys. If the places are meant to meet, give both calls the same name=.",
    ],
    Reason.EXITED: [
        "Every replica must make as many collectives as the others: decide together when to stop, e.g.",
        "  done = await ctx.all_reduce(ReduceOp.MAX, done)",
        _JOIN,
    ],
}


def _on_one_line(findings: Findings) -> bool:
    return len({replica.location for replica in findings.replicas if replica.location is not None}) == 1


def _abandoned(findings: Findings) -> list[str]:
    if not findings.abandoned:
        return ["Keep the group's context, and issue the same number of its collectives on every member."]
    if findings.refusals:
        return ["An error in the arguments is raised there alone; what all workers do together waits for every one."]
    return [
        "A timeout or cancel scope around a collective of one replica leaves the others without it. Put it around the",
        "whole run, or set CommunicationOptions(timeout_seconds=...).",
    ]


def _reduce_op(findings: Findings) -> list[str]:
    which = " It is the same line everywhere, so the op is a variable: print it." if _on_one_line(findings) else ""
    return [f"The reduce op must be the same on every replica.{which}"]


def _axis(findings: Findings) -> list[str]:
    return [f"The axis must be the same value everywhere.{_was_it_the_id(findings)}"]


def _source(findings: Findings) -> list[str]:
    return [
        f"The source must be the same value everywhere, the id of the one that has the value.{_was_it_the_id(findings)}"
    ]


def _was_it_the_id(findings: Findings) -> str:
    by_replica = [(members, signature[sig.DETAIL]) for members, signature in findings.camps]
    passed = all(len(members) == 1 and detail == members[0] for members, detail in by_replica)
    return " The replica's id was passed." if passed else " Was the replica's id passed?"


def _structure(findings: Findings) -> list[str]:
    if findings.camps[0][1][sig.SHAPES] is None:
        return ["Every replica must pass the merge function arguments of the same structure."]
    return ["Where a replica has no value, reduce zeros instead, or leave the leaf out everywhere."]


def _shape(findings: Findings) -> list[str]:
    (_, usual), (_, odd) = findings.camps[0], findings.camps[1]
    batch = " Was it a last, smaller batch? Drop it, or pad it." if _only_axis_0(usual, odd) else ""
    return [f"Nothing is broadcast across replicas.{batch}"]


def _only_axis_0(a: Signature, b: Signature) -> bool:
    pairs = zip(sig.leaf_fields(a), sig.leaf_fields(b), strict=False)
    differing = [(x[0], y[0]) for x, y in pairs if x[0] != y[0]]
    return all(len(x) == len(y) and len(x) > 0 and x[1:] == y[1:] for x, y in differing)


def _dtype(findings: Findings) -> list[str]:
    dtypes = {dtype for _, signature in findings.camps for _, dtype, _ in sig.leaf_fields(signature)}
    numpy = " NumPy makes float64 by default." if np.dtype(np.float64) in dtypes else ""
    return [f"Values are never cast across replicas.{numpy}"]


def _timeout(findings: Findings) -> list[str]:
    if all(replica.call is not None for replica in findings.replicas):
        merges = findings.camps[0][1][sig.KIND].name == "merge_call"
        return ["The merge function runs in a task of its own: look at what it awaits."] if merges else []
    waits = " ".join(replica.waits_for or "" for replica in findings.replicas)
    if "Lock" in waits or "Semaphore" in waits:
        return ["A lock that is held across a collective keeps the others from coming to it: release it before."]
    return ["The places where the missing replicas are now are in report.replicas[i].stack."]


def _merge_fn(findings: Findings) -> list[str]:
    if findings.camps[0][1][sig.KIND].name == "merge_call":
        return ["The merge function must be the same on every replica; it runs once. Pass what differs as an argument."]
    return ["The function must be the same on every worker. Pass what differs as an argument."]


_BY_REASON = {
    Reason.ABANDONED: _abandoned,
    Reason.MERGE_FN: _merge_fn,
    Reason.REDUCE_OP: _reduce_op,
    Reason.AXIS: _axis,
    Reason.SOURCE: _source,
    Reason.STRUCTURE: _structure,
    Reason.SHAPE: _shape,
    Reason.DTYPE: _dtype,
    Reason.TIMEOUT: _timeout,
}
