"""What the dumps of a job say: a snapshot, the report on it, and what they cannot show.

Each process group is a group of the snapshot, and torch's sequence number is the number of a slot, counted from 0. What
dumps do not contain is not compared: reduce op, root and values. Places are only shown, because they differ in correct
programs, too. A send or receive that has not ended is a slot of its two ranks, so that ranks that wait for each other
are found whatever they wait in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from aiodist._core.analysis import find_cycle
from aiodist._core.call import Call, OrderCheck, Post
from aiodist._core.ledger import HISTORY
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import GroupRecord, MemberRecord, Overdue, ReplicaFacts, SlotRecord, Snapshot
from aiodist._core.terms import Reason
from aiodist._core.text import count, grouped, ids_briefly, place, replicas_called
from aiodist._torch.dumps import Dump, DumpError, Entry
from aiodist._torch.report import report_on

_DEFAULT: Final = "default_pg"
_NEED_ALL: Final = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier")
_MOST_GROUPS: Final = 8
_MOST_LAST: Final = 3
_MOST_RANKS: Final = 1 << 17


class Explanation(NamedTuple):
    """What the dumps of a job say."""

    report: CollectiveReport | None  # None if no rank waits and all calls agree
    notes: tuple[str, ...]  # where ranks wait, what else the dumps say, and what they cannot show
    text: str  # all of it

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the JSON."""
        report = None if self.report is None else self.report.to_dict()
        return {"report": report, "notes": list(self.notes), "text": self.text}


class _ProcessGroup(NamedTuple):
    """A process group of the job."""

    name: str  # torch's
    title: str | None  # for the user; None for the group of all ranks
    members: tuple[int, ...]


@replicas_called("rank")
def explain(dumps: Sequence[Dump]) -> Explanation:
    """Return what the dumps of a job say, of which some may be missing; a DumpError if they are not of one job."""
    of = {dump.rank: dump for dump in dumps}
    groups = _process_groups(dumps)
    records = [_record(group, number, of) for number, group in enumerate(groups, -1)]
    records += _messages(groups, dumps)
    facts = tuple(
        ReplicaFacts(rank, of[rank].file.name) if rank in of else ReplicaFacts(rank, "no dump", unknown=True)
        for rank in groups[0].members
    )
    waits = [(record, slot) for record in records for slot in record.open if slot.waiting]
    blocked = tuple(sorted({rank for _, slot in waits for rank in slot.waiting}))
    snapshot = Snapshot(OrderCheck.SIGNATURE, facts, tuple(records), blocked=blocked)
    report, overdue = None, None
    text = f"no rank waits in a collective, and the calls of {ids_briefly(of, 12)} agree"
    disagree = any(len({post.call for post, _ in slot.posts}) > 1 for record in records for slot in record.open)
    if waits and not disagree and not find_cycle(snapshot):
        # The cause is a collective whose missing ranks wait in no other
        record, slot = min(waits, key=lambda each: (len(_missing(*each).intersection(blocked)), not _missing(*each)))
        overdue = Overdue(record.key, slot.number, 0.0)
    if waits or disagree:
        report = report_on(snapshot, overdue=overdue)
        text = report.text
    notes = (*_waiting(records), *_notes(report, records, groups, of))
    return Explanation(report, notes, "\n".join([text, "", *notes]))


def _process_groups(dumps: Sequence[Dump]) -> list[_ProcessGroup]:
    """Return the job's process groups, that of all ranks first; if no dump contains the members, those that called."""
    known: dict[tuple[str, tuple[int, ...]], str] = {}
    callers: dict[tuple[str, str], list[int]] = {}
    for dump in dumps:
        for name, (description, members) in dump.groups.items():
            if not members:
                callers.setdefault((name, description), []).append(dump.rank)
            elif dump.rank in members or name not in {*dump.calls, *(entry.group for _, entry in dump.messages)}:
                known[name, members] = description
            else:
                raise DumpError(f"{dump.file} has calls in group {name!r}, of which {dump.rank} is not a member")
    sizes = {len(members) for (_, members), description in known.items() if description == _DEFAULT}
    if len(sizes) > 1:
        raise DumpError(f"the dumps are of different jobs, of {' and '.join(map(str, sorted(sizes)))} ranks")
    highest = max([dump.rank for dump in dumps] + [members[-1] for _, members in known])
    size = max(sizes, default=highest + 1)
    if highest >= size or size > _MOST_RANKS:
        raise DumpError(f"expected ranks below {min(size, _MOST_RANKS)}, as in the job, got rank {highest}")
    world = tuple(range(size))
    for (name, description), there in callers.items():
        known[name, world if description == _DEFAULT else tuple(there)] = description
    default = next((name for (name, _), description in known.items() if description == _DEFAULT), "0")
    others = [
        _ProcessGroup(name, description if description not in {"", "undefined"} else name, members)
        for (name, members), description in sorted(known.items())
        if description != _DEFAULT
    ]
    return [_ProcessGroup(default, None, world), *others]


def _first(group: _ProcessGroup, of: Mapping[int, Dump]) -> int:
    """Return torch's number of a group's first call; NCCL and gloo count from 1."""
    return 0 if any(0 in of[rank].calls.get(group.name, ()) for rank in group.members if rank in of) else 1


def _record(group: _ProcessGroup, ordinal: int, of: Mapping[int, Dump]) -> GroupRecord:
    """Return the calls of a group's members, by sequence number."""
    rows = {rank: of[rank].calls.get(group.name, {}) for rank in group.members if rank in of}
    first = _first(group, of)
    kept = max((min(row) for rank, row in rows.items() if row and of[rank].dropped), default=0)
    newest = {rank: max(row, default=first - 1) for rank, row in rows.items()}
    history: deque[SlotRecord] = deque(maxlen=HISTORY)
    unended: list[SlotRecord] = []
    for number in sorted(set().union(*rows.values())):
        if number < kept or any(number not in row and newest[rank] > number for rank, row in rows.items()):
            continue  # a rank's call has been dropped, or was never recorded
        column = grouped((row[number], rank) for rank, row in rows.items() if number in row)
        late = any(number not in row for row in rows.values())
        slot = _slot(number - first, column, late=late)
        alike = len({entry.meaning for entry in column}) == 1
        (history if alike and not late and not slot.waiting else unended).append(slot)
    members = tuple(MemberRecord(rank, newest.get(rank, first - 1) + 1 - first) for rank in group.members)
    return GroupRecord((group.members, group.title, ordinal), None, members, tuple(history), tuple(unended))


def _slot(number: int, column: Mapping[Entry, list[int]], *, late: bool) -> SlotRecord:
    calls: dict[Hashable, Call] = {}
    posts: dict[Post, list[int]] = {}
    waiting: list[int] = []
    for entry, there in column.items():
        call = calls.setdefault(entry.meaning, entry.post.call)
        posts.setdefault(entry.post._replace(call=call), []).extend(there)
        if not entry.done or (late and call.kind.startswith(_NEED_ALL)):  # else it has ended in an error
            waiting += there
    posted = tuple((post, tuple(sorted(there))) for post, there in posts.items())
    return SlotRecord(number, posted, tuple(sorted(waiting)))


def _messages(groups: Sequence[_ProcessGroup], dumps: Sequence[Dump]) -> Iterator[GroupRecord]:
    """Yield a group for each two ranks with the sends and receives between them that have not ended."""
    found: dict[tuple[str, int, int], dict[int, list[Post]]] = {}
    for dump in dumps:
        for _, entry in dump.messages:
            own = (each.members for each in groups if each.name == entry.group and dump.rank in each.members)
            members = next(own, ())
            source, target, sends = entry.message or (0, 0, False)
            if max(source, target) >= len(members):
                raise DumpError(f"{dump.file} has a message to or from a rank that is not in its process group")
            source, target = members[source], members[target]
            call = replace(entry.post.call, role=f"send(dst={target})" if sends else f"recv(src={source})")
            posts = found.setdefault((entry.group, source, target), {})
            posts.setdefault(dump.rank, []).append(entry.post._replace(call=call))
    for number, ((_, source, target), posts) in enumerate(sorted(found.items())):
        if source == target or not posts.keys() <= {source, target}:
            raise DumpError(f"messages from rank {source} to {target} are in dumps of ranks {sorted(posts)}")
        slots = []
        for index in range(max(map(len, posts.values()))):
            there = [(each[index], (rank,)) for rank, each in sorted(posts.items()) if index < len(each)]
            slots.append(SlotRecord(index, tuple(there), tuple(rank for _, (rank,) in there)))
        ends = tuple(sorted((source, target)))
        record = tuple(MemberRecord(rank, len(posts.get(rank, ()))) for rank in ends)
        yield GroupRecord((ends, f"messages {source}->{target}", number), None, record, (), tuple(slots))


def _missing(group: GroupRecord, slot: SlotRecord) -> set[int]:
    return set(group.key[0]).difference(*(there for _, there in slot.posts))


def _waiting(records: Iterable[GroupRecord]) -> Iterator[str]:
    """Yield a line for each process group that ranks wait in, if there are several."""
    lines = []
    for record in records:
        slot = next((slot for slot in record.open if slot.waiting), None)
        if slot is not None:
            late = _missing(record, slot)
            call = slot.posts[0][0].call if len(slot.posts) == 1 else "different calls"
            where = f"{record.label() or 'all ranks'}, #{slot.number} {call}: {ids_briefly(slot.waiting)}"
            lines.append(f"  {where}{f'; without {ids_briefly(late)}' if late else ''}")
    if len(lines) > 1:
        yield "Where ranks wait, the first call of each process group that has not ended:"
        yield from lines[:_MOST_GROUPS]
        if len(lines) > _MOST_GROUPS:
            yield f"  … and in {count(len(lines) - _MOST_GROUPS, 'more process group')}"
        yield ""


def _notes(
    report: CollectiveReport | None,
    records: Sequence[GroupRecord],
    groups: Sequence[_ProcessGroup],
    of: Mapping[int, Dump],
) -> Iterator[str]:
    absent = [rank for rank in groups[0].members if rank not in of]
    if absent:
        yield f"There is no dump of {ids_briefly(absent, 12)}."
    if report is not None and report.reason is not Reason.CYCLE:
        for group, record in zip(groups, records, strict=False):
            if record.label() == report.group:
                named = "" if group.title is None else f" in process group {group.name!r}"
                number = report.sequence_number
                yield f"Collective #{number} is torch's sequence number {number + _first(group, of)}{named}."
                break
        missing = [each.replica_id for each in report.replicas if each.call is None and each.replica_id in of]
        for rank in missing[:_MOST_LAST]:
            last = of[rank].last
            where = "" if last is None else f"The latest call of rank {rank} is {last.call} at {place(last.location)}."
            yield where or f"No call of rank {rank} is recorded."
    dropped = [dump.rank for dump in of.values() if dump.dropped]
    if dropped:
        yield f"Older calls of {ids_briefly(dropped)} have been dropped: TORCH_FR_BUFFER_SIZE sets how many are kept."
    if any(dump.is_json for dump in of.values()):
        yield "JSON dumps do not contain the lines of the program; pickled ones do."
    if any("gloo" in dump.backends for dump in of.values()):
        yield "Gloo does not record sends, receives and monitored_barrier, nor whether a call ended in an error."
        if len(groups) > 1:
            yield "Nor does it record the members of process groups: the ranks that called count as members."
    yield "Dumps do not contain reduce ops, roots and values, nor where a rank is when it is in no collective."
