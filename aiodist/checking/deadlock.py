"""The report on a run that cannot go on: what each replica waits for, and where."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiodist.collective.account import ids, shown
from aiodist.collective.verdict import snapshot
from aiodist.replica.stacks import await_chain
from aiodist.vocabulary.reports import CollectiveReport, Location, Reason, ReplicaReport, ReplicaState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiodist.checking.loop import ControlledLoop
    from aiodist.collective.group import SyncGroup

_SHOWN = 8
_PROOF = "No timer is pending, and no thread, subprocess or socket is at work: nothing can wake them."


def report_on(loop: ControlledLoop, group: SyncGroup | None, seconds: float | None) -> CollectiveReport:
    """Return the report on a run that cannot go on.

    Args:
        loop: the loop on which it stands still.
        group: its sync group; None when no replica runs.
        seconds: how long it took, when that was too long; None when it is proved that nothing can run.
    """
    replicas = snapshot(group) if group is not None else ()
    number, suspects = _where(group)
    reason = Reason.DEADLOCK if seconds is None else Reason.TIMEOUT
    lines = [_headline(replicas, seconds), *_waits(loop, replicas)]
    if seconds is None:
        lines.append(_PROOF)
    return CollectiveReport(reason, number, replicas, suspects, "\n".join(lines))


def _where(group: SyncGroup | None) -> tuple[int, tuple[int, ...]]:
    """Return the number of the first collective that is missing someone, and who; all where none is begun."""
    if group is None:
        return 0, ()
    number = min(group.open) if group.open else min(member.sequence for member in group.members)
    missing = tuple(m.replica_id for m in group.members if not m.arrived_at(number))
    return number, missing or tuple(range(group.size))


def _headline(replicas: Sequence[ReplicaReport], seconds: float | None) -> str:
    what = "nothing can run any more" if seconds is None else f"the run has taken longer than {seconds:g} s"
    waiting = [r.replica_id for r in replicas if r.state is ReplicaState.WAITING]
    elsewhere = [r.replica_id for r in replicas if r.state is ReplicaState.RUNNING]
    parts = [f"{ids(waiting)} wait{'s' * (len(waiting) == 1)} in a collective"] if waiting else []
    if elsewhere:
        parts.append(f"{ids(elsewhere)} wait{'s' * (len(elsewhere) == 1)} {'elsewhere' if waiting else 'outside any'}")
    return f"{what}: {', '.join(parts)}" if parts else what


def _waits(loop: ControlledLoop, replicas: Sequence[ReplicaReport]) -> list[str]:
    """Return a line for each place at which something waits."""
    places: dict[tuple[str, Location | None], list[int]] = {}
    for replica in replicas:
        if not replica.state.ended:
            where = replica.location or (replica.stack[-1] if replica.stack else None)
            places.setdefault((replica.call or "waits", where), []).append(replica.replica_id)
    lines = [_line(ids(members), call, where) for (call, where), members in places.items()]
    if not replicas:
        stacks = [await_chain(task.get_coro()) for task in asyncio.all_tasks(loop)]
        lines = sorted(_line("a task", "waits", stack[-1]) for stack in stacks if stack)
    return lines[:_SHOWN] + ([f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])


def _line(who: str, call: str, where: Location | None) -> str:
    return f"  {who}  {call}   {'at ' + shown(where) if where else ''}".rstrip()
