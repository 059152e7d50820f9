"""The outcome of a run: the one error that it raises if replicas failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiodist._core.errors import CollectiveError
from aiodist._core.ledger import Ledger, Replica
from aiodist._core.text import conjugated, error_line, grouped, ids, ids_briefly, place
from aiodist._runtime.stacks import is_plumbing

_MOST_NOTES = 4


def note_of_failure(ledger: Ledger, replica: Replica, device: str, *, first: bool) -> str:
    """Return which replica failed and, for the first failure, where the others were waiting at that moment."""
    note = f"replica {replica.id} of {ledger.root.size} on {device}"
    for slot in ledger.open_slots() if first else ():
        waiting = [m for m in slot.group.members if m.replica is not replica and m.has_posted(slot)]
        if waiting and not slot.matched and slot.number >= 0:
            position = waiting[0].position
            what = f"was waiting in {slot.text_of(position)} at {place(slot.post_of(position).location)}"
            return f"{note}; {ids(m.replica_id for m in waiting)} {conjugated(what, len(waiting))}"
    return note


def origin_of(error: BaseException) -> Exception | None:
    """Return the exception that a replica was handling when the run's error was raised in it; None if there was none.

    If a child task was handling it, the run's error is in an exception group.
    """
    left, seen = [error], set[int]()
    while left:
        each = left.pop(0)
        if each is not error and isinstance(each, Exception) and not is_only(each, CollectiveError):
            return each
        further = [each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
        left += [inner for inner in further if inner is not None and id(inner) not in seen]
        seen.add(id(each))
    return None


def is_only(error: BaseException, *types: type[BaseException]) -> bool:
    """Return whether an error is of these types, or an exception group of such errors only."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_only(inner, *types) for inner in error.exceptions)
    return isinstance(error, types)


def without_cancellations(error: BaseException, cancelled: type[BaseException]) -> BaseException:
    """Return an error without the cancellations in its exception group.

    A nursery of trio raises, in one group, the failure and the cancellations of the tasks that were stopped for it. The
    remaining group has the same traceback; a cancellation alone is returned unchanged.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    found, rest = error.split(cancelled)
    return error if found is None or rest is None else rest  # a group without cancellations stays the same object


def interrupt_in(error: BaseException) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that is an error, or in its group, or the context of a collective's error; None if none is."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(interrupt_in, error.exceptions)), None)
    if isinstance(error, CollectiveError) and error.__context__ is not None:
        return interrupt_in(error.__context__)
    return error if isinstance(error, KeyboardInterrupt) else None


def without_frames_before(error: BaseException) -> BaseException:
    """Return an error whose traceback begins with the program's frames, not an event loop's or ours."""
    traceback = error.__traceback__
    while traceback is not None and (
        is_plumbing(traceback.tb_frame) or str(traceback.tb_frame.f_globals.get("__name__")).startswith("importlib")
    ):
        traceback = traceback.tb_next
    return error.with_traceback(traceback)


def error_of_run(
    reported: CollectiveError | None,
    failures: Mapping[int, BaseException],
    handled: Mapping[int, Exception],
) -> BaseException | None:
    """Return the error that a run raises; None if nothing failed.

    A KeyboardInterrupt or the like comes before everything else. Next comes the order check's report, with the errors
    that replicas raised while they unwound in its notes, and the exception that the first suspect was handling as its
    cause. Then come the replicas' own failures: if all have one type, the first as itself, with the others in its
    notes; otherwise all as a group.
    """
    lowest = {id(failures[replica_id]): replica_id for replica_id in sorted(failures, reverse=True)}
    distinct = {replica_id: failures[replica_id] for replica_id in sorted(lowest.values())}
    for error in distinct.values():
        if not isinstance(error, Exception):
            return error
    if reported is not None:
        _add_notes(
            reported, [f"while it unwound, replica {i} raised {error_line(error)}" for i, error in distinct.items()]
        )
        odd = [replica_id for replica_id in reported.report.suspects if replica_id in handled]
        if odd:
            reported.__cause__ = handled[odd[0]]
            reported.add_note(f"replica {odd[0]} was handling {error_line(handled[odd[0]])}")
        return reported
    if not distinct:
        return None
    errors = [error for error in distinct.values() if isinstance(error, Exception)]
    (_, first), *others = distinct.items()
    if any(type(error) is not type(first) for _, error in others):
        return ExceptionGroup("several replicas failed", errors)
    alike = grouped((error_line(error), replica_id) for replica_id, error in others)
    _add_notes(first, [f"{ids_briefly(replicas)} failed, too: {text}" for text, replicas in alike.items()])
    return first


def _add_notes(error: BaseException, notes: Sequence[str]) -> None:
    for note in notes[:_MOST_NOTES]:
        error.add_note(note)
    if len(notes) > _MOST_NOTES:
        error.add_note(f"… and {len(notes) - _MOST_NOTES} more like these")
