"""Which strategy is in force: scopes, the default strategy, and the functions that ask."""

from __future__ import annotations

import contextvars
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import (
    PerReplica,
    ReplicaContextError,
    Strategy,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from tests.runtime.programs import mirrored, turns

pytestmark = pytest.mark.anyio


def situation() -> tuple[Any, bool, bool, bool]:
    """Return what the four functions say: the strategy, and three answers."""
    return get_strategy(), has_strategy(), in_cross_replica_context(), get_replica_context() is None


async def test_outside_any_strategy_the_default_one_is_in_force() -> None:
    default, *answers = situation()
    assert answers == [False, False, False]
    assert type(default).__mro__[1] is Strategy
    assert default.num_replicas_in_sync == 1
    assert default.extended.devices == ("CPU:0",)
    assert default.cluster_resolver is None
    assert get_strategy() is default


async def test_scope_is_cross_replica_context_and_may_be_entered_again() -> None:
    strategy = mirrored(2)
    scope = strategy.scope()
    with scope as given, scope, strategy.scope():
        assert given is strategy
        assert situation() == (strategy, True, True, True)
    assert situation()[1:] == (False, False, False)
    with pytest.raises(KeyError), scope:
        raise KeyError
    assert not has_strategy()


async def test_scope_of_another_strategy_or_inside_a_replica_is_refused() -> None:
    strategy, other = mirrored(2), mirrored(3)
    inner = other.scope()
    with strategy.scope():
        calls: list[Any] = [
            inner.__enter__,
            lambda: other.run(print),
            lambda: other.reduce("SUM", PerReplica([1, 2]), None),
            lambda: other.gather(PerReplica([np.ones(1)] * 2), 0),
        ]
        for call in calls:
            with pytest.raises(ReplicaContextError, match="under another strategy, <MirroredStrategy: 2 replicas"):
                await call()
        assert get_strategy() is strategy
    with pytest.raises(ReplicaContextError, match=r"strategy\.scope\(\) was called inside replica"):
        await strategy.run(strategy.scope().__enter__)
    with pytest.raises(ReplicaContextError, match="cannot be set inside replica"):
        await strategy.run(experimental_set_strategy, (None,))
    with inner:
        assert get_strategy() is other
    assert not has_strategy()


async def test_scope_of_the_default_strategy_changes_nothing() -> None:
    default = get_strategy()
    with default.scope() as given:
        assert given is default
        assert situation() == (default, False, False, False)
    strategy = mirrored(2)
    with strategy.scope(), default.scope():
        assert get_strategy() is strategy


async def test_one_scope_in_several_tasks() -> None:
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


async def test_experimental_set_strategy() -> None:
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


# The default context.


async def test_every_collective_works_in_the_default_context() -> None:
    context, x = get_replica_context(), np.arange(6).reshape(2, 3)
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
    assert await context.run_sync(divmod, 7, 2) == (3, 1)

    async def merge(strategy: Any, x: Any, *, y: int) -> Any:
        await checkpoint()
        return strategy is get_strategy(), in_cross_replica_context(), get_replica_context(), x + y

    assert await context.merge_call(merge, args=(1,), kwargs={"y": 2}) == (True, True, None, 3)
    assert not in_cross_replica_context()
    out = np.zeros((2, 3), int)
    assert (await context.all_reduce("SUM", x, out=out) is out, out.tolist()) == (True, x.tolist())


async def test_default_context_belongs_to_no_other_strategy() -> None:
    context = get_replica_context()
    with mirrored(2).scope(), pytest.raises(ReplicaContextError, match="cross-replica context"):
        context.barrier()
    with pytest.raises(ReplicaContextError, match="each replica uses its own"):
        await mirrored(2).run(context.barrier)
    assert await context.all_reduce("SUM", 1) == 1


def test_repr_of_strategies() -> None:
    assert repr(mirrored(1)) == "<MirroredStrategy: 1 replica on CPU:0>"
    assert repr(mirrored(2)) == "<MirroredStrategy: 2 replicas on CPU:0, CPU:1>"
    assert repr(mirrored(9)) == "<MirroredStrategy: 9 replicas on CPU:0, CPU:1, … CPU:8>"
    assert repr(get_strategy()) == "<_DefaultStrategy: 1 replica on CPU:0>"
