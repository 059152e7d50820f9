"""Destinations: the devices that a reduced or broadcast value goes to, and the value as it stands there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.devices import resolve
from aiodist._arrays.frameworks import device_type_of as on_gpu
from aiodist._arrays.host import host_type_of
from aiodist._arrays.values import DistributedValues, Mirrored
from aiodist._strategy.variable import Variable


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
    return isinstance(value, np.ndarray) or host_type_of(value) is not None or on_gpu(value) is not None


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
