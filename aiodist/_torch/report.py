"""Reports on programs of torch.distributed, in PyTorch's terms: ranks instead of replicas, and PyTorch's advice."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from aiodist._core.analysis import analyse
from aiodist._core.call import LEAF, Call
from aiodist._core.report import CollectiveReport, DivergenceKind
from aiodist._core.snapshot import Overdue, Snapshot
from aiodist._core.terms import Reason, ReplicaState
from aiodist._core.text import replicas_called

NEW_GROUP: Final = "new_group"
"""The kind of calls that make groups, and the name of the group in which all ranks issue them."""

_DECIDE = [
    "A condition on a rank's own data is the usual cause: reduce the condition first, e.g.",
    "  torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)",
]
_STEPS = [
    "All ranks must make the same number of steps: drop the remainder of the data (drop_last=True),",
    "use DistributedDataParallel's join(), or decide together when to stop, e.g.",
    "  torch.distributed.all_reduce(done, torch.distributed.ReduceOp.MAX)",
]
_ORDER = ["Make the calls in the same order on every rank: iterate over sorted keys, not over a set."]
_PAIRS = [
    "Every send needs a receive of the same size and tag on the other rank, in the same order.",
    "Those that depend on each other go together, in batch_isend_irecv.",
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
    Reason.SHAPE: ["Shapes must match; values are not broadcast. Was it a last, smaller batch? Drop it, or pad it."],
    Reason.DTYPE: ["Values are never cast across ranks."],
    Reason.CALL_SITE: _ORDER,
    Reason.EXITED: _STEPS,
    Reason.UNMATCHED: ["Every send needs a receive on the other rank with the same tag, and every receive a send."],
    Reason.GROUP: ["Every rank must call new_group for every group, in the same order, whether it is a member or not."],
    Reason.CYCLE: ["Issue the collectives of process groups in the same order on every rank, each in the same group."],
}


@replicas_called("rank")
def report_on(snapshot: Snapshot, *, overdue: Overdue | None = None) -> CollectiveReport:
    """Return the report on a snapshot of a torch.distributed program."""
    report = analyse(snapshot, overdue=overdue)
    text = report.text.removesuffix("\n".join(["", *report.advice]))
    if f"'{NEW_GROUP}'" in (report.group or ""):
        report = replace(report, reason=Reason.GROUP)
    advice = _advice(report)
    return replace(report, text="\n".join([text, *advice]), advice=tuple(advice))


def _advice(report: CollectiveReport) -> list[str]:
    if any(each.state is ReplicaState.FAILED for each in report.replicas):
        return []  # its error says more
    if report.reason is Reason.GROUP or report.sequence_number < 0:
        return _ADVICE[Reason.GROUP]
    if "of group 'messages " in report.text and report.reason is not Reason.UNMATCHED:
        return _PAIRS
    if report.reason is Reason.CALL_SITE:
        return _ORDER
    by_kind = _ADVICE.get(report.divergence.kind) if report.divergence is not None else None
    return by_kind or _ADVICE.get(report.reason, [])


@lru_cache(maxsize=1 << 16)
def call_of_tensors(
    kind: str, shapes: tuple[tuple[int | None, ...], ...], dtypes: tuple[str, ...], **more: Any
) -> Call:
    """Return a call on a tensor or a list of tensors; ``more`` are other fields of `Call`."""
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
