"""Variables start from replica 0's value on any worker; datasets give each worker its own replicas' parts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import ReplicaContext, get_replica_context
from aiodist._strategy.scope import replicas_of
from aiodist._workers.messages import Ask, Query
from tests.workers.simulated import Job, on_trio_too

LAYOUTS = [(2,), (1, 1), (2, 1), (1, 2, 1)]
pytestmark = pytest.mark.anyio


def first_of(strategy: Any) -> int:
    return int(replicas_of(strategy).share.own.start)


@on_trio_too
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_variable_of_a_scope_starts_from_the_first_workers_value(layout: tuple[int, ...]) -> None:
    async def program(strategy: Any) -> Any:
        with strategy.scope():
            v = aiodist.Variable(np.full(2, first_of(strategy) + 1.0), aggregation="sum")
        if len(layout) > 1:
            with pytest.raises(aiodist.ReplicaContextError, match=r"has not arrived yet; wait .*await strategy.run"):
                v.read_value()

        async def replica() -> None:
            assert v.numpy().tolist() == [1, 1]
            await v.assign_add(np.ones(2))

        await strategy.run(replica)
        return v.numpy().tolist()

    for outcome in await Job(*layout).everywhere(program):
        assert outcome == [1 + sum(layout)] * 2


@pytest.mark.parametrize("question", [Query(0), Ask(0)], ids=str)
def test_late_question_about_a_finished_run_does_not_disturb_a_variables_creation(question: Any) -> None:
    job, contexts = Job(1, 1), []

    async def program(ctx: ReplicaContext) -> None:
        contexts.append(ctx)  # which keeps its run alive
        await ctx.barrier()

    asyncio.run(job.run(program))
    job.cluster.teams[0].post(question)
    with job.strategies[0].scope():
        assert aiodist.Variable(1.0).name == "Variable"
    assert contexts


@pytest.mark.parametrize("reduction", ["fast", "ordered"])
@pytest.mark.parametrize(("aggregation", "value"), [("sum", 3.0), ("mean", 1.5), ("only_first_replica", 1.0)])
async def test_variable_of_a_single_worker_is_assigned(reduction: str, aggregation: str, value: float) -> None:
    strategy = aiodist.MultiWorkerMirroredStrategy(2, reduction=reduction)
    with strategy.scope():
        v = aiodist.Variable(0.0, aggregation=aggregation)

    async def replica() -> None:
        await v.assign_add(get_replica_context().replica_id_in_sync_group + 1.0)

    await strategy.run(replica)
    assert v.numpy() == value
    strategy.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica", "none"])
async def test_assignments_are_aggregated_over_all_workers(layout: tuple[int, ...], aggregation: str) -> None:
    n = sum(layout)

    async def program(ctx: ReplicaContext) -> Any:
        r = ctx.replica_id_in_sync_group
        v = aiodist.Variable(np.full(100, float(r + 3)), aggregation=aggregation)
        await ctx.barrier()
        start = v.read_value()[0]
        await v.assign(np.full(100, 7.0 if aggregation == "none" else r))
        return start, v.read_value()[0]

    right = {"sum": n * (n - 1) / 2, "mean": (n - 1) / 2, "only_first_replica": 0, "none": 7}[aggregation]
    assert await Job(*layout).values(program) == [(3, right)] * n


async def test_different_values_without_aggregation_are_refused_everywhere() -> None:
    async def program(ctx: ReplicaContext) -> None:
        v = aiodist.Variable(0.0, name="v")
        await v.assign(ctx.replica_id_in_sync_group // 2)

    for layout in [(2, 1, 1), (1, 3), (4,)]:
        for outcome in await Job(*layout).run(program):
            assert isinstance(outcome, ValueError)
            assert "mirrored variable 'v' would get different values: replica 2's is not replica 0's" in str(outcome)


async def test_values_that_compare_equal_and_nans_are_the_same_value() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        sign = (-1.0) ** ctx.replica_id_in_sync_group
        v = aiodist.Variable(np.zeros(3))
        await v.assign(np.copysign([np.nan, 0.0, 1.0], [sign, sign, 1.0]))
        return v.read_value()[2]

    assert await Job(2, 1).values(program) == [1.0] * 3


async def test_sync_on_read_variable_is_reduced_and_not_read_outside() -> None:
    async def program(strategy: Any) -> Any:
        with strategy.scope():
            v = aiodist.Variable(0, synchronization="on_read", aggregation="sum")

        async def replica() -> None:
            await v.assign_add(get_replica_context().replica_id_in_sync_group)

        await strategy.run(replica)
        with pytest.raises(ValueError, match=r"await strategy.reduce\(op, variable, axis=None\)"):
            v.read_value()
        before = await strategy.reduce("SUM", v, None)
        v.assign(10)
        return int(before), int(await strategy.reduce("SUM", v, None))

    assert await Job(2, 1, 1).everywhere(program) == [(6, 10)] * 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_global_batches_are_split_over_all_replicas(layout: tuple[int, ...]) -> None:
    n = sum(layout)

    async def program(strategy: Any) -> Any:
        dataset = strategy.experimental_distribute_dataset([np.arange(2 * n - 1), np.arange(n)])
        return [strategy.experimental_local_results(batch) async for batch in dataset]

    outcomes = await Job(*layout).everywhere(program)
    for step, size in enumerate((2 * n - 1, n)):
        parts = [part for outcome in outcomes for part in outcome[step]]
        assert len(parts) == n
        np.testing.assert_array_equal(np.concatenate(parts), np.arange(size))


@on_trio_too
async def test_pipelines_of_uneven_length_end_together() -> None:
    async def program(strategy: Any) -> Any:
        def pipeline(context: aiodist.InputContext) -> Any:
            assert (context.num_input_pipelines, context.num_replicas_in_sync) == (3, 4)
            return [np.full((2, 3), context.input_pipeline_id)] * (2 * context.input_pipeline_id)

        dataset = strategy.distribute_datasets_from_function(pipeline)
        for take in (iter, lambda one: next(aiter(one))):
            with pytest.raises(TypeError, match="async for"):
                take(dataset)
        found = []
        async for batch in dataset:
            sums = await strategy.reduce("SUM", batch, 0)
            found.append((float(sums[0]), [len(part) for part in strategy.experimental_local_results(batch)]))
        return found

    first, second, third = await Job(1, 2, 1).everywhere(program)
    assert [total for total, _ in first] == [total for total, _ in second] == [total for total, _ in third]
    assert [sizes for _, sizes in first] == [[0]] * 4
    assert [sizes for _, sizes in second] == [[2, 2], [0, 0], [0, 0], [0, 0]]
    assert [sizes for _, sizes in third] == [[2]] * 4
    assert [total for total, _ in first] == [8, 4, 4, 4]


async def test_cluster_settings_must_agree_with_the_launcher() -> None:
    async def program(strategy: Any) -> Any:
        strategy.configure(cluster_spec={"worker": ["a:1", "b:1"]}, task_type="worker", task_id=first_of(strategy))
        with pytest.raises(ValueError, match="the launcher decides"):
            strategy.configure(cluster_spec={"worker": ["a:1"]}, task_type="worker", task_id=0)
        return strategy.cluster_resolver.task_id

    assert await Job(1, 1).everywhere(program) == [0, 1]


async def _variable(strategy: Any, **how: Any) -> aiodist.Variable:
    with strategy.scope():
        v = aiodist.Variable(np.zeros(2), name="v", **how)
    await strategy.run(lambda: None)
    return v


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_update_of_a_mirrored_variable_is_the_same_or_an_error_on_all_workers(layout: Any) -> None:
    async def program(strategy: Any) -> Any:
        v = await _variable(strategy)
        await strategy.extended.update(v, lambda component, x: component.assign_add(x), (np.ones(2),))
        own = aiodist.PerReplica([np.full(2, i) for i in range(first_of(strategy), first_of(strategy) + len(v.values))])
        with pytest.raises(ValueError, match="'v' would get different values: replica 1's is not replica 0's"):
            await strategy.extended.update(v, lambda component, x: component.assign(x), (own,))
        return v.numpy().tolist(), int(await strategy.reduce("MAX", 3, None))

    assert await Job(*layout).everywhere(program) == [([1, 1], 3)] * len(layout)


@pytest.mark.parametrize("aggregation", ["sum", "none"])
async def test_mirrored_variable_refuses_a_value_for_each_replica(aggregation: str) -> None:
    async def program(strategy: Any) -> Any:
        v = await _variable(strategy, aggregation=aggregation)
        with pytest.raises(ValueError, match=r"has components on other workers, which it cannot wait for"):
            v.assign(aiodist.PerReplica([np.ones(2)] * len(v.values)))
        v.assign(np.ones(2))
        return v.numpy().tolist()

    assert await Job(2, 1).everywhere(program) == [[1, 1]] * 2
    assert await Job(2).everywhere(lambda strategy: strategy.run(lambda: None)) == [None]
