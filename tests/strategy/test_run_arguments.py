"""What goes into run, and what comes out: nests of any kind."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest

from aiodist import CollectiveTimeoutError, CommunicationOptions, Mirrored, PerReplica
from tests.collectives.kinds_of_values import NAMESPACE, Pair, Point
from tests.runtime.programs import here, mirrored, on_each, replica
from tests.runtime.warned import warned
from tests.workers.simulated import Job

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

    def program(*args: Any) -> None:
        assert all(mine is given for mine, given in zip(args, objects, strict=True))

    for args in (objects, tuple(objects)):
        await mirrored(3).run(program, args=args)


async def test_regrouped_results() -> None:
    marker = object()

    def program() -> Any:
        return {"array": np.full(1, replica()), "id": replica(), "count": 7, "none": None, "marker": marker}

    result = await mirrored(2).run(program)
    assert [one.tolist() for one in result["array"].values] == [[0], [1]]
    assert (result["id"].values, result["count"].values) == ((0, 1), (7, 7))
    assert (result["none"], result["marker"]) == (None, marker)


async def test_results_of_different_structure() -> None:
    strategy, results = mirrored(3), (1, 2, [3])
    with pytest.raises(ValueError, match="the replicas' results must have the same structure") as caught:
        await strategy.run(lambda: results[replica()])
    assert caught.value.values == results  # type: ignore[attr-defined]
    assert await strategy.run(lambda: None) is None


async def test_coroutine_function_callable_object_and_method() -> None:
    class Model:
        async def __call__(self) -> Any:
            return await here().all_reduce("SUM", 1)

        def method(self) -> Any:
            return here().all_reduce("SUM", 2)

    assert await on_each(3, Model()) == (3, 3, 3)
    assert await on_each(3, Model().method) == (6, 6, 6)


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

    strategy = mirrored(2)
    with warned() as told:
        assert await strategy.run(program) == {"w": None, "b": [None]}
        await strategy.reduce("SUM", [None], None)
        await strategy.gather([None], 0)
        await strategy.reduce("SUM", [], None)
        await Job(1, 1).everywhere(lambda s: s.reduce("SUM", [None], None))
        await Job(1, 1).everywhere(lambda s: s.gather([None], 0))
    assert [(one.category, one.file) for one in told] == [(RuntimeWarning, __file__)] * 8


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


async def test_local_results() -> None:
    strategy = mirrored(2)
    assert strategy.experimental_local_results(PerReplica([1, 2])) == (1, 2)
    nest = {"a": PerReplica([1, 2]), "b": 3}
    assert strategy.experimental_local_results(nest) == ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    assert strategy.experimental_local_results("plain") == ("plain", "plain")
    assert mirrored(1).experimental_local_results("plain") == ("plain",)
    with pytest.raises(ValueError, match="2 components, one for each replica, got a PerReplica with 3"):
        strategy.experimental_local_results(PerReplica([1, 2, 3]))


# Nests of every kind: into replicas, through a collective and a merge function, and out again.


class Batch(dict[str, Any]):
    pass


class Ordered(OrderedDict[str, Any]):
    pass


class Grouped(defaultdict[str, Any]):
    pass


NESTS: dict[str, Callable[[Any, Any], Any]] = {
    "namedtuple": Pair,
    "defaultdict": lambda a, b: defaultdict(list, z=a, y=b),
    "OrderedDict": lambda a, b: OrderedDict(z=a, y=b),
    "dataclass": Point,
    "dict subclass": lambda a, b: Batch(z=a, y=b),
    "OrderedDict subclass": lambda a, b: Ordered(z=a, y=b),
    "defaultdict subclass": lambda a, b: Grouped(list, z=a, y=b),
    "dict subclass deep": lambda a, b: [Batch(z=(Batch(x=a), b))],
    "deep": lambda a, b: Pair(OrderedDict(z=[a]), defaultdict(int, y=(Point(b, None),))),
}


@pytest.mark.parametrize("make", NESTS.values(), ids=NESTS)
async def test_nest_keeps_its_kind_on_the_whole_way(make: Callable[[Any, Any], Any]) -> None:
    strategy = mirrored(2)
    given = make(PerReplica([np.ones(2), np.full(2, 2.0)]), PerReplica([1.0, 2.0]))
    like = make(np.zeros(2), 0.0)

    async def merge(strategy: Any, nest: Any) -> Any:
        assert kind(nest) == kind(like)
        return await strategy.reduce("MAX", nest, None)

    async def program(nest: Any) -> Any:
        assert kind(nest) == kind(like)
        summed = await here().all_reduce("SUM", nest)
        assert kind(summed) == kind(like)
        return await here().merge_call(merge, (summed,))

    results = await strategy.run(program, (given,))
    for local in strategy.experimental_local_results(results):
        assert kind(local) == kind(like)
        first, second = optree.tree_leaves(local, namespace=NAMESPACE)
        assert sorted([np.sum(first), np.sum(second)]) == [3, 6]


def kind(nest: Any) -> Any:
    """Return a nest's structure: its types, keys and default factories."""
    return optree.tree_structure(nest, namespace=NAMESPACE)
