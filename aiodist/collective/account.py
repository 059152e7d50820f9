"""The account of a disagreement, written for a person: verdict, who asked for what, what differs, where they parted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aiodist._core.report import CallRecord, Parting, Reason, ReplicaReport, ReplicaState
from aiodist.collective import hints
from aiodist.collective.findings import Findings, calls_made
from aiodist.collective.parting import branch_line, diff
from aiodist.collective.signature import KIND
from aiodist.collective.what_differs import what_differs
from aiodist.collective.who import who
from aiodist.collective.wording import ids_briefly, shown_file


def write(findings: Findings) -> str:
    """Return the whole account."""
    lines = [_headline(findings), *who(findings), *what_differs(findings)]
    lines += [*findings.time_limits, *_circle(findings), *_last_agreement(findings)]
    lines += [*_how_they_parted(findings), *hints.hints(findings)]
    return "\n".join(lines)


def _circle(findings: Findings) -> list[str]:
    circle = findings.look.circle
    return [f"{circle}."] if circle and findings.reason is Reason.TIMEOUT else []


def _how_they_parted(findings: Findings) -> list[str]:
    if findings.sides is None:
        return []
    divergence = findings.divergence
    lines = [*diff(*findings.sides)] + ([divergence.text] if divergence is not None else [])
    if divergence is None or divergence.parting not in (Parting.LEFT_LOOP, Parting.OTHER_BRANCH):
        branch = branch_line(*findings.sides)
        lines += [branch] if branch is not None else []
    return lines


def _ids(replicas: Collection[int]) -> str:
    return ids_briefly(replicas, most_runs=12)


def _headline(findings: Findings) -> str:
    number = _collective(findings)
    if findings.reason is Reason.EXITED:
        gone = [r.replica_id for r in findings.replicas if _left_before(findings, r)]
        return f"{_ids(gone)} ended without {number}, which {_others(findings, gone)}"
    if findings.reason is Reason.ABANDONED and not findings.abandoned:
        left, what = findings.let_go, f"collective #{findings.sequence_number} of it"
        return f"{_ids(left)} let go of {findings.group} before {what}, which {_others(findings, left)}"
    if findings.reason is Reason.ABANDONED:
        return _abandoned(findings, number)
    if findings.reason is Reason.TIMEOUT:
        if not findings.timeout_seconds:
            return f"{number} cannot be completed: {_what_is_late(findings)}"
        return f"{number} timed out after {findings.timeout_seconds:.3g} s: {_what_is_late(findings)}"
    return f"replicas disagree at {number}"


def _abandoned(findings: Findings, number: str) -> str:
    if findings.refusals:
        raised = next(iter(findings.refusals.values()))
        return f"{_ids(findings.refusals)} did not come to {number}, for the call raised there: {raised}"
    was = "was" if len(findings.abandoned) == 1 else "were"
    return f"{_ids(findings.abandoned)} {was} cancelled out of {number} before it was complete"


def _collective(findings: Findings) -> str:
    if findings.sequence_number < 0:
        return f"the creation of {findings.group}"
    number = f"collective #{findings.sequence_number}"
    if findings.joining:
        number = f"the join ({number})"
    return f"{number} of {findings.group}" if findings.group is not None else number


def _left_before(findings: Findings, replica: ReplicaReport) -> bool:
    if findings.sequence_number < 0:
        return replica.state.ended and replica.call is None
    return replica.state.ended and calls_made(replica) <= findings.sequence_number


def _others(findings: Findings, gone: Sequence[int]) -> str:
    waiting = [r.replica_id for r in findings.replicas if r.state is ReplicaState.WAITING]
    if waiting and findings.sequence_number >= 0:
        return f"{_wait(waiting)} in"
    called = "made" if findings.sequence_number < 0 else "called"
    return f"{_ids({r.replica_id for r in findings.replicas} - set(gone))} {called}"


def _what_is_late(findings: Findings) -> str:
    arrived = {replica_id for members, _ in findings.camps for replica_id in members}
    missing = {r.replica_id for r in findings.replicas} - arrived
    if not missing:
        merges = findings.camps[0][1][KIND].name == "merge_call"
        return "its merge function has not returned" if merges else "all have arrived, and their values have not"
    return f"{_ids(missing)} {'has' if len(missing) == 1 else 'have'} not arrived, {_wait(arrived)} in it"


def _wait(replicas: Collection[int]) -> str:
    if not replicas:
        return "nobody waits"
    return f"{_ids(replicas)} wait{'s' if len(replicas) == 1 else ''}"


def _last_agreement(findings: Findings) -> list[str]:
    last = next((r for r in reversed(_common_history(findings)) if r.sequence_number < findings.sequence_number), None)
    if last is None:
        whole = "run" if findings.group is None else "group"
        return [f"This is the first collective of the {whole}."] if findings.sequence_number == 0 else []
    where = f"{shown_file(last.location.file)}:{last.location.line}"
    return [f"All replicas agreed up to #{last.sequence_number}: {last.call} at {where}."]


def _common_history(findings: Findings) -> tuple[CallRecord, ...]:
    return min((replica.history for replica in findings.replicas), key=len)
