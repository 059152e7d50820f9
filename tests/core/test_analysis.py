"""Snapshots of runs, sent and in parts, and their analyses: what one does otherwise is found, whoever comes first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aiodist import IncompleteCollectiveError
from aiodist._core.analysis import analyse, cannot_complete, error_of, find_cycle
from aiodist._core.call import Call, OrderCheck, Place, Post
from aiodist._core.ledger import Ledger
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import GroupRecord, MemberRecord, ReplicaFacts, SlotRecord, Snapshot, merge
from aiodist._core.terms import Location, Reason, ReplicaState
from aiodist._core.wire import pack, unpack
from tests.core.programs import CALLS, Drawn, Op, Program, drawn, turns

many = settings(max_examples=120)


def sent(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot as another process gets it."""
    found: Snapshot = unpack(Snapshot, json.loads(json.dumps(pack(Snapshot, snapshot))))
    return found


def told(report: CollectiveReport) -> tuple[object, ...]:
    """Return what a report says, without what each replica did before."""
    return report.reason, report.sequence_number, report.suspects, report.text, report.divergence, report.partitions


def cut(snapshot: Snapshot, where: int) -> list[Snapshot]:
    """Return what several processes know of a run: replicas are cut behind the k-th where the k-th bit is set."""
    parts: list[list[int]] = [[]]
    for index, facts in enumerate(snapshot.replicas):
        parts[-1].append(facts.replica_id)
        if where >> index & 1 and index + 1 < len(snapshot.replicas):
            parts.append([])
    return [part_of(snapshot, ids) for ids in parts]


def part_of(snapshot: Snapshot, ids: Sequence[int]) -> Snapshot:
    def own(replicas: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for i in replicas if i in ids)

    def known(slots: Sequence[SlotRecord]) -> tuple[SlotRecord, ...]:
        found = [each._replace(posts=tuple((post, own(i)) for post, i in each.posts if own(i))) for each in slots]
        return tuple(each._replace(waiting=own(each.waiting)) for each in found if each.posts)

    groups = []
    for group in snapshot.groups:
        made = {i for slot in group.open if slot.number < 0 for _, those in slot.posts for i in those}
        members = tuple(member for member in group.members if member.replica_id in ids)
        if group.key[2] < 0 or any(each.sequence >= 0 or each.replica_id in made for each in members):
            (join,) = known([group.join] if group.join else []) or (None,)
            history, left = known(group.history), known(group.open)
            groups.append(replace(group, members=members, history=history, open=left, join=join))
    facts = tuple(each for each in snapshot.replicas if each.replica_id in ids)
    return replace(snapshot, replicas=facts, groups=tuple(groups), blocked=own(snapshot.blocked))


cuts = st.integers(0, 15)


@many
@given(drawn(), turns)
def test_a_snapshot_goes_to_json_and_back(program: Drawn, order: list[int]) -> None:
    snapshot = program.run(order).snapshot()
    assert sent(snapshot) == snapshot


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        *((Snapshot, data) for data in ({}, {"replicas": 3}, [], 0, ["call_site", [[0]], []])),
        *((tuple[int, ...], ids) for ids in ([[0, 2**40]], [[5, 2**40]], [[0, 2**19]] * 3, [[0, -1]], [[0, 1.0]], "a")),
        (float, 10**400),
        (Location, "abc"),
        (tuple[Location, ...], [["a", 1, "f"], -1]),
    ],
)
def test_what_is_no_such_value_is_refused_before_it_takes_memory(kind: Any, data: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        unpack(kind, data)


@many
@given(drawn(), turns, cuts)
def test_several_processes_know_together_what_one_would(program: Drawn, order: list[int], where: int) -> None:
    snapshot = program.run(order).snapshot()
    assert told(analyse(merge(map(sent, cut(snapshot, where))))) == told(analyse(snapshot))


def test_a_join_that_one_part_has_seen_complete_keeps_nobody_whom_an_earlier_part_shows_in_it() -> None:
    """Replica 0 waits in a group's join when its part is taken; replica 1 has left it for the run's next collective."""

    def snapshot(replica_id: int, pair: GroupRecord, root: Sequence[SlotRecord]) -> Snapshot:
        run = GroupRecord(((0, 1), None, -1), None, (MemberRecord(replica_id, len(root)),), (), tuple(root))
        return Snapshot(OrderCheck.CALL_SITE, (ReplicaFacts(replica_id, "CPU:0"),), (run, pair), (replica_id,))

    def slot(kind: str, replica_id: int, *, waits: bool = True) -> SlotRecord:
        place = Place("program.py", 1, 0, "train")
        return SlotRecord(0, ((Post(Call(kind), (place,)), (replica_id,)),), (replica_id,) if waits else ())

    key = (0, 1), "pair", 0
    earlier = GroupRecord(key, None, (MemberRecord(0, 0, joined=True),), (), (), slot("join", 0))
    later = GroupRecord(key, None, (MemberRecord(1, 1),), (slot("join", 1, waits=False),), ())
    whole = merge([snapshot(0, earlier, []), snapshot(1, later, [slot("barrier", 1)])])
    assert not find_cycle(whole)
    assert not cannot_complete(whole)


# What is found.


@many
@given(drawn(changes=0), turns)
def test_what_all_do_alike_goes_well(program: Drawn, order: list[int]) -> None:
    run = program.run(order)
    assert run.went_well
    assert not run.ledger.troubled


@many
@given(drawn(cancels=False), turns)
def test_a_report_is_the_same_whoever_comes_first(program: Drawn, order: list[int]) -> None:
    one, other = program.run(), program.run(order)
    assert one.went_well == other.went_well
    if not one.went_well:
        assert told(analyse(one.snapshot())) == told(analyse(other.snapshot()))


def meaning(order_check: OrderCheck, op: Op) -> object:
    call = CALLS[op.call]
    return call, None if call.name is not None or order_check is OrderCheck.SIGNATURE else op.line


def expected(program: Drawn) -> tuple[int, tuple[int, ...]] | None:
    """Return the number of the first collective that is not the same everywhere, and the minority; all on a tie."""
    lists = [made_by(own) for own in program.programs]
    for number in range(max(map(len, lists))):
        asked = [meaning(program.order_check, own[number]) if number < len(own) else None for own in lists]
        (most, votes), *others = Counter(asked).most_common()
        if not others:
            continue
        tie = votes == others[0][1]
        return number, tuple(i for i, what in enumerate(asked) if tie or what != most)
    return None


def made_by(program: Program) -> list[Op]:
    """Return the posts of a program."""
    posts = []
    for op in program:
        if op.what != "post":
            break
        posts.append(op)
    return posts


@many
@given(drawn(groups=False, joins=False, cancels=False), turns)
def test_the_first_difference_is_found(program: Drawn, order: list[int]) -> None:
    assume(any(op.what == "post" for own in program.programs for op in own))
    run, wanted = program.run(order), expected(program)
    if wanted is None:
        assert run.went_well
        return
    report = analyse(run.snapshot())
    assert (report.sequence_number, report.suspects) == wanted
    assert report.reason is not Reason.TIMEOUT


def test_a_replica_that_failed_outside_of_the_others_collectives_is_no_timeout() -> None:
    ledger = Ledger([0, 1])
    ledger.end(ledger.replicas[1], ReplicaState.FAILED)
    error = error_of(analyse(ledger.snapshot()))
    assert isinstance(error, IncompleteCollectiveError)
    assert error.report.reason is Reason.EXITED
