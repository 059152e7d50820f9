"""The one executor of the process, which all runs share: streams, kernels and tables last as long as the process."""

from __future__ import annotations

from functools import cache
from threading import RLock
from typing import Final

from aiodist.gpu.cuda_core import CudaCore
from aiodist.gpu.execute import Executor

enqueuing: Final = RLock()
"""Held by whoever enqueues: replicas' worker threads load kernels and then enqueue, too."""


@cache
def executor() -> Executor:
    """Return the executor.

    Raises:
        ImportError: what launches kernels is not installed.
    """
    return Executor(CudaCore())
