"""What the machine has: an interpreter, cores, threads of BLAS, memory of some speed."""

from __future__ import annotations

import os
import platform
import sys
import time

import numpy as np
from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

from aiodist.collective.work import worker_count
from aiodist.tools.doctor.findings import Finding, Section

_COPIED = 64 << 20


def machine() -> Section:
    """Look at the machine."""
    return Section(
        "machine",
        [
            Finding("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
            Finding("system", f"{platform.system()} {platform.machine()}"),
            Finding("cores", os.cpu_count() or 1),
            Finding("threads for one large reduction", worker_count()),
            Finding("interpreter lock", "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off"),
            Finding("threads of BLAS", _blas()),
            Finding("memory, copied in one thread", f"{_copy_speed():.1f} GB/s read and written"),
        ],
    )


def _blas() -> str:
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return ", ".join(f"{pool['num_threads']} ({pool['internal_api']})" for pool in pools) or "none known"


def _copy_speed() -> float:
    source, target = np.ones(_COPIED, np.uint8), np.ones(_COPIED, np.uint8)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return 2 * _COPIED / min(seconds) / 1e9
