"""What the dumps of a job say: a snapshot, the report on it, and what they cannot show.

Each process group is a group of the snapshot, and torch's sequence number is the number of a slot, counted from 0. What
dumps do not record is not compared: reduce op, root and values; and calls of correct programs stand at different lines,
so places are shown and not compared. A send or receive that has not ended is a slot of the two ranks that it is
between, so that those who wait for each other are found whatever they wait in.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from aiodist._core.analysis import analyse, find_cycle
from aiodist._core.call import Call, OrderCheck, Post
from aiodist._core.ledger import HISTORY
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import GroupKey, GroupRecord, MemberRecord, Overdue, ReplicaFacts, SlotRecord, Snapshot
from aiodist._core.terms import Reason
from aiodist._core.text import count, ids_briefly, place, shortened
from aiodist._torch.dumps import Dump, DumpError, Entry, State
from aiodist._torch.report import PlaceOrder, in_ranks, ranks, report_on_swap

_DEFAULT: Final = "default_pg"
_WITHOUT_ROOT: Final = ("all_reduce", "allreduce", "all_gather", "reduce_scatter")
_UNNAMED: Final = frozenset(["", "undefined"])
_MOST_GROUPS: Final = 8
_MOST_LAST: Final = 3
_MOST_RANKS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the dumps of a job say; `known` are the ranks that have a dump."""

    report: CollectiveReport | None  # None where nobody waits and all calls agree
    waiting: tuple[str, ...]  # where ranks wait, a line for each process group, if there is more than one
    notes: tuple[str, ...]  # what else the dumps say, and what they cannot show
    known: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as a dict of the types that JSON has."""
        report = None if self.report is None else self.report.to_dict()
        return {"report": report, "waiting": list(self.waiting), "notes": list(self.notes), "text": str(self)}

    def __str__(self) -> str:
        agree = f"no rank waits in a collective, and the calls of {ids_briefly(self.known, 12)} agree"
        found = str(self.report) if self.report is not None else ranks(agree)
        return "\n".join([found, *(["", *self.waiting] if self.waiting else []), "", *self.notes])


@dataclass(slots=True)
class _ProcessGroup:
    """A process group of the job."""

    name: str  # what torch calls it, the same on all members
    title: str  # what people call it
    members: tuple[int, ...]
    told: bool  # the dumps say which the members are
    number: int  # tells it from others of that title and these members; -1 for the group of all ranks
    record: GroupRecord = field(init=False)  # its calls, once they are laid beside each other
    first: int = 1  # torch's sequence number of slot 0

    @property
    def is_default(self) -> bool:
        """Whether all ranks are in it."""
        return self.number < 0

    @property
    def key(self) -> GroupKey:
        """What tells it from others in a snapshot."""
        return self.members, None if self.is_default else self.title, self.number

    @property
    def label(self) -> str | None:
        """What reports call it."""
        label = self.record.label()
        return None if label is None else ranks(label)


def explain(dumps: Sequence[Dump], *, world_size: int | None = None) -> Explanation:
    """Return what the dumps of a job say, of which some may be missing; a size is for jobs whose dumps do not say it.

    Raises:
        DumpError: they are not of one job.
    """
    groups = _process_groups(dumps, world_size)
    of = {dump.rank: dump for dump in dumps}
    differ = [_lay_beside(group, of) for group in groups]
    messages = list(_messages(groups, dumps))
    disagree = any(differ) or any(
        len({post.call for post, _ in slot.posts}) > 1 for record in messages for slot in record.open
    )
    records = [group.record for group in groups] + messages
    facts = tuple(
        ReplicaFacts(rank, of[rank].file.name) if rank in of else ReplicaFacts(rank, "no dump", unknown=True)
        for rank in groups[0].members
    )
    blocked = sorted({rank for record in records for slot in record.open for rank in slot.waiting})
    snapshot = Snapshot(OrderCheck.SIGNATURE, facts, tuple(records), blocked=tuple(blocked))
    overdue = None if disagree or find_cycle(snapshot) else _cause(snapshot)
    report = in_ranks(analyse(snapshot, overdue=overdue)) if disagree or blocked else None
    if report is not None and report.reason is Reason.TIMEOUT:
        report = _without_members(report, groups)
    swap = _on_swap(snapshot)
    notes = list(_notes(report or swap, groups, of))
    if report is not None and swap is not None and swap.divergence is not None:
        notes.insert(0, f"Besides, at #{swap.sequence_number} of {swap.group or 'all ranks'}: {swap.divergence.text}")
    untold = {group.key for group in groups if not group.told}
    waiting = tuple(map(ranks, _waiting(records, untold)))
    return Explanation(report or swap, waiting, tuple(map(ranks, notes)), tuple(sorted(of)))


# Process groups.


def _process_groups(dumps: Sequence[Dump], world_size: int | None) -> list[_ProcessGroup]:
    """Return the job's process groups, the one of all ranks first."""
    told: dict[tuple[str, tuple[int, ...]], str] = {}
    untold: dict[str, tuple[str, list[int]]] = {}
    for dump in dumps:
        _check_membership(dump)
        for name, (description, members) in dump.groups.items():
            if members is not None:
                told.setdefault((name, members), description)
            else:
                untold.setdefault(name, (description, []))[1].append(dump.rank)
    for name, (description, own) in untold.items():
        there = {rank for other, members in told if other == name for rank in members}
        if not there.issuperset(own):
            told[name, ()] = description
    world, name = _world(dumps, told, world_size)
    groups = [_ProcessGroup(name, _DEFAULT, world, told=True, number=-1)]
    for number, ((name, members), description) in enumerate(sorted(told.items())):
        if name == groups[0].name and members in ((), world):
            continue
        title = name if description in _UNNAMED else description
        ids = members or tuple(untold[name][1])
        groups.append(_ProcessGroup(name, title, ids, bool(members), number))
    return groups


def _check_membership(dump: Dump) -> None:
    for name in dump.calls.keys() | {message.group for message in dump.messages}:
        if dump.rank not in (dump.groups[name].ranks or [dump.rank]):
            raise DumpError(f"{dump.file} has calls in process group {name!r}, of which {dump.rank} is not a member")


def _world(
    dumps: Sequence[Dump], told: Mapping[tuple[str, tuple[int, ...]], str], world_size: int | None
) -> tuple[tuple[int, ...], str]:
    """Return all ranks, and the name of the process group that they are in.

    Raises:
        DumpError: the dumps are of different jobs, or of more ranks than the job had.
    """
    default = [(name, members) for (name, members), description in told.items() if description == _DEFAULT]
    sizes = {len(members) for _, members in default if members}
    if len(sizes) > 1:
        raise DumpError(f"the dumps are of different jobs, of {' and '.join(map(str, sorted(sizes)))} ranks")
    highest = max([dump.rank for dump in dumps] + [rank for _, members in told for rank in members])
    size = max(sizes, default=None) or world_size or highest + 1
    if highest >= size:
        other = next((str(dump.file) for dump in dumps if dump.rank == highest), "a process group")
        raise DumpError(f"{other} is of rank {highest}, but the job had {size} ranks")
    if size > _MOST_RANKS:
        raise DumpError(f"a job of {size} ranks: at most {_MOST_RANKS} can be explained")
    return tuple(range(size)), default[0][0] if default else "0"


# Calls beside each other.


def _lay_beside(group: _ProcessGroup, of: Mapping[int, Dump]) -> bool:
    """Lay the calls of a group's members beside each other; return whether some differ."""
    known = [rank for rank in group.members if rank in of]
    rows = {rank: of[rank].calls.get(group.name, {}) for rank in known}
    numbers = sorted(set().union(*rows.values()))
    if numbers and numbers[0] == 0:
        group.first = 0
    kept = max((min(row) for rank, row in rows.items() if row and of[rank].dropped), default=group.first)
    newest = {rank: max(row, default=-1) for rank, row in rows.items()}
    history: deque[SlotRecord] = deque(maxlen=HISTORY)
    waited: list[SlotRecord] = []
    disagree = False
    for number in numbers:
        column = {rank: row.get(number) for rank, row in rows.items()}
        kinds = set(column.values())
        if number < kept or (None in kinds and any(e is None and newest[r] > number for r, e in column.items())):
            continue  # what is not there has been dropped, or was never recorded
        own = [each for each in kinds if each is not None]
        differ = len({each.meaning for each in own}) > 1
        disagree |= differ
        done = None not in kinds and not differ and all(each.state is State.DONE for each in own)
        (history if done else waited).append(_slot(number - group.first, column))
    members = tuple(MemberRecord(rank, newest[rank] + 1 - group.first if rank in of else 0) for rank in group.members)
    group.record = GroupRecord(group.key, None, members, tuple(history), tuple(waited))
    return disagree


def _slot(number: int, column: Mapping[int, Entry | None]) -> SlotRecord:
    found: dict[Entry, list[int]] = {}
    for rank, entry in column.items():
        if entry is not None:
            found.setdefault(entry, []).append(rank)
    calls: dict[Hashable, Call] = {}
    posts: dict[Post, list[int]] = {}
    waiting: list[int] = []
    for entry, there in found.items():
        call = calls.setdefault(entry.meaning, entry.post.call)
        posts.setdefault(entry.post._replace(call=call), []).extend(there)
        waiting += there if entry.state is not State.DONE else ()
    return SlotRecord(
        number, tuple((post, tuple(sorted(there))) for post, there in posts.items()), tuple(sorted(waiting))
    )


def _messages(groups: Sequence[_ProcessGroup], dumps: Sequence[Dump]) -> Iterator[GroupRecord]:
    """Yield a group of two for all sends and receives between two ranks that have not ended."""
    found: dict[tuple[str, int, int], dict[int, list[Post]]] = {}
    for dump in dumps:
        for message in dump.messages:
            group = next(g for g in groups if g.name == message.group and dump.rank in g.members)
            try:
                source, target = (sorted(group.members)[i] for i in (message.source, message.target))
            except IndexError:
                source = target = dump.rank
            if dump.rank != (source if message.sends else target) or source == target:
                title = shortened(group.title, 40)
                raise DumpError(f"{dump.file} has a message from {message.source} to {message.target} of {title}")
            own = found.setdefault((group.name, source, target), {}).setdefault(dump.rank, [])
            role = f"send(dst={target})" if message.sends else f"recv(src={source})"
            own.append(message.post._replace(call=replace(message.post.call, role=role)))
    for number, ((_, source, target), posts) in enumerate(sorted(found.items())):
        ends = tuple(sorted((source, target)))
        slots = []
        for index in range(max(map(len, posts.values()))):
            there = [(each[index], (rank,)) for rank, each in sorted(posts.items()) if index < len(each)]
            slots.append(SlotRecord(index, tuple(there), tuple(rank for _, (rank,) in there)))
        members = tuple(MemberRecord(rank, len(posts.get(rank, ()))) for rank in ends)
        yield GroupRecord((ends, f"send {source}->{target}", number), None, members, (), tuple(slots))


# Calls that combine without a word, and wrongly.


def _on_swap(snapshot: Snapshot) -> CollectiveReport | None:
    """Return the report on the first calls of one kind and size that ranks make in another order."""
    for group in snapshot.groups:
        swapped = _swapped(group)
        if swapped:
            return in_ranks(report_on_swap(snapshot, group, swapped[0].number, swapped[-1].number))
    return None


def _swapped(group: GroupRecord) -> list[SlotRecord]:
    """Return the calls of a group that ranks have made from the same places in another order.

    Calls with a root are left out: there, ranks take turns at two lines, one that publishes and one that subscribes.
    """
    order, seen = PlaceOrder(), list[SlotRecord]()
    members = sorted({rank for slot in group.open + group.history for _, there in slot.posts for rank in there})
    for slot in sorted((*group.history, *group.open), key=lambda slot: slot.number):
        asked = {post.call for post, _ in slot.posts}
        places = {rank: post.path for post, there in slot.posts for rank in there}
        if len(asked) > 1 or len(places) < len(members):
            return []
        call = asked.pop()
        if call.kind == "barrier":  # what came before is over
            order = PlaceOrder()
        elif call.kind.startswith(_WITHOUT_ROOT):
            seen.append(slot)
            number = order.swapped(call, [places[rank] for rank in members])
            if number:
                return seen[-number:]
    return []


# Which collective is to blame, and who waits where.


def _missing(group: GroupRecord, slot: SlotRecord) -> set[int]:
    return {member.replica_id for member in group.members}.difference(*(there for _, there in slot.posts))


def _cause(snapshot: Snapshot) -> Overdue | None:
    """Return the collective that holds up the others, whose missing ranks wait in no other; None where nobody waits."""
    waits = [(group, slot) for group in snapshot.groups for slot in group.open if slot.waiting]
    if not waits:
        return None
    held_up = set(snapshot.blocked)
    group, slot = min(waits, key=lambda each: (len(_missing(*each) & held_up), not _missing(*each)))
    return Overdue(group.key, slot.number, 0.0)


def _waiting(records: Iterable[GroupRecord], untold: Collection[GroupKey]) -> Iterator[str]:
    """Yield a line for each process group that ranks wait in, those that are alike together."""
    lines = []
    for record in records:
        slot = next((slot for slot in record.open if slot.waiting), None)
        if slot is None:
            continue
        late = _missing(record, slot)
        told = f"; without {ids_briefly(late)}" if late else "" if record.key in untold else "; all have called it"
        call = slot.posts[0][0].call if len(slot.posts) == 1 else "different calls"
        lines.append(f"  {record.label() or 'all ranks'}, #{slot.number} {call}: {ids_briefly(slot.waiting)}{told}")
    if len(lines) < 2:
        return
    yield "Where ranks wait, the first call of each process group that has not ended:"
    yield from lines[:_MOST_GROUPS]
    if len(lines) > _MOST_GROUPS:
        yield f"  … and in {count(len(lines) - _MOST_GROUPS, 'more process group')}"


def _without_members(report: CollectiveReport, groups: Iterable[_ProcessGroup]) -> CollectiveReport:
    """Where all wait in a collective that are known to be in its group, say that there may be others."""
    group = next((each for each in groups if not each.told and each.label == report.group), None)
    if group is None or any(each.call is None for each in report.replicas):
        return report
    called = ids_briefly(group.members)
    headline = ranks(
        f"collective #{report.sequence_number} of {report.group} has not ended: {called} called it, and who else is in "
        "the group is not known"
    )
    return replace(report, text="\n".join([headline, *report.text.splitlines()[1:]]))


# What else the dumps say, and what they cannot.


def _notes(report: CollectiveReport | None, groups: Sequence[_ProcessGroup], of: Mapping[int, Dump]) -> Iterator[str]:
    absent = [rank for rank in groups[0].members if rank not in of]
    if absent:
        yield f"There is no dump of {ids_briefly(absent, 12)}."
    if report is not None:
        yield from _on_report(report, groups, of)
    yield from _ended_without(groups, of)
    dropped = [dump.rank for dump in of.values() if dump.dropped]
    if dropped:
        yield f"Older calls of {ids_briefly(dropped)} have been dropped: TORCH_FR_BUFFER_SIZE sets how many are kept."
    if any(dump.is_json for dump in of.values()):
        yield "JSON dumps do not contain the lines of the program; pickled ones do."
    if any("gloo" in dump.backends for dump in of.values()):
        yield "Gloo does not record sends, receives and monitored_barrier, nor whether a call ended in an error."
    if not all(group.told for group in groups):
        yield "Gloo does not record the members of process groups: the ranks that called are assumed to be the members."
    yield "Dumps do not contain reduce ops, roots and values, nor where a rank is when it is in no collective."


def _on_report(report: CollectiveReport, groups: Sequence[_ProcessGroup], of: Mapping[int, Dump]) -> Iterator[str]:
    group = next((each for each in groups if each.label == report.group), None)
    if group is not None and report.reason is not Reason.CYCLE:
        number = report.sequence_number
        named = "" if group.is_default else f" in process group {group.name!r}"
        yield f"Collective #{number} is torch's sequence number {number + group.first}{named}."
    if report.reason in (Reason.TIMEOUT, Reason.UNMATCHED):
        yield from _latest(report, groups, of)
        if group is not None:
            yield from _not_started(group, report.sequence_number, of)
    files = {each.location.file for each in report.replicas if each.location is not None and each.location.file}
    made = max((dump.newest for dump in of.values()), default=0)
    newer = sorted(file for file in files if _changed(file) > made)
    if newer:
        yield f"{Path(newer[0]).name} has changed since: the lines shown may not be those that ran."


def _latest(report: CollectiveReport, groups: Sequence[_ProcessGroup], of: Mapping[int, Dump]) -> Iterator[str]:
    """Say what those that are missing have called last, in whatever group."""
    missing = [each.replica_id for each in report.replicas if each.call is None and each.replica_id in of]
    for rank in missing[:_MOST_LAST]:
        last = of[rank].last
        if last is None:
            yield f"No call of rank {rank} is recorded."
            continue
        name, entry = last
        ended = "has ended" if entry.state is State.DONE else "has not ended"
        group = next(each for each in groups if each.name == name and rank in each.members)
        where = "" if group.is_default else f" in group {shortened(repr(group.title), 40)}"
        yield f"The latest call of rank {rank}, {entry.post.call}{where}{_at(entry.post)}, {ended}."


def _at(post: Post) -> str:
    return f" at {place(post.location)}" if post.location.file else ""


def _not_started(group: _ProcessGroup, number: int, of: Mapping[int, Dump]) -> Iterator[str]:
    """Where some ranks' device has begun a collective, say whose has not."""
    states: dict[State, list[int]] = {}
    for rank in group.members:
        entry = of[rank].calls.get(group.name, {}).get(number + group.first) if rank in of else None
        if entry is not None:
            states.setdefault(entry.state, []).append(rank)
    if State.SCHEDULED in states and State.STARTED in states:
        behind = ids_briefly(states[State.SCHEDULED])
        yield f"It runs on {ids_briefly(states[State.STARTED])}; the devices of {behind} have not begun it."


def _ended_without(groups: Sequence[_ProcessGroup], of: Mapping[int, Dump]) -> Iterator[str]:
    """Name collectives that need all ranks, and have ended where some have not called them."""
    for group in groups:
        slot = next((each for each in group.record.open if not each.waiting and len(each.posts) == 1), None)
        late = _missing(group.record, slot) & of.keys() if slot is not None else set()
        if slot is not None and late and slot.posts[0][0].call.kind.startswith((*_WITHOUT_ROOT, "barrier")):
            post, there = slot.posts[0]
            which = f"{post.call}{_at(post)}, #{slot.number} of {group.record.label() or 'all ranks'},"
            yield f"{which} has ended on {ids_briefly(there)}, but {ids_briefly(late)} had not called it:"
            yield "it ended in an error, or that dump is older."


def _changed(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns  # noqa: PTH116  (a name that a dump tells)
    except (OSError, ValueError):
        return 0
