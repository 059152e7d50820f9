"""Values on GPUs by way of the host: for what is done there alone, such as reductions along an axis.

Along an axis NumPy adds in an order of its own, which no framework's sum does. So that the bits are those of the host,
what is on GPUs is copied to page-locked memory of the host, worked on as any value there, and copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from anyio import CancelScope
from anyio.lowlevel import checkpoint_if_cancelled

from aiodist.collective.kinds import BROADCAST
from aiodist.collective.signature import LeafMark, Signature
from aiodist.collective.work import Work
from aiodist.strategy.on_devices import described, is_on_gpus, result_of
from aiodist.strategy.variable import as_distributed
from aiodist.vocabulary import nests
from aiodist.vocabulary.device_arrays import DeviceArray, DeviceType
from aiodist.vocabulary.options import CommunicationOptions
from aiodist.vocabulary.values import DistributedValues


class ThroughHost:
    """A nest with values on GPUs among its leaves, or with none.

    Args:
        strategy: whose replicas' streams they may have been made on.
        value: the nest.
        replicas: the ids of those that have a component each, for errors.

    Attributes:
        value: the nest.
        marks: for each leaf whose arrays it has, if they are on GPUs; None where no leaf's are.

    Raises:
        TypeError: a component that cannot take part.
        ValueError: components that are not all on GPUs and of one framework.
    """

    def __init__(self, strategy: Any, value: Any, replicas: Sequence[int]) -> None:
        self._names: tuple[str, ...] = strategy.extended.devices
        self._leaves, self._structure = nests.flatten_with_none(value)
        self.value = value
        self._there: dict[int, tuple[DeviceType, list[DeviceArray]]] = {}
        for place, leaf in enumerate(self._leaves):
            if is_on_gpus(leaf):
                self._there[place] = described(_components(leaf), replicas)
        self.marks: Sequence[LeafMark] | None = (
            [self._mark(place) for place in range(len(self._leaves))] if self._there else None
        )
        self._landed: dict[int, Any] = {}

    def _mark(self, place: int) -> DeviceType | None:
        return self._there[place][0] if place in self._there else None

    async def down(self) -> Any:
        """Return the nest on the host."""
        if not self._there:
            return self.value
        from aiodist.collective.device_crossing import Landing  # loaded where there are arrays on GPUs

        arrays = [array for _, arrays in self._there.values() for array in arrays]
        marks = [mark for mark, arrays in self._there.values() for _ in arrays]
        signature = _signature([(array.shape, array.dtype) for array in arrays], marks)
        work = Landing(signature, [arrays], CommunicationOptions(), [0], self._names, [0]).work()
        (found,) = await _finished(work)
        landed, leaves = iter(found), list(self._leaves)
        for place, (_, there) in self._there.items():
            parts = [next(landed) for _ in there]
            leaf = as_distributed(leaves[place])
            self._landed[place] = leaves[place] = type(leaf)(parts) if isinstance(leaf, DistributedValues) else parts[0]
        return nests.unflatten(self._structure, leaves)

    async def up(self, result: Any) -> Any:
        """Return what the host has made of the nest, with each result where its leaf came from."""
        if not self._there:
            return result
        from aiodist.collective.device_crossing import Launching, staged

        leaves, structure = nests.flatten_with_none(result)
        unchanged = [place for place, landed in self._landed.items() if leaves[place] is landed]
        for place in unchanged:
            leaves[place] = self._leaves[place]
        made = {place: there for place, there in self._there.items() if place not in unchanged}
        if not made:
            return nests.unflatten(structure, leaves)
        arrays = [staged(np.asarray(leaves[place])) for place in made]
        marks = [mark for mark, _ in made.values()]
        came_from = [there[0] for _, there in made.values()]
        signature = _signature([(array.shape, array.dtype) for array in arrays], marks)
        work = Launching(signature, arrays, [came_from], CommunicationOptions(), [0], self._names, None).work()
        found = await _finished(work)
        for place, array in zip(made, found[0], strict=True):
            leaves[place] = array
        return nests.unflatten(structure, leaves)


def _components(leaf: Any) -> Sequence[Any]:
    leaf = as_distributed(leaf)
    return leaf.values if isinstance(leaf, DistributedValues) else [leaf]


def _signature(specs: Sequence[tuple[Any, Any]], marks: Sequence[DeviceType]) -> Signature:
    """Return what one replica would ask for with these arrays as leaves of a nest."""
    shapes, dtypes = zip(*specs, strict=True)
    return BROADCAST, None, 0, None, len(marks), shapes, dtypes, tuple(marks), None


async def _finished(work: Work) -> Any:
    """Return a result; the devices are waited for, whoever is cancelled."""
    result: Any = None
    with CancelScope(shield=True):
        result = await result_of(work)
    await checkpoint_if_cancelled()
    return result
