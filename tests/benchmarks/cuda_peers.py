# SPDX-License-Identifier: Apache-2.0
"""The same reductions by torch, CuPy and jax, where they are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import os
import time
from typing import TYPE_CHECKING, Any

from aiodist_kernels import ReduceOp
from tests.benchmarks.cuda_cases import BFLOAT16, Case

if TYPE_CHECKING:
    from collections.abc import Callable


def times_of_others(case: Case) -> dict[str, float]:
    """Return microseconds of device time that torch, CuPy and jax take for the same, where they are installed."""
    if case.op is not ReduceOp.SUM or case.accumulate != "native" or len(case.sizes) > 1 or case.dtype.kind in "iu":
        return {}
    found: dict[str, float] = {}
    for name, times in (("torch", _torch), ("cupy", _cupy), ("jax", _jax)):
        if importlib.util.find_spec(name) is not None:
            try:
                found |= times(case)
            except Exception as error:  # noqa: BLE001  (whatever ails it, the table goes on without it)
                print(f"  {name} left out: {type(error).__name__}: {error}"[:200], flush=True)
    return found


def _torch(case: Case) -> dict[str, float]:
    torch: Any = importlib.import_module("torch")
    elements = case.sizes[0] // case.dtype.itemsize
    given = [torch.randn(elements, device="cuda").to(getattr(torch, case.dtype.name)) for _ in range(case.count)]
    total = torch.empty_like(given[0])

    def chain() -> None:
        torch.add(given[0], given[1], out=total)
        for value in given[2:]:
            total.add_(value)

    def foreach() -> None:
        total.copy_(given[0])
        for value in given[1:]:
            torch._foreach_add_([total], [value])

    calls = {"torch stack.sum": lambda: torch.stack(given).sum(0), "torch add_": chain, "torch foreach": foreach}
    took = {name: _timed(call, torch.cuda.synchronize) for name, call in calls.items()}
    torch.cuda.empty_cache()
    return took


def _cupy(case: Case) -> dict[str, float]:
    cupy: Any = importlib.import_module("cupy")
    if case.dtype == BFLOAT16:
        return {}
    elements = case.sizes[0] // case.dtype.itemsize
    given = [cupy.random.standard_normal(elements, cupy.float32).astype(case.dtype) for _ in range(case.count)]
    calls = {"cupy add": lambda: functools.reduce(operator.add, given)}
    if case.count <= 16:
        names = [f"a{k}" for k in range(case.count)]
        kernel = cupy.ElementwiseKernel(
            ", ".join(f"T {name}" for name in names), "T out", f"out = {' + '.join(names)}", f"sum_of_{case.count}"
        )
        out = cupy.empty_like(given[0])
        calls["cupy elementwise"] = lambda: kernel(*given, out)
    return {name: _timed(call, cupy.cuda.Device().synchronize) for name, call in calls.items()}


def _jax(case: Case) -> dict[str, float]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of the GPU's memory for itself
    jax: Any = importlib.import_module("jax")
    if jax.default_backend() != "gpu" or case.dtype.itemsize == 8 or case.count > 64:
        return {}
    keys = jax.random.split(jax.random.key(0), case.count)
    given = [jax.random.normal(key, (case.sizes[0] // case.dtype.itemsize,), case.dtype) for key in keys]
    add = jax.jit(lambda *values: functools.reduce(operator.add, values))
    return {"jax": _timed(lambda: add(*given), lambda: add(*given).block_until_ready())}


def _timed(call: Callable[[], object], settle: Callable[[], object], rounds: int = 10) -> float:
    """Return microseconds of a call, on the clock: the least of three times so many, with the device waited for."""
    call()
    settle()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        settle()
        best = min(best, (time.perf_counter() - start) / rounds)
    return 1e6 * best
