"""A report as JSON: what stands in it, and that it comes back as it was."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from aiodist import CollectiveReport, Partition, Reason, ReduceOp, ReplicaContext
from tests.runtime import golden_programs as programs
from tests.runtime.programs import Program, error_of

pytestmark = pytest.mark.anyio
PROGRAMS = [programs.other_kind, programs.other_order, programs.early_return, programs.uneven_loops, programs.abandoned]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
async def test_a_report_comes_back_from_json(program: Program) -> None:
    report = (await error_of(program)).report
    copy = CollectiveReport.from_dict(json.loads(report.to_json()))
    assert copy == report
    assert pickle.loads(pickle.dumps(copy)) == report


async def test_json_has_the_attributes_by_name() -> None:
    report = (await error_of(programs.early_return)).report
    data = report.to_dict()
    assert set(data) == {
        "schema", "reason", "sequence_number", "group", "suspects", "replicas", "histories", "partitions", "divergence",
        "advice", "text",
    }  # fmt: skip
    assert (data["schema"], data["reason"], data["suspects"]) == (2, "exited", [1])
    one = data["replicas"][1]
    assert (one["state"], one["returned"]) == ("exited", "'converged'")
    assert one["ended_at"]["function"] == "early_return"
    assert [call["call"] for call in data["histories"][one["history"]]] == ["all_reduce(MEAN, float)"] * 3


async def test_replicas_with_one_history_share_it_in_json() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(100):
            await ctx.barrier()
        if ctx.replica_id_in_sync_group == 7:
            await ctx.all_reduce(ReduceOp.SUM, 1)
        await ctx.barrier()

    data = (await error_of(program, 64)).report.to_dict()
    assert len(data["histories"]) == 2
    assert len(json.dumps(data)) < 100_000


async def test_camps_and_divergence_are_values() -> None:
    report = (await error_of(programs.other_kind)).report
    assert [(type(camp), camp.replicas, camp.call.partition("(")[0]) for camp in report.camps] == [
        (Camp, (0, 1), "all_reduce"),
        (Camp, (2,), "barrier"),
    ]
    assert report.divergence is not None
    assert (report.divergence.parting, report.divergence.replicas, report.divergence.others) == (
        Parting.ADDED,
        (2,),
        (0, 1),
    )
    assert report.divergence.text in str(report)
    assert all(line in str(report) for line in report.advice)


def test_another_schema_is_refused() -> None:
    data: dict[str, Any] = CollectiveReport(Reason.KIND, 0, (), (), "text").to_dict() | {"schema": 2}
    with pytest.raises(ValueError, match="expected a report of schema 1, got 2"):
        CollectiveReport.from_dict(data)
