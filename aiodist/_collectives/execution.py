"""Executors: what carries out a collective where its values lie, found once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from aiodist._collectives.host import HostExecutor
from aiodist._collectives.kinds import Collective
from aiodist_kernels import Accumulate


@lru_cache(maxsize=1024)
def executor(
    collective: Collective,
    size: int,
    absent: Sequence[int] = (),
    accumulate: Accumulate = "native",
) -> HostExecutor:
    """Return what carries out a collective.

    Args:
        collective: what is asked for, and has been checked.
        size: how many positions there are.
        absent: those that have joined, and take part with nothing.
        accumulate: as in `aiodist_kernels.reduce`.
    """
    return HostExecutor(collective, size, absent, accumulate)
