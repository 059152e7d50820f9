"""The choice of the executor by where the values of a collective are."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from aiodist._arrays.device import DeviceType
from aiodist._collectives.host import HostExecutor
from aiodist._collectives.kinds import Collective
from aiodist_kernels import Accumulate

if TYPE_CHECKING:
    from aiodist._collectives.device import DeviceExecutor


@lru_cache(maxsize=1024)
def executor(
    collective: Collective,
    size: int,
    absent: tuple[int, ...] = (),
    accumulate: Accumulate = "native",
    devices: tuple[str, ...] = (),
    targets: tuple[int, ...] | None = None,
) -> HostExecutor | DeviceExecutor:
    """Return the executor of a collective that has been checked, for a number of positions.

    Replicas at absent positions have joined, and contribute nothing. ``devices`` are the replicas' logical devices, on
    whose streams arrays may have been made. ``targets`` are the GPUs that get a result each instead of the inputs'
    GPUs.
    """
    if collective.spec is not None and any(isinstance(mark, DeviceType) for mark in collective.spec.marks):
        from aiodist._collectives.device import DeviceExecutor  # loaded if there are arrays on GPUs

        return DeviceExecutor(collective, size, absent, accumulate, devices, targets)
    return HostExecutor(collective, size, absent, accumulate)
