"""Cross-device ops by their TensorFlow names: hints, which never change a result.

In TensorFlow they choose an algorithm, and with it an order of additions. Here every reduction is a left fold in
replica-id order.
"""

from __future__ import annotations

from typing import Any

from aiodist._arrays.devices import canonical
from aiodist._arrays.options import CommunicationOptions


class CrossDeviceOps:
    """A hint at how to reduce values across devices; the base class of the named ones."""

    implementation = "auto"

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def options(self) -> CommunicationOptions:
        """Return the communication options that correspond to it."""
        return CommunicationOptions(implementation=self.implementation)


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


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """A hint by its TensorFlow name: reduce inside groups of devices, then across the groups.

    Args:
        num_packs: how many packs to put small values into, 0 or more.

    Raises:
        TypeError: ``num_packs`` is not an int.
        ValueError: ``num_packs`` is negative.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs: int = _num_packs(num_packs)


class NcclAllReduce(CrossDeviceOps):
    """A hint by its TensorFlow name; aiodist does not use NCCL.

    Args:
        num_packs: how many packs to put small values into, 0 or more.

    Raises:
        TypeError: ``num_packs`` is not an int.
        ValueError: ``num_packs`` is negative.
    """

    implementation = "nccl"

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs: int = _num_packs(num_packs)


def _num_packs(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"num_packs must be an int, got {number!r}")
    if number < 0:
        raise ValueError(f"num_packs must be 0 or more, got {number}")
    return number


def check(ops: Any) -> CommunicationOptions:
    """Return the communication options that correspond to cross-device ops; None stands for none.

    Raises:
        TypeError: ``ops`` has another type.
    """
    if ops is None:
        return CommunicationOptions()
    if not isinstance(ops, CrossDeviceOps):
        raise TypeError(
            f"cross_device_ops must be CrossDeviceOps or None, got {ops!r}; e.g. aiodist.HierarchicalCopyAllReduce()"
        )
    return ops.options()


for _class in (CrossDeviceOps, ReductionToOneDevice, HierarchicalCopyAllReduce, NcclAllReduce):
    _class.__module__ = "aiodist"
del _class
