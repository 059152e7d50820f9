"""What a report holds: histories, places, stacks, partitions; and that it is a value that JSON and pickle keep."""

from __future__ import annotations

import json
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodist import (
    CallRecord,
    CollectiveReport,
    Divergence,
    DivergenceKind,
    Partition,
    Reason,
    ReplicaContext,
    ReplicaState,
)
from aiodist._core.ledger import HISTORY
from tests.project.paths import ROOT
from tests.runtime import golden_programs as programs
from tests.runtime.programs import Program, error_of

pytestmark = pytest.mark.anyio


def line_of(text: str) -> int:
    """Return the number of the one line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return found


async def inner(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("SUM", np.zeros(3, np.float32))  # the call


async def usual(ctx: ReplicaContext) -> None:
    await ctx.barrier()  # the first barrier
    await inner(ctx)  # the usual caller


async def diverging(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 1:
        await ctx.barrier(name="odd")  # the odd call
    await usual(ctx)


@pytest.mark.parametrize(
    ("nests", "text"),
    [
        (
            (OrderedDict(a=1, z=1), OrderedDict(z=1, a=1)),
            "('a', *), ('z', *) on replica 0, ('z', *), ('a', *) on replica 1."
            if sys.version_info < (3, 12)
            else "'a': *, 'z': * on replica 0, 'z': *, 'a': * on replica 1.",
        ),
        (([[1], 2], [(1,), 2]), "[*] on replica 0, (*,) on replica 1."),
    ],
)
async def test_structures_that_differ_are_shown_in_whole_items(nests: tuple[Any, Any], text: str) -> None:
    async def program(ctx: ReplicaContext) -> None:
        await ctx.all_reduce("SUM", nests[ctx.replica_id_in_sync_group])

    assert f"The structures differ: {text}" in str(await error_of(program, 2))


async def test_a_report_tells_what_each_replica_does_and_where() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await usual(ctx)
        await diverging(ctx)  # the divergence

    report = (await error_of(program)).report
    assert report.sequence_number == 2
    zero, one, two = report.replicas
    assert [(r.replica_id, r.device, r.state) for r in report.replicas] == [
        (i, f"CPU:{i}", ReplicaState.WAITING) for i in range(3)
    ]
    assert (zero.call, one.call) == ("barrier()", "barrier(name='odd')")
    assert zero.location is not None
    assert one.location is not None
    assert one.location == (__file__, line_of("the odd call"), "diverging")
    assert zero.location == two.location == (__file__, line_of("the first barrier"), "usual")
    assert one.history == (
        CallRecord(0, "barrier()", zero.location),
        CallRecord(1, "all_reduce(SUM, float32[3])", one.history[1].location),
        CallRecord(2, "barrier(name='odd')", one.location),
    )
    assert one.history[1].location == (__file__, line_of("the call"), "inner")
    own = [(place.line, place.function) for place in one.stack if place.file == __file__]
    assert own == [(line_of("the divergence"), "program"), (line_of("the odd call"), "diverging")]
    assert "aiodist" not in {place.function for place in one.stack}


async def test_history_keeps_the_last_ones() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(HISTORY + 10):
            await ctx.barrier()
        if ctx.replica_id_in_sync_group:
            await ctx.all_reduce("SUM", 1)

    report = (await error_of(program)).report
    zero, one, _ = report.replicas
    assert [record.sequence_number for record in zero.history] == list(range(10, HISTORY + 10))
    assert [record.sequence_number for record in one.history] == list(range(10, HISTORY + 11))


async def test_history_shows_each_replicas_own_calls_where_a_name_joined_them() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 1:
            await ctx.barrier(name="here")  # the one
        else:
            await ctx.barrier(name="here")  # the other
        if ctx.replica_id_in_sync_group == 2:
            await ctx.barrier()

    replicas = (await error_of(program)).report.replicas
    lines = [line_of("the other"), line_of("the one"), line_of("the other")]
    assert [replica.history[0].location.line for replica in replicas] == lines


async def test_partitions_and_divergence_are_values() -> None:
    report = (await error_of(programs.other_kind)).report
    majority, minority = report.partitions
    assert isinstance(majority, Partition)
    assert (majority.replicas, majority.majority, majority.call.partition("(")[0]) == ((0, 1), True, "all_reduce")
    assert (minority.replicas, minority.majority, minority.call) == ((2,), False, "barrier()")
    assert isinstance(report.divergence, Divergence)
    assert (report.divergence.kind, report.divergence.replicas, report.divergence.others) == ("added", (2,), (0, 1))
    assert report.divergence.text in " ".join(str(report).split())
    assert all(line in str(report) for line in report.advice)


SCHEMA = json.loads((ROOT / "docs" / "report-schema.json").read_text(encoding="utf-8"))
TYPES: dict[str, type] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def follows_schema(value: Any, schema: Any = SCHEMA) -> None:
    """Check a value by the words of JSON Schema that the published one has."""
    if "$ref" in schema:
        follows_schema(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")])
    elif "anyOf" in schema:
        other, null = schema["anyOf"]
        assert null == {"type": "null"}
        if value is not None:
            follows_schema(value, other)
    elif "type" not in schema:
        assert value in schema.get("enum", [schema.get("const")])
    else:
        assert type(value) is TYPES[schema["type"]]
        if type(value) is dict:
            assert set(value) == set(schema["properties"]) == set(schema["required"])
            for key, each in value.items():
                follows_schema(each, schema["properties"][key])
        for each in value if type(value) is list else ():
            follows_schema(each, schema["items"])


def test_schema_has_every_member_of_the_enumerations() -> None:
    parts = SCHEMA["$defs"]
    assert SCHEMA["properties"]["reason"]["enum"] == list(Reason)
    assert parts["replica"]["properties"]["state"]["enum"] == list(ReplicaState)
    assert parts["divergence"]["properties"]["kind"]["enum"] == list(DivergenceKind)


@pytest.mark.parametrize(
    "program",
    [programs.other_kind, programs.other_order, programs.early_return, programs.uneven_loops, programs.abandoned],
    ids=lambda program: program.__name__,
)
async def test_a_report_is_a_value_that_comes_back_from_json_and_pickle(program: Program) -> None:
    error = await error_of(program)
    report = error.report
    follows_schema(json.loads(report.to_json()))
    copy = CollectiveReport.from_dict(json.loads(report.to_json()))
    assert copy == report
    for one in (pickle.loads(pickle.dumps(copy)), pickle.loads(pickle.dumps(error)).report):
        assert one == report
        assert str(one) == str(report)
        assert hash(one) == hash(report)


async def test_replicas_with_one_history_share_it_in_json() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(100):
            await ctx.barrier()
        if ctx.replica_id_in_sync_group == 7:
            await ctx.all_reduce("SUM", 1)
        await ctx.barrier()

    data = (await error_of(program, 64)).report.to_dict()
    assert len(data["histories"]) == 2
    assert len(json.dumps(data)) < 100_000


def test_another_schema_is_refused() -> None:
    data: dict[str, Any] = CollectiveReport(Reason.KIND, 0, (), (), "text").to_dict() | {"schema": 1}
    with pytest.raises(ValueError, match="expected a report of schema 2, got 1"):
        CollectiveReport.from_dict(data)
