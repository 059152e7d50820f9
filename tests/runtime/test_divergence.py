"""Every way in which one replica's call can differ: the report, whoever comes first and however many there are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from aiodist import CollectiveMismatchError, Reason, ReplicaContext, ReplicaState
from tests.runtime.divergences import DIVERGENCES, Divergence, X, zeros
from tests.runtime.programs import Relay, error_of

pytestmark = pytest.mark.anyio


async def diverging(ctx: ReplicaContext, divergence: Divergence, odd: int, relay: Relay) -> None:
    """Agree on three collectives, and let one replica call something else for the fourth."""
    for _ in range(3):
        await ctx.barrier()
    await relay.turn()
    handle = (divergence.odd if ctx.replica_id_in_sync_group == odd else divergence.usual)(ctx)
    relay.pass_on()
    await handle


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
async def test_a_divergence_is_named_whoever_comes_first(divergence: Divergence) -> None:
    reports = set()
    for order in itertools.permutations(range(3)):
        error = await error_of(partial(diverging, divergence=divergence, odd=1, relay=Relay(order)))
        assert type(error) is CollectiveMismatchError
        assert str(error) == str(error.report)
        replicas = tuple(replace(r, stack=()) for r in error.report.replicas)
        reports.add(replace(error.report, replicas=replicas))
    (report,) = reports
    assert (report.reason, report.sequence_number, report.suspects) == (divergence.reason, 3, (1,))
    assert divergence.words in str(report)
    assert [r.state for r in report.replicas] == [ReplicaState.WAITING] * 3
    zero, _, two = report.replicas
    assert (zero.call, zero.location) == (two.call, two.location)


@pytest.mark.parametrize("replicas", [2, 5, 64])
async def test_the_minority_is_suspected_at_any_number(replicas: int) -> None:
    divergence = DIVERGENCES["kind before all else"]
    for odd in {0, replicas // 2, replicas - 1}:
        program = partial(diverging, divergence=divergence, odd=odd, relay=Relay(range(replicas)))
        report = (await error_of(program, replicas)).report
        assert report.suspects == ((0, 1) if replicas == 2 else (odd,))
        assert [r.replica_id for r in report.replicas] == list(range(replicas))


async def test_the_first_reason_counts_among_several_partitions() -> None:
    values = [X, X, X, zeros(4), X.astype("f8")]

    async def program(ctx: ReplicaContext) -> None:
        await ctx.all_reduce("SUM", values[ctx.replica_id_in_sync_group])

    report = (await error_of(program, 5)).report
    assert (report.reason, report.suspects) == (Reason.SHAPE, (3, 4))


async def test_equal_calls_on_one_line_are_told_apart_by_column() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await (ctx.barrier() if ctx.replica_id_in_sync_group == 0 else ctx.barrier())  # noqa: RUF034

    report = (await error_of(program)).report
    assert (report.reason, report.suspects) == (Reason.CALL_SITE, (0,))
    assert "They are different calls on one line: column 72 on replicas 1 and 2, column 16 on replica 0." in str(report)


async def test_no_replica_passes_the_point_and_each_that_waits_is_told() -> None:
    told: dict[int, Any] = {}

    async def program(ctx: ReplicaContext) -> None:
        try:
            await (ctx.barrier() if ctx.replica_id_in_sync_group == 1 else ctx.all_reduce("SUM", 1))
        except CollectiveMismatchError as error:
            told[ctx.replica_id_in_sync_group] = error
            raise
        pytest.fail("it has passed")

    error = await error_of(program, 4)
    assert told.keys() == {0, 1, 2, 3}
    assert all(one.report is error.report for one in told.values())
    assert len({id(one) for one in told.values()}) == 4  # one for each: tracebacks do not mix
