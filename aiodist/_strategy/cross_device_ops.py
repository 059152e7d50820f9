"""Cross-device ops by their TensorFlow names: hints at how values are reduced across devices, never what comes out.

There, they choose an algorithm, and with it an order of additions. Here every reduction is a left fold in replica-id
order, so that results do not depend on the choice; what is left of it is a hint at the implementation.
"""

from __future__ import annotations

from typing import Any

from aiodist._arrays.devices import canonical
from aiodist._arrays.options import CommunicationOptions


class CrossDeviceOps:
    """A way to reduce values across devices; base of those that have names. By itself it lets aiodist choose."""

    implementation = "auto"

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def options(self) -> CommunicationOptions:
        """Return what it says of collectives that say nothing themselves."""
        return CommunicationOptions(implementation=self.implementation)


class ReductionToOneDevice(CrossDeviceOps):
    """Reduce on one device, and copy the result to the others.

    Args:
        reduce_to_device: the device; None lets aiodist choose.
        accumulation_fn: None; how components are added is the reduce op's affair.

    Raises:
        TypeError, ValueError: ``reduce_to_device`` names no device.
        ValueError: an ``accumulation_fn``.
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: None = None) -> None:
        if accumulation_fn is not None:
            raise ValueError(
                f"accumulation_fn must be None, got {accumulation_fn!r}; replicas' values are combined by the reduce "
                "op alone. For a way of your own, gather them and combine what you get"
            )
        self.reduce_to_device = None if reduce_to_device is None else canonical(reduce_to_device)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Reduce inside groups of devices, then across the groups.

    Args:
        num_packs: how many packs small values are put into, 0 or more; never changes a result.

    Raises:
        TypeError: ``num_packs`` is no int.
        ValueError: it is negative.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = _num_packs(num_packs)


class NcclAllReduce(CrossDeviceOps):
    """A hint by its TensorFlow name; nothing is reduced with NCCL.

    Args:
        num_packs: how many packs small values are put into, 0 or more; never changes a result.

    Raises:
        TypeError: ``num_packs`` is no int.
        ValueError: it is negative.
    """

    implementation = "nccl"

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = _num_packs(num_packs)


def _num_packs(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"num_packs must be an int, got {number!r}")
    if number < 0:
        raise ValueError(f"num_packs must be 0 or more, got {number}")
    return number


def check(ops: Any) -> CommunicationOptions:
    """Return what cross-device ops say of collectives.

    Raises:
        TypeError: they are none.
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
