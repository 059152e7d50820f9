"""Nests of every kind, on the whole way: into replicas, through a collective and a merge function, and out again."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import optree
import pytest

from aiodist import PerReplica
from tests.collectives.kinds_of_values import NAMESPACE, Pair, Point
from tests.runtime.programs import here, mirrored

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


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
