"""MirroredStrategy: replicas on the devices of one machine, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from aiodist._arrays.options import CommunicationOptions
from aiodist._strategy.base import Strategy
from aiodist._strategy.cross_device_ops import CrossDeviceOps
from aiodist._strategy.extended import StrategyExtended, new_extended


class MirroredStrategy(Strategy):
    """Synchronous data parallelism on the devices of one machine: a replica for each device, all in one process.

    Args:
        devices: a device for each replica, e.g. ``["CPU:0", "CPU:1"]``, spelled as in TensorFlow, in any case; or a
            number n, for CPU:0 to CPU:n-1.
            ``CPU:k`` is a logical device and exists for every k. None: all GPUs, or CPU:0 without any.
        cross_device_ops: a hint, as in TensorFlow, e.g. ``HierarchicalCopyAllReduce()``; it never changes a result.
        communication_options: the options of every collective; they override ``cross_device_ops``.
        order_check: how call sites are compared: "call_site", the place of the call; "call_path", the places of all
            callers up to the replica's function, too; "signature", not at all.

    Raises:
        DeviceNotFoundError: this machine does not have a device.
        TypeError: an argument has the wrong type.
        ValueError: a device is misspelled or given twice, or ``order_check`` is unknown.
    """

    def __init__(
        self,
        devices: int | Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        order_check: str = "call_site",
    ) -> None:
        super().__init__(new_extended(StrategyExtended, devices, communication_options, order_check, cross_device_ops))


MirroredStrategy.__module__ = "aiodist"
