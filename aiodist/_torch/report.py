"""Reports on programs of torch.distributed, in PyTorch's terms: ranks in place of replicas, and its own advice.

Also equal calls from the same places in another order: values of different calls have been combined, which torch does
not notice. Places alone say nothing, for one rank may publish what others receive elsewhere; but where places differ,
and a few calls later all ranks have been at the same ones with the same calls, each in an order of its own, calls have
been swapped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Final

from aiodist._core.analysis import analyse
from aiodist._core.call import LEAF, Call, OrderCheck
from aiodist._core.report import CollectiveReport, DivergenceKind
from aiodist._core.snapshot import GroupRecord, Snapshot
from aiodist._core.terms import Reason, ReplicaState

_REPLICA = re.compile(r"`[^`]*`|(?<![\w/\\.'-])([Rr])eplica(s?)(?![\w/\\'(=-]|\.\w)")
_SOURCE_LINE = re.compile(r"[> ] {3}\S")
_MESSAGE = re.compile(
    r"(?:collective (#\d+) of |#\d+ (of ))?group 'send (\d+)->(\d+)(?: tag (\d+))?' of ranks \d+ and \d+"
)
NEW_GROUP: Final = "new_group"
"""The kind of calls that make groups, and the name of the group of all ranks that has them in order."""

_MOST_SWAPPED = 8
"""Over how many calls of a group the order of places is compared."""

_MAKING = re.compile(rf"collective (#\d+) of group '{NEW_GROUP}' of ranks? [\d-]+(?:, [\d-]+)*(?: and [\d-]+)?(?: …)?")
_OF_RUN = re.compile(r"\bof(\s+)the run\b")
_OF_GROUPS = re.compile(
    r", (?:each in another group's collective|in collectives of several groups)$"
    r"|\nThis is the first collective of the group\.$|\nThe functions differ: .*",
    re.MULTILINE,
)

_DECIDE = [
    "A condition on a rank's own data is the usual cause: reduce the condition first, e.g.",
    "  torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)",
]
_STEPS = [
    "Every rank must make as many steps as the others: drop the remainder of the data (drop_last=True), use the Join",
    "context manager of DistributedDataParallel, or decide together when to stop, e.g.",
    "  torch.distributed.all_reduce(done, torch.distributed.ReduceOp.MAX)",
]
_ORDER = ["Make the calls in the same order on every rank: iterate over sorted keys, not over a set."]
_PAIRS = [
    "Every send needs a receive of the same size and tag on the other rank, in the same order. Those that depend on",
    "each other go together, in batch_isend_irecv.",
]
_ADVICE: dict[Reason | DivergenceKind, list[str]] = {
    DivergenceKind.LEFT_LOOP: _STEPS,
    DivergenceKind.SWAPPED: _ORDER,
    DivergenceKind.SKIPPED: _DECIDE,
    DivergenceKind.ADDED: _DECIDE,
    DivergenceKind.OTHER_BRANCH: _DECIDE,
    Reason.KIND: _DECIDE,
    Reason.REDUCE_OP: ["The reduce op must be the same on every rank."],
    Reason.SOURCE: ["The root must be the same rank everywhere, by its number in the whole job."],
    Reason.STRUCTURE: ["Every rank must pass equally many tensors."],
    Reason.SHAPE: ["Nothing is broadcast across ranks. Was it a last, smaller batch? Drop it, or pad it."],
    Reason.DTYPE: ["Values are never cast across ranks."],
    Reason.CALL_SITE: _ORDER,
    Reason.EXITED: _STEPS,
    Reason.UNMATCHED: ["Every send needs a receive on the other rank with the same tag, and every receive a send."],
    Reason.GROUP: ["Every rank must call new_group for every group, in the same order, whether it is a member or not."],
    Reason.CYCLE: ["Issue the collectives of process groups in the same order on every rank."],
}


def in_ranks(report: CollectiveReport) -> CollectiveReport:
    """Return a report on a torch.distributed program in the words of its author."""
    text = report.text.removesuffix("\n".join(["", *report.advice]))
    lines = [line if _SOURCE_LINE.match(line) else ranks(line) for line in text.splitlines()]
    text, advice = _OF_RUN.sub(r"of\1the default group", "\n".join(lines)), _advice(report)
    if "in different contexts" in text:
        text = text.replace("in different contexts", "in different process groups").replace("in that of ", "in ")
        advice = ["Every rank must pass the same group."]
    if "without the creation of" in text:
        advice = _ADVICE[Reason.GROUP]
    of_messages = "the message from rank" in text or "waits for a message of any rank" in text
    if of_messages or report.reason in (Reason.GROUP, Reason.UNMATCHED):
        text = _OF_GROUPS.sub("", text)
    if of_messages and report.reason is not Reason.GROUP:
        advice = _PAIRS
    divergence = report.divergence
    return replace(
        report,
        text="\n".join([text, *advice]),
        group=None if report.group is None else ranks(report.group),
        divergence=None if divergence is None else replace(divergence, text=ranks(divergence.text)),
        advice=tuple(advice),
    )


def ranks(text: str) -> str:
    """Return a text of ours with ranks in place of replicas, and messages in place of groups of two."""
    return _MAKING.sub(rf"call \1 of {NEW_GROUP}", _MESSAGE.sub(_message, _REPLICA.sub(_rank, text)))


def _message(match: re.Match[str]) -> str:
    _, of, source, target, tag = match.groups()
    return f"{of or ''}the message from rank {source} to rank {target}{f' with tag {tag}' if tag else ''}"


def _rank(match: re.Match[str]) -> str:
    return match[0] if match[1] is None else f"{'R' if match[1] == 'R' else 'r'}ank{match[2]}"


def _advice(report: CollectiveReport) -> list[str]:
    kind = report.divergence.kind if report.divergence is not None else None
    if any(each.state is ReplicaState.FAILED for each in report.replicas):
        return []  # its error says more
    by_kind = _ADVICE.get(kind, []) if kind is not None and report.reason is not Reason.GROUP else []
    return by_kind or _ADVICE.get(report.reason, [])


def call_of_tensors(
    kind: str, shapes: tuple[tuple[int | None, ...], ...], dtypes: tuple[str, ...], **more: Any
) -> Call:
    """Return a call on a tensor or on a list of tensors; ``more`` are other fields of `Call`."""
    size = len(shapes)
    return Call(
        kind,
        structure=None if size == 1 else f"[{', '.join([LEAF] * size)}]",
        paths=("",) if size == 1 else tuple(f"[{index}]" for index in range(size)),
        shapes=shapes or None,
        dtypes=dtypes,
        arrays=("array",) * size,
        **more,
    )


class PlaceOrder:
    """Looks for swapped calls in the collectives of one group."""

    def __init__(self) -> None:
        self._since: list[list[tuple[Hashable, Hashable]]] = []

    def swapped(self, asked: Hashable, places: Sequence[Hashable]) -> int:
        """Note the next collective of the group; return how many have been swapped, this one the last, or 0."""
        if len(set(places)) == 1 and (not self._since or self._since[0][0][0] != asked):
            self._since.clear()
            return 0
        if len(self._since) == _MOST_SWAPPED:
            del self._since[0]
        self._since.append([(asked, each) for each in places])
        return next((number for number in range(2, len(self._since) + 1) if self._reordered(number)), 0)

    def _reordered(self, number: int) -> bool:
        walks = list(zip(*self._since[-number:], strict=True))
        return len(set(walks)) > 1 and len({frozenset(Counter(walk).items()) for walk in walks}) == 1


def report_on_swap(snapshot: Snapshot, group: GroupRecord, first: int, last: int) -> CollectiveReport:
    """Return the report on calls of a group that have been swapped, from the first of them to the last."""
    slots = sorted((*group.history, *group.open), key=lambda slot: slot.number)
    swapped = replace(
        group,
        history=tuple(slot for slot in slots if slot.number < first and len(slot.posts) == 1),
        open=tuple(slot._replace(waiting=()) for slot in slots if first <= slot.number <= last),
    )
    root = replace(snapshot.groups[0], history=(), open=())
    shown = (swapped,) if group.key == root.key else (root, swapped)
    return analyse(replace(snapshot, order_check=OrderCheck.CALL_PATH, groups=shown, blocked=(), deadlocked=()))
