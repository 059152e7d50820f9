"""Values on GPUs by way of the host: for what is done there alone, such as reductions along an axis.

Along an axis NumPy adds in an order of its own, which no framework's sum does. So that the bits are those of the host,
what is on GPUs is copied to page-locked memory of the host, worked on as any value there, and copied back. The memory
is there before anything is in it: so whatever is wrong with the arrays is found at the call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from anyio import CancelScope
from anyio.lowlevel import checkpoint_if_cancelled

from aiodist._arrays import nests
from aiodist._arrays.device import DeviceArray, DeviceType
from aiodist._arrays.leaves import LeafMark
from aiodist._arrays.values import DistributedValues, Mirrored
from aiodist._strategy.off_loop import call_off_loop
from aiodist._strategy.on_devices import described, is_on_gpus, result_of
from aiodist._strategy.variable import as_distributed

if TYPE_CHECKING:
    from aiodist._collectives.device import DeviceRun


class ThroughHost:
    """A nest with values on GPUs among its leaves, or with none.

    Args:
        strategy: whose replicas' streams they may have been made on.
        value: the nest.
        replicas: the ids of those that have a component each, for errors.

    Attributes:
        value: the nest on the host; what was on GPUs is there when `down` has returned.
        marks: for each leaf whose arrays it has, if they are on GPUs; None where no leaf's are.
        down: copies it down, with the devices waited for, whoever is cancelled; None where nothing is on GPUs.

    Raises:
        ImportError: what copies to and from GPUs is not installed.
        TypeError: a component that cannot take part.
        ValueError: components that are not all on GPUs and of one framework.
    """

    def __init__(self, strategy: Any, value: Any, replicas: Sequence[int]) -> None:
        self._names: tuple[str, ...] = strategy.extended.devices
        self._leaves, structure = nests.flatten_with_none(value)
        self._there: dict[int, tuple[DeviceType, list[DeviceArray]]] = {}
        for place, leaf in enumerate(self._leaves):
            if is_on_gpus(leaf):
                self._there[place] = described(_components(leaf), replicas)
        self._landed: dict[int, Any] = {}
        self.value = value
        self.marks: Sequence[LeafMark] | None = None
        self.down: Callable[[], Awaitable[object]] | None = None
        if self._there:
            self.marks = [self._mark(place) for place in range(len(self._leaves))]
            self.value = nests.unflatten(structure, self._land())

    def _mark(self, place: int) -> DeviceType | None:
        return self._there[place][0] if place in self._there else None

    def _land(self) -> list[Any]:
        """Make ready to copy down; return the leaves on the host."""
        from aiodist._collectives.device import bring_down  # loaded where there are arrays on GPUs

        marks = [mark for mark, arrays in self._there.values() for _ in arrays]
        run = bring_down(marks, [[array] for _, arrays in self._there.values() for array in arrays], [0], self._names)
        self.down = partial(_finished, run)
        landed, leaves = iter(run.landed()), list(self._leaves)
        for place, (_, there) in self._there.items():
            parts = [next(landed)[0] for _ in there]
            leaf = as_distributed(leaves[place])
            self._landed[place] = leaves[place] = type(leaf)(parts) if isinstance(leaf, DistributedValues) else parts[0]
        return leaves

    async def up(self, result: Any, targets: Sequence[tuple[int, ...]] | None = None) -> Any:
        """Return what the host has made of the nest, with the results of what is on GPUs there.

        Args:
            result: the nest of results.
            targets: for each leaf, the GPUs that get a result each: bare for one, mirrored for several. None: where the
                first of its components came from; what is still what came down stays as it was.
        """
        if not self._there:
            return result
        leaves, structure = nests.flatten_with_none(result)
        alike: dict[tuple[int, ...], list[int]] = {}
        for place, (_, there) in self._there.items():
            if targets is None and leaves[place] is self._landed[place]:
                leaves[place] = self._leaves[place]
            else:
                alike.setdefault(targets[place] if targets else (there[0].ordinal,), []).append(place)
        for ordinals, places in alike.items():
            rows = await self._launched({place: leaves[place] for place in places}, ordinals)
            for place, found in zip(places, rows, strict=True):
                leaves[place] = found[0] if len(found) == 1 else Mirrored(found)
        await checkpoint_if_cancelled()
        return nests.unflatten(structure, leaves)

    async def _launched(self, leaves: Mapping[int, Any], ordinals: Sequence[int]) -> list[list[Any]]:
        """Return arrays with the values of these leaves, which are on the host: by leaf, one on each GPU."""
        from aiodist._collectives.device import bring_up, staged

        arrays = await call_off_loop(list(leaves.values()), lambda: staged([np.asarray(v) for v in leaves.values()]))
        marks = [self._there[place][0] for place in leaves]
        run = bring_up(marks, [[array] for array in arrays], [ordinals] * len(arrays), self._names)
        return await _finished(run)


def _components(leaf: Any) -> Sequence[Any]:
    leaf = as_distributed(leaf)
    return leaf.values if isinstance(leaf, DistributedValues) else [leaf]


async def _finished(run: DeviceRun) -> list[list[Any]]:
    """Return results by leaf and taker; the devices are waited for, whoever is cancelled."""
    with CancelScope(shield=True):
        found: list[list[Any]] = await result_of(run.work(lambda by_leaf: by_leaf))
    return found
