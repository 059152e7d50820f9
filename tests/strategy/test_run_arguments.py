"""What goes into run, and what comes out: nests of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiodist import CollectiveTimeoutError, CommunicationOptions, Mirrored, PerReplica
from tests.runtime.programs import here, mirrored, replica, warned
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio


class Batch(dict[str, Any]):
    """A nest by its class alone: nobody has registered it."""


async def test_per_replica_arguments_at_any_depth() -> None:
    seen: dict[int, Any] = {}

    def program(*args: Any, **kwargs: Any) -> None:
        seen[replica()] = args, kwargs

    first, deep = PerReplica([1, 2]), [Batch(a=PerReplica(["x", "y"])), (Mirrored([5, 5]), "bare")]
    await mirrored(2).run(program, args=(first, deep), kwargs={"k": {"p": PerReplica([None, 3])}, "plain": 7})
    assert seen == {
        0: ((1, [{"a": "x"}, (5, "bare")]), {"k": {"p": None}, "plain": 7}),
        1: ((2, [{"a": "y"}, (5, "bare")]), {"k": {"p": 3}, "plain": 7}),
    }
    assert type(seen[1][0][1][0]) is Batch


async def test_everything_else_is_passed_as_the_object_itself() -> None:
    objects: list[Any] = [[1, 2], {"a": [3]}, (4,), None, object(), np.ones(2), {5}, []]

    def program(*args: Any) -> None:
        assert all(mine is given for mine, given in zip(args, objects, strict=True))

    for args in (objects, tuple(objects)):
        await mirrored(3).run(program, args=args)


async def test_regrouped_results_and_arguments_of_merge_functions() -> None:
    marker = object()

    async def program() -> Any:
        mine = Batch(array=np.full(1, replica()), id=replica(), count=7, none=None, marker=marker)
        found: list[Any] = []
        await here().merge_call(lambda _, nest: found.append(nest), (mine,))
        for nest in found:
            assert type(nest) is Batch
            assert (nest["id"].values, nest["none"], nest["marker"]) == ((0, 1), None, marker)
        return mine

    result = await mirrored(2).run(program)
    assert type(result) is Batch
    assert [one.tolist() for one in result["array"].values] == [[0], [1]]
    assert (result["id"].values, result["count"].values) == ((0, 1), (7, 7))
    assert (result["none"], result["marker"]) == (None, marker)


async def test_results_of_different_structure() -> None:
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

    with warned() as told:
        for fn in (forgets, coroutine_function):
            with pytest.raises((TypeError, ValueError), match=text if fn is forgets else "missing|swapped"):
                await mirrored(2).run(fn)
    assert told == []


async def step() -> int:
    return 1


async def test_strategy_asks_for_a_missing_await() -> None:
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


async def test_value_of_nothing_but_none_is_warned_of() -> None:
    async def program() -> Any:
        return await here().all_reduce("SUM", {"w": None, "b": [None]})

    async def both(strategy: Any) -> None:
        await strategy.reduce("SUM", [None], None)
        await strategy.gather([None], 0)

    strategy = mirrored(2)
    with warned() as told:
        assert await strategy.run(program) == {"w": None, "b": [None]}
        await both(strategy)
        await strategy.reduce("SUM", [], None)
        await Job(1, 1).everywhere(both)
    assert [(one.category, one.file) for one in told] == [(RuntimeWarning, __file__)] * 8


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


def test_local_results() -> None:
    strategy, value = mirrored(2), PerReplica([1, 2])
    assert strategy.experimental_local_results(value) == (1, 2)
    assert strategy.experimental_local_results({"a": value, "b": 3}) == ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    assert strategy.experimental_local_results("plain") == ("plain", "plain")
    with pytest.raises(ValueError, match="2 components, one for each replica, got a PerReplica with 3"):
        strategy.experimental_local_results([value, PerReplica([1, 2, 3])])
