"""Which tiers of reductions on the CPU serve here, and from which sizes on."""

from __future__ import annotations

import time

import numpy as np

from aiodist.tools.doctor.findings import Finding, Section
from aiodist_kernels import KernelSpec, ReduceOp, is_ready, policy, pool, reduce, warm

_SPEC = KernelSpec(ReduceOp.SUM, np.dtype(np.float32), 4)


def reductions() -> Section:
    """Look at the reductions on the CPU; it compiles a kernel."""
    return Section(
        "reductions on the CPU",
        [
            _numpy_tier(),
            _compiled_tier(),
            Finding("kept on disk", "no kernels: loading one takes as long as compiling it"),
            *_thresholds(),
        ],
    )


def _numpy_tier() -> Finding:
    if reduce(ReduceOp.SUM, [np.full(3, 0.5)] * 3).tolist() == [1.5] * 3:
        return Finding("NumPy", "serves, always")
    return Finding("NumPy", "adds wrongly", "reinstall it: pip install --force-reinstall numpy", needed=True)


def _compiled_tier() -> Finding:
    begin = time.perf_counter()
    try:
        warm([_SPEC])
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":  # which the libraries tell
            return Finding("Numba", "is not installed, so NumPy serves alone")
        return Finding("Numba", f"does not load: {error}", "pip install --upgrade numba", needed=True)
    if is_ready(_SPEC):
        seconds = time.perf_counter() - begin
        return Finding("Numba", f"serves large values; the first kernel compiled in {seconds:.1f} s")
    return Finding("Numba", "kernels give other bits than NumPy on this processor, so NumPy serves alone")


def _thresholds() -> list[Finding]:
    native = ", ".join(f"{_size(least)} (n ≥ {count})" for count, least in policy.NATIVE_FROM.items())
    return [
        Finding("one kernel for any number of arrays, up to", _size(policy.SMALL_TO + 1)),
        Finding("kernels serve from, in the arrays' own dtype", native),
        Finding("kernels serve from, in a wider accumulator", _size(policy.WIDE_FROM)),
        Finding("kernels are compiled unasked from", _size(policy.WARM_UP_FROM)),
        Finding("off the event loop's thread from, moved", _size(policy.BLOCKING_FROM_MOVED)),
        Finding("in several threads from, moved", _size(policy.THREADS_FROM_MOVED)),
        Finding("stores past the caches from", _size(policy.STREAMING_FROM)),
        Finding("results' memory is used again from", _size(pool.POOLED_FROM)),
        Finding("the same, for the leaves of a nest", _size(pool.POOLED_AMONG_FROM)),
        Finding("results' memory that may lie idle", _size(pool.MOST_IDLE)),
    ]


def _size(nbytes: int) -> str:
    return f"{nbytes // policy.MIB} MiB" if nbytes >= policy.MIB else f"{nbytes // policy.KIB} KiB"
