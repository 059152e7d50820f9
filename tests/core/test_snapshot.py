"""Snapshots: to JSON and back, and cut into parts and merged again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist._core.analysis import analyse
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import Snapshot, from_json, merge, part, to_json
from tests.core.programs import Drawn, drawn, turns

many = settings(max_examples=300)


def sent(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot as another process gets it."""
    return from_json(json.loads(json.dumps(to_json(snapshot))))


def told(report: CollectiveReport) -> tuple[object, ...]:
    """Return what a report says, without what each replica did before."""
    return report.reason, report.sequence_number, report.suspects, report.text, report.divergence, report.partitions


@st.composite
def cut(draw: st.DrawFn, replicas: int) -> list[list[int]]:
    """Draw the replicas of each of several workers; consecutive ones."""
    bounds = sorted(draw(st.sets(st.integers(1, replicas - 1))))
    return [list(range(a, b)) for a, b in zip([0, *bounds], [*bounds, replicas], strict=True)]


@many
@given(drawn(), turns)
def test_a_snapshot_goes_to_json_and_back(program: Drawn, order: list[int]) -> None:
    snapshot = program.run(order).snapshot()
    assert sent(snapshot) == snapshot


@pytest.mark.parametrize("data", [{}, {"order_check": "call_site"}, {"replicas": 3}])
def test_what_is_no_snapshot_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected a snapshot, got something else"):
        from_json(data)


@many
@given(st.data(), drawn(), turns)
def test_parts_that_are_merged_say_what_the_whole_says(data: st.DataObject, program: Drawn, order: list[int]) -> None:
    snapshot = program.run(order).snapshot()
    ids = data.draw(st.permutations(range(program.replicas)))
    cuts = data.draw(cut(program.replicas))
    parts = [sent(part(snapshot, [ids[i] for i in own])) for own in cuts]
    assert told(analyse(merge(data.draw(st.permutations(parts))))) == told(analyse(snapshot))


@many
@given(st.data(), drawn(cancels=False), turns)
def test_several_processes_know_together_what_one_would(data: st.DataObject, program: Drawn, order: list[int]) -> None:
    alone, together = program.run(), program.run(order, data.draw(cut(program.replicas)))
    assert together.went_well == alone.went_well
    if not alone.went_well:
        assert told(analyse(merge(map(sent, together.snapshots())))) == told(analyse(alone.snapshot()))
