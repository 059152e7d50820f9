"""Values on GPUs in cross-replica context: reduced, gathered and copied there, as the collectives do it.

A nest may hold values on GPUs and on the host. The former are taken out, all that are alike are enqueued together, and
their results take their places among the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import anyio.to_thread
import numpy as np
from anyio import CancelScope
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiodist._arrays import gpus, nests
from aiodist._arrays.device import DeviceArray, DeviceType
from aiodist._arrays.frameworks import device_type_of
from aiodist._arrays.leaves import Spec, describe_leaf
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import DistributedValues, Mirrored
from aiodist._collectives import kinds
from aiodist._collectives.execution import device_executor
from aiodist._collectives.kinds import Collective, Detail, Kind, normalized_axis
from aiodist._collectives.work import Work
from aiodist._strategy import across
from aiodist._strategy.variable import as_distributed
from aiodist_kernels import Accumulate, ReduceOp, result_dtype

_LOOKS = 3
"""Turns of the event loop in which it looks whether the devices are done, before a thread waits for them."""


class Column(NamedTuple):
    """One leaf on GPUs.

    Attributes:
        mark: whose arrays its components are.
        arrays: what of them takes part.
        targets: the GPUs that get a result each.
        axis: for what has one.
    """

    mark: DeviceType
    arrays: Sequence[DeviceArray]
    targets: tuple[int, ...]
    axis: int | None = None


Describe: TypeAlias = Callable[[Any, "tuple[int, ...] | None"], Column]
"""Makes a column of a leaf and of its targets; None: the first component's GPU."""


class OnDevices:
    """What of nests is on GPUs.

    Args:
        strategy: whose replicas' streams it may have been made on.
        values: the nests.
        plain: values that are the same for all replicas count, too; else they stay in their places.

    Attributes:
        on_host: the nests, with None for what is on GPUs.
    """

    def __init__(self, strategy: Any, values: Sequence[Any], *, plain: bool = True) -> None:
        self._names: tuple[str, ...] = strategy.extended.devices
        self._there: list[tuple[int, int, Any]] = []
        self.on_host: list[Any] = []
        for number, value in enumerate(values):
            leaves, structure = nests.flatten_with_none(value)
            there = [
                place
                for place, leaf in enumerate(leaves)
                if is_on_gpus(leaf) and (plain or isinstance(as_distributed(leaf), DistributedValues))
            ]
            self._there += [(number, place, leaves[place]) for place in there]
            for place in there:
                leaves[place] = None
            self.on_host.append(nests.unflatten(structure, leaves) if there else value)

    async def join(
        self,
        results: Sequence[Any],
        kind: Kind,
        describe: Describe,
        *,
        op: ReduceOp | None = None,
        accumulate: Accumulate = "native",
        destinations: Sequence[Sequence[str]] | None = None,
    ) -> list[Any]:
        """Return results for the nests, those for what is on GPUs among them.

        Args:
            results: those of `on_host`.
            kind: the kind of collective that it is as.
            describe: makes a column of a leaf.
            op: the reduce op.
            accumulate: how a reduction accumulates.
            destinations: for each nest, the devices that get a result each; None: the first component's.
        """
        if not self._there:
            return list(results)
        columns = [
            describe(leaf, None if destinations is None else ordinals_of(destinations[number]))
            for number, _, leaf in self._there
        ]
        options = CommunicationOptions(accumulate=accumulate)
        made = await _finished([self._work(kind, op, options, alike) for alike in _alike(columns)])
        joined = list(results)
        for (number, place, _), column in zip(self._there, columns, strict=True):
            values = made[id(column)]
            leaves, structure = nests.flatten_with_none(joined[number])
            leaves[place] = values[0] if len(values) == 1 else Mirrored(values)
            joined[number] = nests.unflatten(structure, leaves)
        return joined

    def _work(
        self, kind: Kind, op: ReduceOp | None, options: CommunicationOptions, columns: list[Column]
    ) -> tuple[list[Column], Work]:
        spec = Spec(
            tuple([tuple(column.arrays[0].shape) for column in columns]),
            tuple([column.arrays[0].dtype for column in columns]),
            tuple([column.mark for column in columns]),
        )
        detail: Any = 0 if kind.detail is Detail.SOURCE else None
        if kind.detail is Detail.AXIS:
            detail = tuple([column.axis for column in columns])
            spec = kinds.ragged(spec, detail)
        values = [list(row) for row in zip(*[column.arrays for column in columns], strict=True)]
        collective = Collective(kind, op, detail, spec)
        found = device_executor(collective, len(values), options.accumulate, self._names, columns[0].targets)
        return columns, found.run(values)


def is_on_gpus(leaf: Any) -> bool:
    """Return whether a leaf, or the first of its components, is on a GPU."""
    leaf = as_distributed(leaf)
    first = leaf.values[0] if isinstance(leaf, DistributedValues) else leaf
    return type(first) is not np.ndarray and device_type_of(first) is not None


def ordinals_of(names: Sequence[str]) -> tuple[int, ...]:
    """Return the GPUs that results go to.

    Raises:
        TypeError: one of the destinations is none.
    """
    for name in names:
        if not name.startswith("GPU:"):
            raise TypeError(
                f"an array on a GPU goes to GPUs, got the destination {name!r}; copy what it becomes to the host, or "
                "what it is before"
            )
    return tuple([gpus.logical.ordinal(name) for name in names])


def gpus_by_leaf(pairs: Sequence[tuple[Any, Sequence[str]]]) -> list[tuple[int, ...]]:
    """Return for each leaf of values the GPUs that its results go to, where it is on GPUs; none for the others.

    Args:
        pairs: each value, and its destinations.

    Raises:
        TypeError: one of them is no GPU, and the value has leaves on GPUs.
    """
    return [
        ordinals_of(names) if is_on_gpus(leaf) else ()
        for value, names in pairs
        for leaf in nests.flatten_with_none(value)[0]
    ]


def _alike(columns: Sequence[Column]) -> list[list[Column]]:
    """Return the columns that one piece of work can do: as many components, and results for the same GPUs."""
    found: dict[Any, list[Column]] = {}
    for column in columns:
        found.setdefault((len(column.arrays), column.targets), []).append(column)
    return list(found.values())


async def _finished(works: Sequence[tuple[list[Column], Work]]) -> dict[int, list[Any]]:
    """Return the results of each column, by its identity; the devices are waited for, whoever is cancelled."""
    made: dict[int, list[Any]] = {}
    with CancelScope(shield=True):
        for columns, work in works:
            by_target = await result_of(work)
            for place, column in enumerate(columns):
                made[id(column)] = [by_target[target][place] for target in range(len(column.targets))]
    await checkpoint_if_cancelled()
    return made


async def result_of(work: Work) -> Any:
    """Return what devices make: looked for a few times, before a thread waits for it."""
    for _ in range(_LOOKS if work.ready is not None else 0):
        await checkpoint()
        if work.ready is not None and work.ready():
            return work.result()
    return await anyio.to_thread.run_sync(work.carry_out)


# What the leaves must be.


def to_reduce(op: ReduceOp, replicas: Sequence[int]) -> Describe:
    """Return what describes a leaf that is reduced over the replicas.

    Raises (when called):
        TypeError: an op that does not take the dtype; components that are not all on GPUs.
        ValueError: components that differ; a SUM of a plain value on several replicas.
    """

    def describe(leaf: Any, targets: tuple[int, ...] | None) -> Column:
        mark, arrays = described(across.components(op, as_distributed(leaf), replicas), replicas)
        across.check_same("shape", [array.shape for array in arrays], replicas)
        across.check_same("dtype", [array.dtype for array in arrays], replicas)
        result_dtype(op, arrays[0].dtype)
        return Column(mark, arrays, targets or (arrays[0].ordinal,))

    return describe


def to_gather(axis: Any, replicas: Sequence[int]) -> Describe:
    """Return what describes a leaf that is gathered along an axis.

    Raises (when called):
        TypeError: components that are not all on GPUs.
        ValueError: an axis out of range; components that differ in more than their size along it.
    """

    def describe(leaf: Any, targets: tuple[int, ...] | None) -> Column:
        leaf = as_distributed(leaf)
        across.check_count(leaf, replicas)
        mark, arrays = described(leaf.values, replicas)
        along = normalized_axis(axis, len(arrays[0].shape))
        across.check_same("dtype", [array.dtype for array in arrays], replicas)
        shapes = [_without(array.shape, along) for array in arrays]
        across.check_same("shape but along the axis", shapes, replicas)
        return Column(mark, arrays, targets or (arrays[0].ordinal,), along)

    return describe


def to_copy(leaf: Any, targets: tuple[int, ...] | None) -> Column:
    """Describe a leaf that is copied.

    Raises:
        TypeError: a per-replica value.
    """
    if isinstance(leaf, DistributedValues):
        raise TypeError(across.one_for_all(leaf))
    mark, arrays = described([leaf], [0])
    return Column(mark, arrays, targets or (arrays[0].ordinal,))


def described(parts: Sequence[Any], replicas: Sequence[int]) -> tuple[DeviceType, list[DeviceArray]]:
    """Return whose arrays components are, and what of them takes part.

    Raises:
        TypeError: one cannot take part.
        ValueError: they are not all on GPUs and of one framework.
    """
    _, _, marks, arrays = zip(*map(describe_leaf, parts), strict=True)
    across.check_same("type", marks, replicas)
    return marks[0], list(arrays)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])
