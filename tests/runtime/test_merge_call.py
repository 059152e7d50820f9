"""merge_call: one function, once, for all replicas, in cross-replica context."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest

import aiodist
from aiodist import Mirrored, PerReplica, ReplicaContextError
from tests.runtime.programs import here, mirrored, on_each, replica, still_works

pytestmark = pytest.mark.anyio

variable: ContextVar[int] = ContextVar("variable", default=-1)


async def test_plain_function_runs_once_on_regrouped_arguments_with_replica_0s_context() -> None:
    seen = []

    def merge(strategy: Any, x: Any, count: Any, *, name: Any, place: Any) -> str:
        seen.append((strategy, x.values, count.values, name, place.values, variable.get()))
        return "done"

    async def program() -> Any:
        variable.set(100 + replica())
        names = {"name": "sgd".upper(), "place": f"r{replica()}"}
        return await here().merge_call(merge, args=(replica(), 7), kwargs=names)

    strategy = mirrored(3)
    assert (await strategy.run(program)).values == ("done",) * 3
    assert seen == [(strategy, (0, 1, 2), (7, 7, 7), "SGD", ("r0", "r1", "r2"), 100)]


async def test_result_gives_each_replica_its_component_at_any_depth() -> None:
    async def program() -> Any:
        return await here().merge_call(lambda _: {"a": PerReplica([1, 2]), "b": [Mirrored([3, 3]), "bare"]})

    assert await on_each(2, program) == ({"a": 1, "b": [3, "bare"]}, {"a": 2, "b": [3, "bare"]})


async def test_merge_function_is_in_cross_replica_context_and_may_run_functions() -> None:
    async def inner() -> int:
        total: int = await here().all_reduce("SUM", replica() + 1)
        return total

    async def merge(strategy: Any) -> Any:
        assert aiodist.in_cross_replica_context()
        assert aiodist.get_replica_context() is None
        assert aiodist.get_strategy() is strategy
        assert aiodist.has_strategy()
        assert await strategy.reduce("SUM", PerReplica([1, 2, 3]), None) == 6
        return await strategy.run(inner)

    async def program() -> Any:
        merged = await here().merge_call(merge)
        assert not aiodist.in_cross_replica_context()
        return merged + await here().all_reduce("SUM", 100)

    assert await on_each(3, program) == (306, 306, 306)


async def test_exception_may_be_caught_by_every_replica_and_comes_out_once_and_as_itself() -> None:
    error = KeyError("merge")

    def fail() -> None:
        if replica() == 1:
            raise error

    async def merge(strategy: Any) -> None:
        await strategy.run(fail)

    async def program() -> None:
        with pytest.raises(KeyError):
            await here().merge_call(merge)
        assert await here().all_reduce("SUM", 1) == 3
        await here().merge_call(merge)

    strategy = mirrored(3)
    with pytest.raises(KeyError) as caught:
        await strategy.run(program)
    assert caught.value is error
    assert len(error.__notes__) == 3  # one for each run
    await still_works(strategy)


async def test_per_replica_result_of_another_length() -> None:
    async def program() -> Any:
        return await here().merge_call(lambda strategy: PerReplica([1, 2, 3]))

    with pytest.raises(ValueError, match="2 components, one for each replica, got a PerReplica with 3"):
        await mirrored(2).run(program)


async def test_collective_inside_the_merge_function_is_refused_with_both_lines() -> None:
    async def merge(strategy: Any, context: Any) -> None:
        await context.values[0].barrier()

    async def program() -> None:
        await here().merge_call(merge, (here(),))

    with pytest.raises(ReplicaContextError, match=r"combine per-replica values with `await strategy.reduce") as caught:
        await mirrored(2).run(program)
    line = program.__code__.co_firstlineno + 1
    note = next(note for note in caught.value.__notes__ if "merge function" in note)
    assert note.startswith("in the merge function of merge_call(merge) #0 at ")
    assert note.endswith(f"test_merge_call.py:{line} in program")
    assert "merge" in [entry.name for entry in caught.traceback]
