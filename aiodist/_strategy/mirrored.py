"""MirroredStrategy: replicas on the devices of one machine, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from aiodist._arrays.options import CommunicationOptions
from aiodist._strategy.base import Strategy
from aiodist._strategy.cross_device_ops import CrossDeviceOps
from aiodist._strategy.extended import StrategyExtended


class MirroredStrategy(Strategy):
    """Synchronous data parallelism on the devices of one machine: one replica a device, all in one process.

    Args:
        devices: one device a replica, e.g. ``["CPU:0", "CPU:1"]``, spelled as in TensorFlow, in any case. ``CPU:k`` is
            a logical device and exists for every k. None: all GPUs, else CPU:0.
        cross_device_ops: a hint at how values are reduced across devices, e.g. ``NcclAllReduce()``, which the
            communication options go over; None lets aiodist choose.
        communication_options: the options of every collective.
        order_check: what makes two calls the same collective beside what they ask for: "call_site", the place of the
            call; "call_path", the places of all its callers up to the replica's function; "signature", nothing.

    Raises:
        DeviceNotFoundError: a device does not exist on this machine.
        TypeError: an argument of the wrong type.
        ValueError: a device is misspelled or given twice; an unknown ``order_check``.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        order_check: str = "call_site",
    ) -> None:
        super().__init__(StrategyExtended.on(devices, communication_options, order_check, cross_device_ops))


MirroredStrategy.__module__ = "aiodist"
