"""Every way in which one replica's call can differ: the verdict, whoever comes first and however many there are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from aiodist import CollectiveMismatchError, Reason, ReduceOp, ReplicaContext, ReplicaState
from tests.runtime.divergences import DIVERGENCES, Divergence, zeros
from tests.runtime.programs import Program, Relay, error_of

pytestmark = pytest.mark.anyio
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)


def diverging(divergence: Divergence, odd: int, turns: Relay | None = None) -> Program:
    """Return a program of three agreed collectives and a fourth in which one replica is at odds with the others."""

    async def program(ctx: ReplicaContext) -> None:
        for _ in range(3):
            await ctx.barrier()
        if turns is not None:
            await turns.turn()
        call = divergence.odd if ctx.replica_id_in_sync_group == odd else divergence.usual
        handle = call(ctx)
        if turns is not None:
            turns.pass_on()
        await handle

    return program


@every_divergence
async def test_a_divergence_is_named(divergence: Divergence) -> None:
    error = await error_of(diverging(divergence, odd=1))
    assert type(error) is CollectiveMismatchError
    report = error.report
    assert (report.reason, report.sequence_number, report.suspects) == (divergence.reason, 3, (1,))
    assert divergence.words in str(error)
    assert str(error) == str(report)
    assert [r.state for r in report.replicas] == [ReplicaState.WAITING] * 3
    assert report.replicas[0].call == report.replicas[2].call
    assert report.replicas[0].location == report.replicas[2].location


@pytest.mark.parametrize("name", ["kind", "shape", "call site", "merge function"], ids=str)
@pytest.mark.parametrize("replicas", [2, 3, 5, 8, 64])
async def test_the_minority_is_suspected_at_any_number(name: str, replicas: int) -> None:
    divergence = DIVERGENCES[{"shape": "size"}.get(name, name)]
    for odd in {0, replicas // 2, replicas - 1}:
        report = (await error_of(diverging(divergence, odd), replicas)).report
        assert (report.reason, report.sequence_number) == (divergence.reason, 3)
        assert report.suspects == ((0, 1) if replicas == 2 else (odd,))
        assert [r.replica_id for r in report.replicas] == list(range(replicas))


@every_divergence
async def test_the_verdict_is_the_same_whoever_comes_first(divergence: Divergence) -> None:
    reports = set()
    for order in itertools.permutations(range(3)):
        report = (await error_of(diverging(divergence, 2, Relay(order)))).report
        reports.add(replace(report, replicas=tuple(replace(r, stack=()) for r in report.replicas)))
    assert len(reports) == 1
    assert reports.pop().suspects == (2,)


async def test_the_verdict_on_three_camps_is_the_same_whoever_comes_first() -> None:
    async def program(ctx: ReplicaContext, turns: Relay) -> None:
        await turns.turn()
        if ctx.replica_id_in_sync_group < 2:
            handle = ctx.all_reduce(ReduceOp.SUM, zeros(2))
        elif ctx.replica_id_in_sync_group == 2:
            handle = ctx.all_reduce(ReduceOp.MAX, zeros(2))
        else:
            handle = ctx.all_reduce(ReduceOp.SUM, zeros(3))
        turns.pass_on()
        await handle

    found = set()
    for order in itertools.permutations(range(4)):
        turns = Relay(order)
        report = (await error_of(lambda ctx, turns=turns: program(ctx, turns), 4)).report  # type: ignore[misc]
        found.add((report.reason, report.sequence_number, report.suspects, str(report)))
    assert [entry[:3] for entry in found] == [(Reason.REDUCE_OP, 0, (2, 3))]


@pytest.mark.parametrize("replicas", [2, 4, 6])
async def test_a_tie_makes_everyone_a_suspect(replicas: int) -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group % 2:
            await ctx.barrier()
        else:
            await ctx.all_reduce(ReduceOp.SUM, 1)

    error = await error_of(program, replicas)
    assert error.report.suspects == tuple(range(replicas))
    assert ">" not in str(error)


async def test_equal_calls_in_swapped_order_are_told_apart() -> None:
    async def program(ctx: ReplicaContext) -> None:
        names = ["w", "b"] if ctx.replica_id_in_sync_group != 2 else ["b", "w"]
        for name in names:
            if name == "w":
                await ctx.all_reduce(ReduceOp.SUM, zeros(3))
            else:
                await ctx.all_reduce(ReduceOp.SUM, zeros(3))

    report = (await error_of(program)).report
    assert (report.reason, report.sequence_number, report.suspects) == (Reason.CALL_SITE, 0, (2,))


async def test_equal_calls_on_one_line_are_told_apart_by_column() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await (ctx.barrier() if ctx.replica_id_in_sync_group == 0 else ctx.barrier())  # noqa: RUF034

    report = (await error_of(program)).report
    assert (report.reason, report.suspects) == (Reason.CALL_SITE, (0,))
    assert "They are different calls on one line: column 72 on replicas 1 and 2, column 16 on replica 0." in str(report)


async def test_an_extra_call_is_found_where_it_stands() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == 1:
            await ctx.all_reduce(ReduceOp.SUM, 1)
        await ctx.all_reduce(ReduceOp.SUM, 1)

    report = (await error_of(program)).report
    assert (report.reason, report.sequence_number, report.suspects) == (Reason.CALL_SITE, 1, (1,))


async def test_a_missing_call_is_found_where_it_is_missed() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group != 1:
            await ctx.all_reduce(ReduceOp.SUM, 1)
        await ctx.barrier()

    report = (await error_of(program)).report
    assert (report.reason, report.sequence_number, report.suspects) == (Reason.KIND, 0, (1,))


async def test_the_first_reason_counts_among_several_camps() -> None:
    calls = [zeros(3), zeros(3), zeros(3), zeros(4), zeros(3, dtype="f8")]

    async def program(ctx: ReplicaContext) -> None:
        await ctx.all_reduce(ReduceOp.SUM, calls[ctx.replica_id_in_sync_group])

    report = (await error_of(program, 5)).report
    assert (report.reason, report.suspects) == (Reason.SHAPE, (3, 4))


async def test_no_replica_passes_the_point() -> None:
    passed: list[int] = []

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 3:
            await ctx.barrier()
        else:
            await ctx.all_reduce(ReduceOp.SUM, 1)
        passed.append(ctx.replica_id_in_sync_group)

    await error_of(program, 4)
    assert passed == []


async def test_every_replica_that_waits_gets_the_error() -> None:
    told: dict[int, Any] = {}

    async def program(ctx: ReplicaContext) -> None:
        try:
            await (ctx.barrier() if ctx.replica_id_in_sync_group == 1 else ctx.all_reduce(ReduceOp.SUM, 1))
        except CollectiveMismatchError as error:
            told[ctx.replica_id_in_sync_group] = error
            raise

    error = await error_of(program, 4)
    assert {0, 1, 2} <= told.keys()  # replica 3, who came last, did not wait: on trio it is cancelled at once
    assert all(one.report is error.report for one in told.values())
    assert len({id(one) for one in told.values()}) == len(told)  # one for each: tracebacks do not mix
