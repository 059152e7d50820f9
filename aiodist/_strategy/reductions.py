"""Reducing, gathering and copying values outside of replicas, where they lie: on the host, on GPUs, or on both.

Large values on the host are worked on in a worker thread. Values on GPUs are combined there, as the collectives do it:
all that are alike are enqueued together. What is done on the host alone, such as reductions along an axis, values on
GPUs reach by way of page-locked memory (`ThroughHost`): NumPy adds along an axis in an order of its own, which no
framework's sum does, and results have the same bits wherever the values lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import anyio.to_thread
import numpy as np
from anyio import CancelScope
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiodist._arrays import gpus, nests
from aiodist._arrays.device import DeviceArray, DeviceType
from aiodist._arrays.devices import resolve
from aiodist._arrays.host import host_type_of
from aiodist._arrays.leaves import LeafMark, Spec
from aiodist._arrays.values import DistributedValues, Mirrored
from aiodist._collectives import kinds
from aiodist._collectives.execution import device_executor
from aiodist._collectives.host import packs
from aiodist._collectives.kinds import Collective, Detail
from aiodist._collectives.work import Work
from aiodist._strategy.operands import COPY, Operand, Operation, device_arrays, gathering, is_on_gpus, reduction
from aiodist._strategy.variable import Variable, as_distributed
from aiodist_kernels import Accumulate, ReduceOp, policy

T = TypeVar("T")
Targets = tuple[int, ...]
"""The GPUs that get a result each."""

_LOOKS = 3
"""Turns of the event loop in which it looks whether the devices are done, before a thread waits for them."""


async def reduce(
    op: ReduceOp, value: Any, axis: Any, replicas: Sequence[int], devices: tuple[str, ...], accumulate: Accumulate
) -> Any:
    """Reduce a nest; see `Strategy.reduce`.

    Args:
        op: the reduce op.
        value: the nest.
        axis: None, or what to reduce along.
        replicas: the ids of those that have a component each.
        devices: the strategy's, on whose replicas' streams arrays may have been made.
        accumulate: the accumulator.
    """
    operation = reduction(op, axis, replicas, accumulate)
    if axis is None:
        (result,) = await combine(operation, [value], devices)
        return result
    through = ThroughHost(devices, value, replicas)
    await through.down()
    (result,) = await combine(operation, [through.value], devices)
    return await through.up(result)


async def gather(value: Any, axis: Any, replicas: Sequence[int], devices: tuple[str, ...]) -> Any:
    """Gather a nest along an axis; see `reduce` for the arguments, and `Strategy.gather`."""
    (result,) = await combine(gathering(axis, replicas), [value], devices)
    return result


async def copy(value: Any, destinations: Sequence[str], devices: tuple[str, ...]) -> Any:
    """Copy a nest onto devices; see `StrategyExtended.broadcast_to`."""
    (result,) = await combine(COPY, [value], devices, [destinations])
    return result


class _Column(NamedTuple):
    """An operand on GPUs, where it stands, and the GPUs that get a result."""

    number: int
    place: int
    operand: Operand
    targets: Targets


async def combine(
    operation: Operation,
    values: Sequence[Any],
    devices: tuple[str, ...],
    destinations: Sequence[Sequence[str]] | None = None,
    bytes_per_pack: int = 0,
) -> list[Any]:
    """Return what an operation makes of nests.

    Args:
        operation: what is made of each leaf.
        values: the nests.
        devices: the strategy's, on whose replicas' streams arrays may have been made.
        destinations: for each nest, the devices that get a result; None: the host, or the GPU of the first component.
        bytes_per_pack: how many bytes of consecutive nests are one unit of work on the host.

    Raises:
        TypeError, ValueError: a leaf cannot take part.
    """
    flat = [nests.flatten_with_none(value) for value in values]
    operands = [[operation.operand(leaf) for leaf in leaves] for leaves, _ in flat]
    columns = [
        _Column(number, place, operand, ordinals_of(destinations[number]) if destinations else _first(operand))
        for number, row in enumerate(operands)
        for place, operand in enumerate(row)
        if operand is not None and operand.on_gpus
    ]
    results = [list(leaves) for leaves, _ in flat]

    def on_host(numbers: Sequence[int]) -> None:
        for number in numbers:
            for place, operand in enumerate(operands[number]):
                if operand is not None and not operand.on_gpus:
                    results[number][place] = operation.result(operand)

    sizes = [sum(0 if each is None or each.on_gpus else each.nbytes for each in row) for row in operands]
    for pack in packs(sizes, bytes_per_pack):
        blocking = operation is not COPY and policy.blocks(sum(sizes[number] for number in pack))
        await _called(partial(on_host, pack), blocking=blocking)
    if columns:
        await _on_devices(operation, columns, devices, results)
    made = [nests.unflatten(structure, leaves) for leaves, (_, structure) in zip(results, flat, strict=True)]
    if destinations is None:
        return made
    return [placed(result, names) for result, names in zip(made, destinations, strict=True)]


async def _called(fn: Callable[[], T], *, blocking: bool) -> T:
    """Call a function, in a worker thread where it blocks. A cancellation is raised once it has returned."""
    if blocking:
        return await anyio.to_thread.run_sync(fn)
    await checkpoint()
    return fn()


def _first(operand: Operand) -> Targets:
    return (operand.arrays[0].ordinal,)


# On GPUs.


async def _on_devices(
    operation: Operation, columns: Sequence[_Column], devices: tuple[str, ...], results: Sequence[list[Any]]
) -> None:
    """Put the results of columns into their places; the devices are waited for, whoever is cancelled."""
    alike: dict[Any, list[_Column]] = {}
    for column in columns:
        alike.setdefault((len(column.operand.arrays), column.targets), []).append(column)
    works = [(group, _work(operation, group, devices)) for group in alike.values()]
    with CancelScope(shield=True):
        for group, work in works:
            by_target = await _waited(work)
            for index, column in enumerate(group):
                found = [row[index] for row in by_target]
                results[column.number][column.place] = found[0] if len(found) == 1 else Mirrored(found)
    await checkpoint_if_cancelled()


def _work(operation: Operation, columns: Sequence[_Column], devices: tuple[str, ...]) -> Work:
    operands = [column.operand for column in columns]
    spec = Spec(
        tuple([tuple(operand.arrays[0].shape) for operand in operands]),
        tuple([operand.arrays[0].dtype for operand in operands]),
        tuple([operand.mark for operand in operands]),
    )
    detail: Any = 0 if operation.kind.detail is Detail.SOURCE else None
    if operation.kind.detail is Detail.AXIS:
        detail = tuple([operand.axes[0] for operand in operands if operand.axes])
        spec = kinds.ragged(spec, detail)
    values = [list(row) for row in zip(*[operand.arrays for operand in operands], strict=True)]
    collective = Collective(operation.kind, operation.op, detail, spec)
    found = device_executor(collective, len(values), operation.accumulate, devices, columns[0].targets)
    work: Work = found.run(values)
    return work


async def _waited(work: Work) -> Any:
    """Return what devices make: looked for a few times, before a thread waits for it."""
    for _ in range(_LOOKS if work.ready is not None else 0):
        await checkpoint()
        if work.ready is not None and work.ready():
            return work.result()
    return await anyio.to_thread.run_sync(work.carry_out)


class ThroughHost:
    """A nest that is worked on on the host, with values on GPUs among its leaves, or none.

    The memory on the host is there before anything is in it: so whatever is wrong with the arrays is found at the call.

    Args:
        devices: the strategy's, on whose replicas' streams arrays may have been made.
        value: the nest.
        replicas: the ids of those that have a component each, for errors.

    Attributes:
        value: the nest on the host; what was on GPUs is there when `down` has returned.
        marks: for each leaf whose arrays it has, if they are on GPUs; None where no leaf's are.

    Raises:
        ImportError: what copies to and from GPUs is not installed.
        TypeError: a component that cannot take part.
        ValueError: components that are not all on GPUs and of one framework.
    """

    def __init__(self, devices: tuple[str, ...], value: Any, replicas: Sequence[int]) -> None:
        self._devices = devices
        self._leaves, structure = nests.flatten_with_none(value)
        self._there: dict[int, tuple[DeviceType, list[DeviceArray]]] = {}
        for place, leaf in enumerate(self._leaves):
            if is_on_gpus(leaf):
                self._there[place] = device_arrays(_components(leaf), replicas)
        self._landed: dict[int, Any] = {}
        self._run: Any = None
        self.value = value
        self.marks: Sequence[LeafMark] | None = None
        if self._there:
            self.marks = [self._there[place][0] if place in self._there else None for place in range(len(self._leaves))]
            self.value = nests.unflatten(structure, self._land())

    def _land(self) -> list[Any]:
        """Make ready to copy down; return the leaves on the host."""
        from aiodist._collectives.device import bring_down  # loaded where there are arrays on GPUs

        marks = [mark for mark, arrays in self._there.values() for _ in arrays]
        columns = [[array] for _, arrays in self._there.values() for array in arrays]
        self._run = bring_down(marks, columns, [0], self._devices)
        landed, leaves = iter(self._run.landed()), list(self._leaves)
        for place, (_, there) in self._there.items():
            parts = [next(landed)[0] for _ in there]
            leaf = as_distributed(leaves[place])
            self._landed[place] = leaves[place] = type(leaf)(parts) if isinstance(leaf, DistributedValues) else parts[0]
        return leaves

    async def down(self) -> None:
        """Copy what is on GPUs down; the devices are waited for, whoever is cancelled."""
        if self._run is not None:
            await _finished(self._run)

    async def up(self, result: Any, targets: Sequence[Targets] | None = None) -> Any:
        """Return what the host has made of the nest, with the results of what is on GPUs there.

        Args:
            result: the nest of results.
            targets: for each leaf, the GPUs that get a result each: bare for one, mirrored for several. None: where the
                first of its components came from; what is still what came down stays as it was.
        """
        if not self._there:
            return result
        leaves, structure = nests.flatten_with_none(result)
        alike: dict[Targets, list[int]] = {}
        for place, (_, there) in self._there.items():
            if targets is None and leaves[place] is self._landed[place]:
                leaves[place] = self._leaves[place]
            else:
                alike.setdefault(targets[place] if targets else (there[0].ordinal,), []).append(place)
        for ordinals, places in alike.items():
            rows = await self._lifted([leaves[place] for place in places], places, ordinals)
            for place, found in zip(places, rows, strict=True):
                leaves[place] = found[0] if len(found) == 1 else Mirrored(found)
        await checkpoint_if_cancelled()
        return nests.unflatten(structure, leaves)

    async def _lifted(self, leaves: Sequence[Any], places: Sequence[int], ordinals: Targets) -> list[list[Any]]:
        """Return arrays with the values of leaves on the host: by leaf, one on each GPU."""
        from aiodist._collectives.device import bring_up, staged

        arrays = [np.asarray(leaf) for leaf in leaves]
        blocking = policy.blocks(sum(array.nbytes for array in arrays))
        columns = [[array] for array in await _called(partial(staged, arrays), blocking=blocking)]
        marks = [self._there[place][0] for place in places]
        return await _finished(bring_up(marks, columns, [ordinals] * len(columns), self._devices))


def _components(leaf: Any) -> Sequence[Any]:
    leaf = as_distributed(leaf)
    return leaf.values if isinstance(leaf, DistributedValues) else [leaf]


async def _finished(run: Any) -> list[list[Any]]:
    """Return results by leaf and taker; the devices are waited for, whoever is cancelled."""
    found: list[list[Any]] = []
    with CancelScope(shield=True):
        found.extend(await _waited(run.work(lambda by_leaf: by_leaf)))
    return found


# Destinations.


def devices_of(destinations: Any, replicas: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that are meant.

    Args:
        destinations: a device string, a sequence of them, a distributed value or a variable (the devices of the
            replicas whose components it has). One replica's values are bare, so here its array is one, too.
        replicas: the devices of the strategy's replicas.

    Raises:
        TypeError: destinations of another type.
        ValueError: a device is misspelled or given twice, or there are none; a value with another number of components
            than there are replicas.
        DeviceNotFoundError: a device does not exist on this machine.
    """
    if isinstance(destinations, (DistributedValues, Variable)):
        if len(destinations.values) != len(replicas):
            raise ValueError(
                f"expected as destination a value with {len(replicas)} components, one for each replica, got "
                f"{len(destinations.values)}"
            )
        return tuple(replicas)
    if isinstance(destinations, str):
        return resolve([destinations])
    if len(replicas) == 1 and _is_array(destinations):
        return tuple(replicas)
    if not isinstance(destinations, Sequence):
        raise TypeError(
            "destinations must be a device such as 'CPU:0', a sequence of devices, a distributed value or a variable, "
            f"got {destinations!r}"
        )
    return resolve(destinations)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or host_type_of(value) is not None or is_on_gpus(value)


def placed(value: Any, devices: Sequence[str]) -> Any:
    """Return a nest of results as it stands on these devices: bare on one, each leaf mirrored on several.

    What is mirrored already stands there.
    """
    if len(devices) == 1:
        return value
    return nests.map_leaves(
        lambda leaf: leaf if leaf is None or isinstance(leaf, Mirrored) else Mirrored(_each(leaf, len(devices))), value
    )


def _each(leaf: Any, count: int) -> list[Any]:
    foreign = host_type_of(leaf)
    if foreign is None:
        return [leaf] * count
    return [leaf, *foreign.give_each(foreign.view(leaf).copy(order="K"), count - 1)]


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
