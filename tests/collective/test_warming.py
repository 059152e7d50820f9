"""Kernels are compiled in the background: never for small values, with no other bits, and no hindrance at exit."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tools.command import environment

PROGRAM = """
import asyncio, sys, threading
import numpy as np
from aiodist import MirroredStrategy, get_replica_context
from aiodist.collective.warming import THREAD_NAME
from aiodist_kernels import KernelSpec, ReduceOp, is_ready

async def replica(dtype, size):
    value = np.linspace(1, 2, size).astype(dtype) * (1 + get_replica_context().replica_id_in_sync_group)
    return await get_replica_context().all_reduce("mean", value)

def mean(dtype, size):
    return asyncio.run(MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).run(replica, (dtype, size))).values[0]

def compiling():
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
"""


def run(program: str) -> str:
    command = [sys.executable, "-c", PROGRAM + program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_small_values_never_start_the_compiler() -> None:
    assert run("mean('f4', 10_000), mean('f2', 20_000); print('numba' in sys.modules, compiling())") == "False []\n"


def test_first_large_value_has_a_kernel_compiled_beside_it() -> None:
    program = """
spec = KernelSpec(ReduceOp.MEAN, np.dtype("f2"), 3)
before = mean("f2", 100_000)
assert not is_ready(spec)
(thread,) = compiling()
thread.join()
assert is_ready(spec) and not compiling()
print(before.tobytes() == mean("f2", 100_000).tobytes(), compiling())
"""
    assert run(program) == "True []\n"


def test_strategy_reduce_asks_too() -> None:
    program = """
from aiodist import PerReplica
asyncio.run(MirroredStrategy(["CPU:0", "CPU:1"]).reduce("sum", PerReplica([np.ones(1 << 16, "f2")] * 2), None))
print(len(compiling()))
"""
    assert run(program) == "1\n"


STAGES = ["numba", "numba.core.typing", "llvmlite.binding", "aiodist_kernels.kernels_cpu"]


def end_in(stage: str) -> str:
    """Run a program that ends while the compiler is at that stage; return what it prints."""
    return run(f"""
import atexit
from aiodist_kernels.compiled_tier import _compiled
for dtype in ("f2", "f4", "f8", "i4", "i8", "u4", "u2", "i2", "u8", "c8"):
    mean(dtype, 200_000)
while {stage!r} not in sys.modules:
    pass
atexit.register(lambda: print(len(_compiled) <= 1))
""")


@pytest.fixture(scope="module")
def ends() -> dict[str, str]:
    """End in each stage, two processes at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(STAGES, pool.map(end_in, STAGES), strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_exit_waits_for_one_kernel_at_most(ends: dict[str, str], stage: str) -> None:
    assert ends[stage] == "True\n"
