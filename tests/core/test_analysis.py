"""Analyses of whole runs: what all do alike goes well, and what one does otherwise is found, whoever comes first."""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given, settings

from aiodist import IncompleteCollectiveError
from aiodist._core.analysis import analyse, error_of
from aiodist._core.call import OrderCheck
from aiodist._core.ledger import Ledger
from aiodist._core.terms import Reason, ReplicaState
from tests.core.programs import CALLS, Drawn, Op, Program, drawn, turns
from tests.core.test_snapshot import told

many = settings(max_examples=120)


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
