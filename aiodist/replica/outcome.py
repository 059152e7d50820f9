"""The outcome of a run: the one error that comes out of it, when replicas failed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from aiodist._core.errors import CollectiveError
from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.collective.member import JOIN, Member
from aiodist.collective.wording import ids, shown_file

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup


def note_of_failure(group: SyncGroup, member: Member) -> str:
    """Say which replica failed, and where the others were waiting at that moment."""
    note = f"replica {member.replica_id} of {group.world_size} on {member.device}"
    waits = (_who_waits(each, member.replica_id) for each in group.groups())
    return "; ".join([note, *filter(None, waits)][:2])


def _who_waits(group: SyncGroup, failed: int) -> str | None:
    """Say who waits in the first open collective of a group, and where."""
    for number in sorted(group.open):
        meeting = group.open[number]
        others = [m for m in group.members if m.replica_id != failed and not m.stands_aside(number)]
        waiting = [m.replica_id for m in others if m.arrived_at(number)]
        if waiting and not meeting.agreed and number >= 0:
            signature, code, offset = meeting.call_of(waiting[0])
            place = location(code, offset)
            were = "was" if len(waiting) == 1 else "were"
            name = call_text(signature).partition("(")[0]
            call = f"{name} #{number}" if number < JOIN else name
            where = f"{call} of {group.label}" if group.label else call
            return f"{ids(waiting)} {were} waiting in {where} at {shown_file(place.file)}:{place.line}"
    return None


def origin_of(error: BaseException) -> Exception | None:
    """Return the exception that a replica was handling when it ran into the group's verdict; None when it was not."""
    seen: list[BaseException] = []
    inner = error.__context__
    while inner is not None and not any(inner is known for known in seen):
        if isinstance(inner, Exception) and not isinstance(inner, (CollectiveError, ExceptionGroup)):
            return inner
        seen.append(inner)
        inner = inner.__context__
    return None


def error_of(
    verdict: CollectiveError | None,
    failures: Mapping[int, BaseException],
    handled: Mapping[int, Exception] = MappingProxyType({}),
) -> BaseException | None:
    """Return what comes out of a run.

    Args:
        verdict: what the sync group found, if it was in trouble.
        failures: by replica id, what replicas raised on their own: not the verdict, nor its echoes.
        handled: by replica id, what replicas were handling when the verdict reached them.

    Returns:
        An exception that is no `Exception` (KeyboardInterrupt) before everything else; then the verdict, what
        replicas raised while they unwound in its notes, and what the first suspect was handling as its cause; then the
        replicas' own failures, one as itself with those of its type in its notes, several types as a group. None when
        nothing failed.
    """
    distinct = _distinct(failures)
    for error in distinct.values():
        if not isinstance(error, Exception):
            return error
    if verdict is not None:
        for replica_id, error in distinct.items():
            verdict.add_note(f"while it unwound, replica {replica_id} raised {_brief(error)}")
        odd = [replica_id for replica_id in verdict.report.suspects if replica_id in handled]
        if odd:
            verdict.__cause__ = handled[odd[0]]
            verdict.add_note(f"replica {odd[0]} was handling {_brief(handled[odd[0]])}")
        return verdict
    if not distinct:
        return None
    errors = [error for error in distinct.values() if isinstance(error, Exception)]
    first, *others = distinct.items()
    if any(type(error) is not type(first[1]) for _, error in others):
        return ExceptionGroup("several replicas failed", errors)
    for replica_id, error in others:
        first[1].add_note(f"replica {replica_id} failed, too: {_brief(error)}")
    return first[1]


def _distinct(failures: Mapping[int, BaseException]) -> dict[int, BaseException]:
    """Return the failures by ascending replica id, an exception that several replicas raised only once."""
    seen: dict[int, BaseException] = {}
    for replica_id in sorted(failures):
        if not any(error is failures[replica_id] for error in seen.values()):
            seen[replica_id] = failures[replica_id]
    return seen


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
