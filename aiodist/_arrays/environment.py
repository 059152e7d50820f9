"""Environment variables, all of them: this file alone reads them.

``AIODIST_STALL_SECONDS``: how long all replicas of a run may stand still, one of them in a collective, before a
`StallWarning` tells who waits for what; 10 by default, 0 for never.
``AIODIST_TRACE``: where to write a trace of every run of the process; see `aiodist.trace`. Worker k of several writes
``run.k.json`` for ``run.json``.
``AIODIST_WORKERS``: how many workers ``aiodist run`` has started.
``AIODIST_NOTES``: the folder of the journal in which ``aiodist run`` reads how far its workers have come.
``PYTHONUNBUFFERED``: whether Python keeps what it writes to pipes; its workers' does not unless somebody has set it.
``AIODIST_CONTROL_ADDRESS``: the name or number at which the first worker listens, and the others reach it.
``AIODIST_LOST_SECONDS``: how long a worker may be stopped, as by a debugger, or cut off, before it counts as lost; by
default 1 where its machine says that it is stopped, and 10 where its machine does not answer.
``OMPI_MCA_opal_signal``: which signals Open MPI takes for itself; none unless somebody has set it.
``PRTE_MCA_prte_local_tmpdir_base``: where Open MPI's launcher keeps a job's files on its machine; further variables of
its let it start workers as root, and more than there are cores, bound to none.
``OMPI_COMM_WORLD_SIZE``, ``PMI_SIZE``, ``SLURM_STEP_NUM_TASKS``, ``WORLD_SIZE``: how many workers there are
by their launcher.
``OMPI_COMM_WORLD_RANK``, ``PMI_RANK``, ``SLURM_PROCID``, ``RANK``: which of them this is.
``TORCHELASTIC_RUN_ID``, ``MASTER_ADDR``: that they were started for torch.distributed.
``TF_CONFIG``: the cluster that tf.distribute would make, and this process's place in it.
``_ARGCOMPLETE``: a shell asks how words of the command line can go on.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

_STALL_SECONDS = 10.0
_OPEN_MPI_FOLDER = "PRTE_MCA_prte_local_tmpdir_base"
_OPEN_MPI_STARTS = {
    **{f"OMPI_ALLOW_RUN_AS_ROOT{suffix}": "1" for suffix in ("", "_CONFIRM")},
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # these two before Open MPI 5
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
"""With these it starts any number of workers on one machine, also in a container."""
TORCHRUN = "torchrun"


class Launched(NamedTuple):
    """What has started this process as one of several, or of one."""

    by: str  # the launcher, as a person calls it
    variable: str  # what says so
    workers: int  # how many it has started
    rank: int  # which of them this is


_LAUNCHERS: Sequence[tuple[str, str, Sequence[str], str | None]] = (
    ("aiodist run", "AIODIST_WORKERS", ("OMPI_COMM_WORLD_RANK", "PMI_RANK"), None),
    (TORCHRUN, "WORLD_SIZE", ("RANK",), "TORCHELASTIC_RUN_ID"),
    ("mpiexec", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",), None),
    ("mpiexec", "PMI_SIZE", ("PMI_RANK",), None),
    (TORCHRUN, "WORLD_SIZE", ("RANK",), "MASTER_ADDR"),  # whatever has set what torchrun sets
    ("srun", "SLURM_STEP_NUM_TASKS", ("SLURM_PROCID",), None),
)
"""By whom, how many, which, and what must be set beside; the innermost of several first."""


def stall_seconds() -> float:
    """Return how long replicas may stand still before a warning reports it; 0 for no warning."""
    seconds = _seconds("AIODIST_STALL_SECONDS", ", 0 for no stall report")
    return _STALL_SECONDS if seconds is None else seconds


def lost_seconds() -> float | None:
    """Return how long a worker may be stopped or cut off before it counts as lost; None for what is usual."""
    return _seconds("AIODIST_LOST_SECONDS") or None


def _seconds(name: str, zero: str = "") -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    raise ValueError(f"{name} must be a number of seconds{zero}, got {text!r}")


def trace_path() -> str | None:
    """Return where the trace of the whole process goes; None for no trace. Several workers have a file each."""
    path, found = os.environ.get("AIODIST_TRACE") or None, launched()
    if path is None or found is None or found.workers <= 1:
        return path
    stem, suffix = os.path.splitext(path)  # noqa: PTH122  (the path as it is given, not a Path's spelling of it)
    return f"{stem}.{found.rank}{suffix}"


def fix_hashes(seed: int) -> None:
    """Start this process again with that seed of string hashes, unless ``PYTHONHASHSEED`` is set already.

    The order of a set of strings then is the same whenever the command is run again. Where a process cannot be replaced
    by another (Windows), nothing happens.
    """
    if "PYTHONHASHSEED" not in os.environ and hasattr(os, "fork"):
        os.execve(  # noqa: S606  (the same interpreter with the same arguments)
            sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": str(seed)}
        )


def completes_words() -> bool:
    """Return whether a shell has started this process for how words of the command line can go on."""
    return "_ARGCOMPLETE" in os.environ


def launched() -> Launched | None:
    """Return what has started this process, as far as that shows; None without a launcher."""
    for by, variable, ranks, beside in _LAUNCHERS:
        workers = _count(variable)
        if workers is not None and (beside is None or beside in os.environ):
            rank = next((found for found in map(_count, ranks) if found is not None), 0)
            return Launched(by, variable, workers, rank)
    return None


def _count(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None


class ClusterSettings(NamedTuple):
    """A cluster, and this process's place in it."""

    spec: Mapping[str, tuple[str, ...]]  # the addresses of each job's tasks, by job name
    task_type: str  # this process's job
    task_id: int  # this process's index in the job, from 0

    @property
    def workers(self) -> int:
        """How many workers the cluster has: a chief is the first of them."""
        return sum(len(self.spec.get(job, ())) for job in ("chief", "master", "worker"))

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self.task_id + (self.workers - len(self.spec["worker"]) if self.task_type == "worker" else 0)

    @classmethod
    def of(cls, cluster_spec: Any, task_type: Any, task_id: Any) -> ClusterSettings | None:
        """Return the given settings; None if there are none."""
        given = [each is not None for each in (cluster_spec, task_type, task_id)]
        if not any(given):
            return None
        if not all(given):
            raise ValueError(
                "cluster_spec, task_type and task_id are given together, e.g. {'worker': [...]}, 'worker', 0"
            )
        if not isinstance(cluster_spec, Mapping) or any(isinstance(each, str) for each in cluster_spec.values()):
            raise TypeError(f"cluster_spec must map job names to lists of addresses, got {cluster_spec!r}")
        spec = {job: tuple(addresses) for job, addresses in cluster_spec.items()}
        if task_id not in range(len(spec.get(task_type, ()))):
            raise ValueError(f"task_type and task_id must name a task of {spec}, got {task_type!r} and {task_id!r}")
        return cls(spec, task_type, task_id)


def tf_config() -> ClusterSettings | None:
    """Return the cluster that ``TF_CONFIG`` names; None where it names none. A ValueError says how it must be."""
    text = os.environ.get("TF_CONFIG")
    import json  # nothing else of what every program imports needs it

    try:
        fields = json.loads(text) if text else {}
        if not fields.get("cluster"):
            return None
        return ClusterSettings.of(fields["cluster"], str(fields["task"]["type"]), int(fields["task"]["index"]))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            'TF_CONFIG must be like {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
            f", got {text!r} ({type(error).__name__}: {error})"
        ) from None


def let_crashes_end_processes() -> None:
    """Keep Open MPI, which is to be initialised, from handling the signals of crashes.

    It prints a trace, for which it allocates memory: where the crash was in that, it waits for ever, and the worker is
    neither alive nor dead.
    """
    os.environ.setdefault("OMPI_MCA_opal_signal", "")


def notes() -> str | None:
    """Return the folder of the launcher's journal; None where there is none."""
    return os.environ.get("AIODIST_NOTES") or None


def control_address() -> str | None:
    """Return the name or number by which the others reach the first worker; None to find it out."""
    return os.environ.get("AIODIST_CONTROL_ADDRESS") or None


def with_workers(workers: int, notes: str) -> dict[str, str]:
    """Return the environment for the workers that ``aiodist run`` starts, with their folder of notes.

    Python writes to a terminal line by line, but keeps what it writes to a pipe, which agents read from, until it has
    much: a killed worker would never have said it. So several workers keep nothing, unless the user has set that.

    Open MPI's launcher leaves its folder when it is killed: it keeps that among the notes, which somebody removes.
    """
    own = {"AIODIST_WORKERS": str(workers), "AIODIST_NOTES": notes}
    at_once = {"PYTHONUNBUFFERED": "1"} if workers > 1 else {}
    return {_OPEN_MPI_FOLDER: notes, **_OPEN_MPI_STARTS, **at_once, **os.environ, **own}
