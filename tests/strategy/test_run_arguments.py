"""What goes into run, and what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist import CollectiveTimeoutError, CommunicationOptions, Mirrored, PerReplica, get_replica_context
from tests.runtime.programs import here, mirrored, replica
from tests.runtime.warned import warned

pytestmark = pytest.mark.anyio


async def test_per_replica_arguments_at_any_depth() -> None:
    seen: dict[int, Any] = {}

    def program(*args: Any, **kwargs: Any) -> None:
        seen[replica()] = args, kwargs

    first, deep = PerReplica([1, 2]), [{"a": PerReplica(["x", "y"])}, (Mirrored([5, 5]), "bare")]
    await mirrored(2).run(program, args=(first, deep), kwargs={"k": {"p": PerReplica([None, 3])}, "plain": 7})
    assert seen == {
        0: ((1, [{"a": "x"}, (5, "bare")]), {"k": {"p": None}, "plain": 7}),
        1: ((2, [{"a": "y"}, (5, "bare")]), {"k": {"p": 3}, "plain": 7}),
    }


async def test_everything_else_is_passed_as_the_object_itself() -> None:
    objects: list[Any] = [[1, 2], {"a": [3]}, (4,), None, object(), np.ones(2), {5}, []]

    def program(*args: Any) -> bool:
        return all(mine is given for mine, given in zip(args, objects, strict=True))

    for args in (objects, tuple(objects)):
        assert await mirrored(3).run(program, args=args) is True


async def test_list_argument_that_replicas_append_to() -> None:
    shared: list[int] = []
    await mirrored(3).run(lambda given: given.append(replica()), args=(shared,))
    assert shared == [0, 1, 2]


async def test_results_feed_the_next_run() -> None:
    strategy = mirrored(3)
    state = await strategy.run(lambda: {"w": np.full(2, replica()), "step": 0})
    for _ in range(3):
        state = await strategy.run(lambda s: {"w": s["w"] * 2, "step": s["step"] + 1}, args=(state,))
    assert state["step"] == 3
    assert [one.tolist() for one in state["w"].values] == [[0, 0], [8, 8], [16, 16]]


async def test_regrouped_results() -> None:
    marker = object()

    def program() -> Any:
        return {"array": np.full(1, replica()), "id": replica(), "same": "text", "none": None, "marker": marker}

    result = await mirrored(2).run(program)
    assert [one.tolist() for one in result["array"].values] == [[0], [1]]
    assert result["id"].values == (0, 1)
    assert (result["same"], result["none"], result["marker"]) == ("text", None, marker)


async def test_one_array_returned_by_all_is_still_one_local_result_a_replica() -> None:
    shared = np.ones(2)
    strategy = mirrored(3)
    result = await strategy.run(lambda: shared)
    assert isinstance(result, PerReplica)
    assert len(strategy.experimental_local_results(result)) == 3


async def test_one_replica_gives_its_value_bare() -> None:
    value = {"a": np.ones(1), "b": [1]}
    assert await mirrored(1).run(lambda: value) is value


@pytest.mark.parametrize("results", [[{"a": 1}, {"b": 1}], [(1,), (1, 2)], [[1], (1,)], [None, (1,)]], ids=str)
async def test_results_of_different_structure(results: list[Any]) -> None:
    strategy = mirrored(2)
    with pytest.raises(ValueError, match="the replicas' results must have the same structure"):
        await strategy.run(lambda: results[replica()])
    assert await strategy.run(lambda: 1) == 1


async def test_coroutine_function_callable_object_and_method() -> None:
    class Model:
        async def __call__(self) -> Any:
            return await here().all_reduce("SUM", 1)

        def method(self) -> Any:
            return here().all_reduce("SUM", 2)

    assert await mirrored(3).run(Model()) == 3
    assert await mirrored(3).run(Model().method) == 6


async def test_wrong_call_of_the_function_is_the_replicas_failure() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        await mirrored(2).run(lambda x: x)
    assert caught.value.__notes__ == ["replica 0 of 2 on CPU:0"]


async def test_coroutines_are_not_made_before_arguments_are_known_to_be_good() -> None:
    async def program(x: Any) -> None: ...

    with warned() as told, pytest.raises(ValueError, match="3 components"):
        await mirrored(3).run(program, args=(PerReplica([1, 2]),))
    assert told == []  # of a coroutine that nobody awaited


@pytest.mark.parametrize("where", ["run", "strategy"])
async def test_options_of_the_run_and_of_the_strategy(where: str) -> None:
    quick = CommunicationOptions(timeout_seconds=0.01)
    strategy = mirrored(2, communication_options=quick if where == "strategy" else None)

    async def program() -> None:
        import anyio

        if replica() == 1:
            await anyio.sleep_forever()
        await here().barrier()

    with pytest.raises(CollectiveTimeoutError) as caught:
        await strategy.run(program, options=quick if where == "run" else None)
    assert caught.value.report.suspects == (1,)


async def test_context_tells_strategy_devices_and_ids() -> None:
    strategy = mirrored(3)

    def program() -> tuple[Any, ...]:
        context = get_replica_context()
        return (
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
            context.devices,
            context.strategy is strategy,
        )

    ids, counts, (devices,), same = await strategy.run(program)
    assert ids.values == (0, 1, 2)
    assert counts == 3
    assert devices.values == ("CPU:0", "CPU:1", "CPU:2")
    assert same is True


async def test_local_results() -> None:
    strategy = mirrored(2)
    assert strategy.experimental_local_results(PerReplica([1, 2])) == (1, 2)
    nest = {"a": PerReplica([1, 2]), "b": 3}
    assert strategy.experimental_local_results(nest) == ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    assert strategy.experimental_local_results("plain") == ("plain", "plain")
    assert mirrored(1).experimental_local_results("plain") == ("plain",)
    with pytest.raises(ValueError, match="2 components, one for each replica, got a PerReplica with 3"):
        strategy.experimental_local_results(PerReplica([1, 2, 3]))
