"""Snapshots of runs, sent and merged, and their analyses: the difference is found, whatever the order of arrival."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from aiodist import IncompleteCollectiveError
from aiodist._core.analysis import analyse, cannot_complete, error_of, find_cycle
from aiodist._core.call import Call, OrderCheck, Place, Post, fingerprint
from aiodist._core.ledger import Ledger
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import GroupRecord, MemberRecord, ReplicaFacts, SlotRecord, Snapshot, merge
from aiodist._core.terms import Location, Reason, ReplicaState
from aiodist._core.wire import pack, unpack
from tests.core.programs import CALLS, Drawn, Op, drawn, turns

many = settings(max_examples=120)


def sent(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot as another process receives it."""
    received: Snapshot = unpack(Snapshot, json.loads(json.dumps(pack(Snapshot, snapshot))))
    return received


def findings(report: CollectiveReport) -> tuple[object, ...]:
    """Return a report's content without the replicas' histories."""
    return report.reason, report.sequence_number, report.suspects, report.text, report.divergence, report.partitions


def split(snapshot: Snapshot, cuts: int) -> list[Snapshot]:
    """Return what several processes know of a run: there is a cut after the k-th replica if the k-th bit is set."""
    parts: list[list[int]] = [[]]
    for index, facts in enumerate(snapshot.replicas):
        parts[-1].append(facts.replica_id)
        if cuts >> index & 1 and index + 1 < len(snapshot.replicas):
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
            history, unfinished = known(group.history), known(group.open)
            if unfinished and unfinished[0].number < 0:
                posts = unfinished[0].posts
                everyone = sum(len(i) for _, i in posts) == len(members)
                if everyone and len({fingerprint(snapshot.order_check, post) for post, _ in posts}) == 1:
                    history, unfinished = unfinished[:1], unfinished[1:]  # here all have made the group
            groups.append(replace(group, members=members, history=history, open=unfinished, join=join))
    facts = tuple(each for each in snapshot.replicas if each.replica_id in ids)
    return replace(snapshot, replicas=facts, groups=tuple(groups), blocked=own(snapshot.blocked))


@many
@given(drawn(), turns, st.integers(0, 15))
@example(Drawn([(Op("make", 0, members=(0, 1), makes=1),), ()], OrderCheck.CALL_SITE), [], 1)  # one makes the group
def test_snapshot_is_the_same_from_json_and_from_merged_parts(program: Drawn, order: list[int], cuts: int) -> None:
    snapshot = program.run(order).snapshot()
    assert sent(snapshot) == snapshot
    assert findings(analyse(merge(map(sent, split(snapshot, cuts))))) == findings(analyse(snapshot))


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
def test_unpack_refuses_damaged_data_before_it_takes_memory(kind: Any, data: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        unpack(kind, data)


def test_merge_drops_a_join_that_a_later_part_has_seen_complete() -> None:
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


@many
@given(drawn(changes=0), turns)
def test_equal_programs_complete_in_any_order(program: Drawn, order: list[int]) -> None:
    run = program.run(order)
    assert run.completed
    assert not run.ledger.doomed_groups


@many
@given(drawn(cancels=False), turns)
def test_report_does_not_depend_on_the_order_of_arrival(program: Drawn, order: list[int]) -> None:
    one, other = program.run(), program.run(order)
    assert one.completed == other.completed
    if not one.completed:
        assert findings(analyse(one.snapshot())) == findings(analyse(other.snapshot()))


@many
@given(drawn(), turns)
@example(Drawn([(Op("cancel", 0),), (Op("post", 0),)], OrderCheck.CALL_SITE), [])  # one is cancelled out of it
def test_run_that_ends_early_has_a_cycle_or_a_collective_that_cannot_complete(program: Drawn, order: list[int]) -> None:
    run = program.run(order)
    snapshot = run.snapshot()
    cycle = analyse(snapshot).reason is Reason.CYCLE
    assert cannot_complete(snapshot) == (not run.completed and not cycle)


def expected(program: Drawn) -> tuple[int, tuple[int, ...]] | None:
    """Return the number of the first collective that is not the same everywhere, and the minority; all on a tie."""

    def meaning(op: Op) -> object:
        call = CALLS[op.call]
        return call, None if call.name is not None or program.order_check is OrderCheck.SIGNATURE else op.line

    posts = [list(takewhile(lambda op: op.what == "post", own)) for own in program.programs]
    for number in range(max(map(len, posts))):
        calls = [meaning(own[number]) if number < len(own) else None for own in posts]
        (most, votes), *others = Counter(calls).most_common()
        if others:
            tie = votes == others[0][1]
            return number, tuple(i for i, call in enumerate(calls) if tie or call != most)
    return None


@many
@given(drawn(groups=False, joins=False, cancels=False), turns)
@example(Drawn([(Op("post", 0),), (), ()], OrderCheck.CALL_SITE), [])  # most have ended
def test_report_names_the_first_difference_and_the_minority(program: Drawn, order: list[int]) -> None:
    assume(any(op.what == "post" for own in program.programs for op in own))
    run, wanted = program.run(order), expected(program)
    if wanted is None:
        assert run.completed
        return
    report = analyse(run.snapshot())
    assert (report.sequence_number, report.suspects) == wanted
    assert report.reason is not Reason.TIMEOUT
    majority = {i for each in report.partitions if each.majority for i in each.replicas}
    assert majority.isdisjoint(report.suspects)


def test_cycle_does_not_blame_a_running_replica_that_may_still_make_the_groups() -> None:
    ledger, here = Ledger([0, 1, 2]), Place("program.py", 1, 0, "train")
    for member, waits_in in zip(ledger.root.members, ("rows", "columns"), strict=False):
        own = {name: ledger.root.new_group(member, (0, 1, 2), name, here, 0) for name in ("rows", "columns")}[waits_in]
        own.group.post(own, Call("barrier"), here, 0).waiters[own.position] = "task"
    report = analyse(ledger.snapshot(blocked=(0, 1)))
    assert (report.reason, report.suspects) == (Reason.CYCLE, (0, 1))


def test_failure_outside_of_collectives_is_no_timeout() -> None:
    ledger = Ledger([0, 1])
    ledger.end(ledger.replicas[1], ReplicaState.FAILED)
    error = error_of(analyse(ledger.snapshot()))
    assert isinstance(error, IncompleteCollectiveError)
    assert error.report.reason is Reason.EXITED


def test_replica_that_failed_gets_no_advice_on_when_to_stop() -> None:
    ledger, here = Ledger([0, 1, 2]), Place("program.py", 1, 0, "train")
    for member in ledger.root.members[:2]:
        ledger.root.post(member, Call("barrier"), here, 0).waiters[member.position] = "task"
    ledger.end(ledger.replicas[2], ReplicaState.FAILED)
    report = analyse(ledger.snapshot())
    assert (report.reason, report.suspects, report.advice) == (Reason.EXITED, (2,), ())


def test_call_of_the_same_name_elsewhere_does_not_continue_a_loop() -> None:
    ledger = Ledger([0, 1, 2])
    named, (first, here, there) = Call("barrier", name="x"), (Place("a.py", line, 0, "train") for line in (1, 8, 9))
    for _ in range(2):
        *_, slot = [ledger.root.post(member, named, first, 0) for member in ledger.root.members]
        ledger.root.complete(slot)
    for member, call, at in zip(ledger.root.members, (named, named, Call("gather")), (here, here, there), strict=True):
        ledger.root.post(member, call, at, 0).waiters[member.position] = "task"
    report = analyse(ledger.snapshot())
    assert (report.reason, report.suspects, report.divergence) == (Reason.KIND, (2,), None)


def test_calls_that_others_have_yet_to_make_are_not_reported_as_made() -> None:
    ledger = Ledger([0, 1, 2])
    step = [(Call(f"kind {line}"), Place("a.py", line, 0, "train")) for line in range(4)]
    for call, at in [*step, *step, step[0]]:
        *_, slot = [ledger.root.post(member, call, at, 0) for member in ledger.root.members]
        ledger.root.complete(slot)
    for member, (call, at) in zip(ledger.root.members, (step[1], step[1], step[3]), strict=True):
        ledger.root.post(member, call, at, 0).waiters[member.position] = "task"
    divergence = analyse(ledger.snapshot()).divergence
    assert divergence is not None
    assert "which replicas 0 and 1 would make as #9 to #10" in divergence.text


def test_failure_blames_no_replica_that_is_on_its_way() -> None:
    ledger, here = Ledger([0, 1, 2]), Place("program.py", 1, 0, "train")
    for member in ledger.root.members[:2]:
        ledger.root.post(member, Call("barrier"), here, 0).waiters[0] = "task"
    ledger.end(ledger.replicas[1], ReplicaState.FAILED)
    report = analyse(ledger.snapshot())
    assert (report.reason, report.suspects) == (Reason.EXITED, (0, 1, 2))
    assert "replica 2 has not arrived" in str(report)
    assert ">" not in str(report)
