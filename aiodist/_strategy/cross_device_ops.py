"""Cross-device ops by their TensorFlow names: hints, which never change a result.

In TensorFlow they choose an algorithm, and with it an order of additions. Here every reduction is a left fold in
replica-id order.
"""

from __future__ import annotations

from typing import Any

from aiodist._arrays.devices import canonical
from aiodist._arrays.options import CommunicationOptions

CollectiveHints = CommunicationOptions


class CrossDeviceOps:
    """A hint at how to reduce values across devices; the base class of the named ones."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class ReductionToOneDevice(CrossDeviceOps):
    """A hint by its TensorFlow name: reduce on one device, and copy the result to the others.

    Args:
        reduce_to_device: the device, or None.
        accumulation_fn: None; the reduce op determines how values are combined.

    Raises:
        TypeError: ``reduce_to_device`` is not a string.
        ValueError: ``reduce_to_device`` is misspelled, or ``accumulation_fn`` is not None.
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: None = None) -> None:
        if accumulation_fn is not None:
            raise ValueError(
                f"accumulation_fn must be None, got {accumulation_fn!r}; replicas' values are combined by the reduce "
                "op alone. For a way of your own, gather them and combine what you get"
            )
        self.reduce_to_device: str | None = None if reduce_to_device is None else canonical(reduce_to_device)


class _InPacks(CrossDeviceOps):
    def __init__(self, num_packs: int = 1) -> None:
        if isinstance(num_packs, bool) or not isinstance(num_packs, int):
            raise TypeError(f"num_packs must be an int, got {num_packs!r}")
        if num_packs < 0:
            raise ValueError(f"num_packs must be 0 or more, got {num_packs}")
        self.num_packs: int = num_packs


class HierarchicalCopyAllReduce(_InPacks):
    """A hint by its TensorFlow name: reduce inside groups of devices, then across the groups.

    Args:
        num_packs: how many packs to put small values into, 0 or more.

    Raises:
        TypeError: ``num_packs`` is not an int.
        ValueError: ``num_packs`` is negative.
    """


class NcclAllReduce(_InPacks):
    """A hint by its TensorFlow name; aiodist does not use NCCL. Arguments are those of `HierarchicalCopyAllReduce`."""


def options_of(ops: Any) -> CommunicationOptions:
    """Return the communication options that correspond to cross-device ops; None stands for none."""
    if ops is not None and not isinstance(ops, CrossDeviceOps):
        raise TypeError(
            f"cross_device_ops must be CrossDeviceOps or None, got {ops!r}; e.g. aiodist.HierarchicalCopyAllReduce()"
        )
    return CommunicationOptions(implementation="nccl" if isinstance(ops, NcclAllReduce) else "auto")


for _class in (CrossDeviceOps, ReductionToOneDevice, HierarchicalCopyAllReduce, NcclAllReduce):
    _class.__module__ = "aiodist"
del _class
