"""Strategies: the one in force, arguments and results of runs, the recorder, and the names of TensorFlow 1."""

from __future__ import annotations

import contextvars
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import (
    CommunicationOptions,
    MirroredStrategy,
    PerReplica,
    RecordedCall,
    ReplicaContext,
    ReplicaContextError,
    Strategy,
    Variable,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from tests.runtime.programs import here, mirrored, replica, run, turns, warned
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio


def situation() -> tuple[Any, bool, bool, bool]:
    """Return the answers of the four functions about the current context."""
    return get_strategy(), has_strategy(), in_cross_replica_context(), get_replica_context() is None


def test_default_strategy_is_in_force_outside_of_scopes() -> None:
    default, *answers = situation()
    assert answers == [False, False, False]
    assert isinstance(default, Strategy)
    assert (default.num_replicas_in_sync, default.extended.devices, default.cluster_resolver) == (1, ("CPU:0",), None)
    with default.scope() as given:
        assert given is default
        assert situation() == (default, False, False, False)
    strategy = mirrored(2)
    with strategy.scope(), default.scope():
        assert get_strategy() is strategy


def test_scope_is_cross_replica_context_and_reusable() -> None:
    strategy = mirrored(2)
    scope, other = strategy.scope(), mirrored(3).scope()
    with scope as given, scope, strategy.scope():
        assert given is strategy
        assert situation() == (strategy, True, True, True)
        with pytest.raises(ReplicaContextError, match="under another strategy"):
            other.__enter__()
        assert get_strategy() is strategy
    assert situation()[1:] == (False, False, False)
    with pytest.raises(KeyError), other:
        raise KeyError
    assert not has_strategy()


async def test_scope_entered_by_several_tasks() -> None:
    scope, seen = mirrored(2).scope(), []

    async def task(count: int) -> None:
        with scope:
            await turns(count)
            seen.append(has_strategy())
        seen.append(has_strategy())

    async with anyio.create_task_group() as tasks:
        for count in (1, 3, 2):
            tasks.start_soon(task, count)
    assert seen == [True, False] * 3


async def test_experimental_set_strategy_lasts_until_the_next() -> None:
    def program() -> None:
        strategy, other = mirrored(2), mirrored(3)
        experimental_set_strategy(strategy)
        assert situation() == (strategy, True, True, True)
        experimental_set_strategy(other)
        assert get_strategy() is other
        with other.scope(), pytest.raises(ReplicaContextError, match="in the scope or a merge function"):
            experimental_set_strategy(None)
        assert get_strategy() is other
        experimental_set_strategy(None)
        assert situation()[1:] == (False, False, False)

    contextvars.copy_context().run(program)
    with pytest.raises(ReplicaContextError, match="cannot be set inside replica"):
        await mirrored(2).run(experimental_set_strategy, (None,))


# The default context.


async def test_collectives_in_the_default_context() -> None:
    context, x, out = get_replica_context(), np.arange(6).reshape(2, 3), np.zeros((2, 3), int)
    assert context is get_replica_context()
    assert (context.devices, context.strategy) == (("CPU:0",), get_strategy())
    assert repr(context) == "<ReplicaContext: replica 0 of 1 on CPU:0>"
    await context.barrier()
    for handle in (
        *(context.all_reduce(op, x) for op in ("SUM", "MAX", "MEAN")),
        context.all_gather(x, 1),
        context.broadcast(x),
        context.reduce_scatter("SUM", x),
        context.all_to_all(x, 0, 1),
    ):
        assert handle.done()
        for found in (await handle, await handle):
            np.testing.assert_array_equal(found, x)
            assert not np.shares_memory(found, x)
            assert not found.flags.writeable
    assert await context.all_reduce("SUM", {"x": 3, "none": None}) == {"x": 3, "none": None}
    assert (await context.all_reduce("SUM", x, out=out) is out, out.tolist()) == (True, x.tolist())
    assert await context.run_sync(divmod, 7, 2) == (3, 1)

    async def merge(strategy: Any, x: Any, *, y: int) -> Any:
        await checkpoint()
        return situation()[1:], strategy is get_strategy(), x + y

    assert await context.merge_call(merge, args=(1,), kwargs={"y": 2}) == ((False, True, True), True, 3)
    assert not in_cross_replica_context()


async def test_default_context_under_another_strategy() -> None:
    context = get_replica_context()
    with mirrored(2).scope(), pytest.raises(ReplicaContextError, match="cross-replica context"):
        context.barrier()
    with pytest.raises(ReplicaContextError, match="each replica uses its own"):
        await mirrored(2).run(context.barrier)
    assert await context.all_reduce("SUM", 1) == 1


def test_repr_names_the_devices() -> None:
    assert repr(mirrored(2)) == "<MirroredStrategy: 2 replicas on CPU:0, CPU:1>"
    assert repr(mirrored(9)) == "<MirroredStrategy: 9 replicas on CPU:0, CPU:1, … CPU:8>"
    assert repr(get_strategy()) == "<_DefaultStrategy: 1 replica on CPU:0>"


# Arguments and results of runs.


async def test_results_of_different_structure_are_in_the_error() -> None:
    strategy, results = mirrored(3), (1, 2, [3])
    with pytest.raises(ValueError, match="the replicas' results must have the same structure") as caught:
        await strategy.run(lambda: results[replica()])
    assert caught.value.values == results  # type: ignore[attr-defined]
    assert await strategy.run(lambda: None) is None


SWAPPED: Any = (np.ones(1), "SUM")


@pytest.mark.parametrize(
    ("forgets", "text"),
    [
        (lambda: [step()], r"result\[0\] is <coroutine object step .*is `await` missing\?"),
        (lambda: {"x": here().barrier()}, r"result\['x'\] is <CollectiveHandle: barrier\(\) #0.*is `await` missing\?"),
        (lambda: here().merge_call(lambda _: [step()]), r"result\[0\] is <coroutine object step"),
        (lambda: here().all_reduce(*SWAPPED), r"the arguments are swapped: got 'SUM' second"),
    ],
    ids=["coroutine", "handle", "merge function", "swapped"],
)
async def test_forgotten_await_and_swapped_arguments(forgets: Callable[[], Any], text: str) -> None:
    async def coroutine_function() -> Any:
        return forgets()

    with warned() as warnings:
        for fn in (forgets, coroutine_function):
            with pytest.raises((TypeError, ValueError), match=text if fn is forgets else "missing|swapped"):
                await mirrored(2).run(fn)
    assert warnings == []


async def step() -> int:
    return 1


async def test_missing_await_of_run_is_named_by_the_next_call() -> None:
    strategy = mirrored(2)

    async def generator() -> Any:
        yield 1

    for use in (
        lambda: strategy.gather(strategy.run(step), 0),
        lambda: strategy.reduce("SUM", strategy.run(step), None),
        lambda: strategy.extended.reduce_to("MEAN", strategy.run(step), "CPU:0"),
        lambda: strategy.experimental_local_results(strategy.run(step)),
    ):
        with pytest.raises(TypeError, match=r"value is <coroutine object Strategy.run .*is `await` missing\?"):
            await use()  # type: ignore[misc]
    await strategy.group(strategy.run(step))
    with pytest.raises(TypeError, match="is `return` missing where it says `yield`"):
        await strategy.run(generator)


async def test_value_whose_leaves_are_all_none_is_warned_of() -> None:
    async def program() -> Any:
        await here().broadcast([None])
        return await here().all_reduce("SUM", {"w": None, "b": [None]})

    async def both(strategy: Any) -> None:
        await strategy.reduce("SUM", [None], None)
        await strategy.gather([None], 0)

    strategy = mirrored(2)
    with warned() as warnings:
        assert await strategy.run(program) == {"w": None, "b": [None]}
        await both(strategy)
        await strategy.reduce("SUM", [], None)
        await Job(1, 1).everywhere(both)
    assert [(one.category, one.file) for one in warnings] == [(RuntimeWarning, __file__)] * 10


# The recorder.


def fields(calls: tuple[RecordedCall, ...]) -> list[tuple[int, str, bool, str | None]]:
    return [(call.sequence_number, call.call, call.complete, call.group) for call in calls]


async def test_calls_are_recorded_during_a_run_and_after_its_end() -> None:
    recorder = (strategy := mirrored(3)).recorder
    assert (recorder.running, recorder.last, str(recorder)) == ((), None, "no run yet")
    seen: list[Any] = []

    async def program(ctx: ReplicaContext) -> None:
        if replica() != 1:
            await ctx.new_group([0, 2], name="pair").barrier()
        await ctx.barrier()
        if replica() == 1:
            (record,) = recorder.running
            assert record.in_progress
            seen.extend([fields(record.calls(0)), fields(record.calls(1))])
        await ctx.all_reduce("SUM", np.ones(3, np.float32))

    await run(strategy, program)
    first, in_the_group = (0, "barrier()", True, None), (0, "barrier()", True, "group 'pair' of replicas 0 and 2")
    second, record = "all_reduce(SUM, float32[3])", recorder.last
    assert seen == [[first, (1, second, False, None), in_the_group], [first]]
    assert record is not None
    assert (record.devices, record.in_progress, recorder.running) == (("CPU:0", "CPU:1", "CPU:2"), False, ())
    made = [first, (1, second, True, None)]
    assert [fields(record.calls(i)) for i in range(3)] == [[*made, in_the_group], made, [*made, in_the_group]]
    assert record.calls(0)[0].location.function == "program"
    with pytest.raises(IndexError, match="replica_id must be from 0 to 2, got 3"):
        record.calls(3)


async def test_record_of_a_failed_run_has_a_text_and_keeps_no_value_alive() -> None:
    strategy, kept = mirrored(4), list[weakref.ref[np.ndarray]]()

    async def program(ctx: ReplicaContext) -> None:
        value = np.ones(100)
        kept.append(weakref.ref(value))
        await ctx.all_reduce("SUM", value)
        if replica() == 3:
            raise ValueError("mine")
        await ctx.all_reduce("SUM", value)

    with pytest.raises(ValueError, match="mine"):
        await run(strategy, program)
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4
    lines = str(strategy.recorder).splitlines()
    assert lines[0] == "run of 4 replicas, ended"
    assert lines[1].startswith("  replicas 0-2")
    assert lines[2].startswith("    #0  all_reduce(SUM, float64[100])   tests/strategy/test_strategy.py:")
    assert lines[3].endswith(" in program   open")
    assert lines[4].startswith("  replica 3")


# The names of TensorFlow 1.


async def batches() -> AsyncIterator[Any]:
    for k in range(2):
        await checkpoint()
        yield PerReplica([k, k + 10])


async def test_experimental_run_takes_the_next_element() -> None:
    strategy = mirrored(2)

    async def program(x: int) -> Any:
        return await here().all_reduce("sum", x)

    for iterator in (batches(), iter([PerReplica([0, 10]), PerReplica([1, 11])])):
        assert (await strategy.experimental_run(program, iterator)).values == (10, 10)
        assert (await strategy.experimental_run(program, iterator)).values == (12, 12)
        with pytest.raises(StopAsyncIteration):
            await strategy.experimental_run(program, iterator)
    assert (await strategy.experimental_run(replica)).values == (0, 1)
    with pytest.raises(TypeError, match="must be an iterator"):
        await strategy.experimental_run(program, [1])


async def test_names_of_tensorflow_1_call_their_successors() -> None:
    def program(x: int, y: int) -> int:
        return x + y + replica()

    strategy = mirrored(2)
    assert (await strategy.experimental_run_v2(program, args=(1,), kwargs={"y": 2})).values == (3, 4)
    assert strategy.unwrap({"a": PerReplica([1, 2])}) == ({"a": 1}, {"a": 2})
    with strategy.scope():
        v = Variable(1.0)
    with strategy.colocate_vars_with(v):
        pass


async def test_group_awaits_every_awaitable_of_a_nest() -> None:
    done = []

    async def work(k: int) -> None:
        await checkpoint()
        done.append(k)

    strategy = mirrored(2)
    assert await strategy.group({"a": PerReplica([work(1), work(2)]), "b": 5}, name="step") is None  # type: ignore[func-returns-value]
    await strategy.group(3)
    await strategy.group([work(3), None])
    assert done == [1, 2, 3]


def test_update_config_proto_returns_a_copy() -> None:
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], order_check="signature")
    strategy.configure(session_config={"log": True})
    config = {"log": {"flags": ["a"]}, "devices": ["CPU:9"]}
    updated = strategy.update_config_proto(config)
    collectives = {"order_check": "signature", **asdict(CommunicationOptions())}
    assert updated == {"log": {"flags": ["a"]}, "devices": ["CPU:0", "CPU:1"], "collectives": collectives}
    updated["log"]["flags"].append("b")
    assert config == {"log": {"flags": ["a"]}, "devices": ["CPU:9"]}
