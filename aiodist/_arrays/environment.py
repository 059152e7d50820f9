"""Environment variables: only this module reads them.

``AIODIST_STALL_SECONDS``: how long a run may make no progress, with a replica in a collective, before a `StallWarning`
reports who waits for what; 10 by default, 0 for never.
``AIODIST_TRACE``: where to write a trace of every run of the process; see `aiodist.trace`. Worker k of several writes
``run.k.json`` for ``run.json``.
``AIODIST_WORKERS``: the number of workers that ``aiodist run`` has started.
``AIODIST_NOTES``: the folder of the journal in which ``aiodist run`` reads its workers' progress.
``PYTHONUNBUFFERED``: whether Python buffers output to pipes; workers of ``aiodist run`` do not unless the user sets it.
``AIODIST_CONTROL_ADDRESS``: the name or number at which the first worker listens, and the others reach it.
``AIODIST_LOST_SECONDS``: how long a worker may be stopped, as by a debugger, or cut off, before it counts as lost; by
default 1 if its machine reports that it is stopped, and 10 if its machine does not answer.
``OMPI_MCA_opal_signal``: the signals that Open MPI handles; none unless the user sets it.
``PRTE_MCA_prte_local_tmpdir_base``: where Open MPI's launcher keeps a job's files; further variables of Open MPI let it
start workers as root, and more than there are cores, bound to none.
``OMPI_COMM_WORLD_SIZE``, ``PMI_SIZE``, ``SLURM_STEP_NUM_TASKS``, ``WORLD_SIZE``: the number of workers, by launcher.
``OMPI_COMM_WORLD_RANK``, ``PMI_RANK``, ``SLURM_PROCID``, ``RANK``: this worker's rank, by launcher.
``TORCHELASTIC_RUN_ID``, ``MASTER_ADDR``: set for workers of torch.distributed.
``TF_CONFIG``: the cluster for tf.distribute, and this process's task in it.
``_ARGCOMPLETE``: set by a shell that completes words of the command line.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

_OPEN_MPI_STARTS = {
    **{f"OMPI_ALLOW_RUN_AS_ROOT{suffix}": "1" for suffix in ("", "_CONFIRM")},
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # these two before Open MPI 5
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
"""With these Open MPI starts any number of workers on one machine, also in a container."""
TORCHRUN = "torchrun"


class Launched(NamedTuple):
    """How this process was started as one of several workers, or as the only one."""

    by: str  # the launcher, for users
    variable: str  # the variable that shows it
    workers: int
    rank: int


_LAUNCHERS: Sequence[tuple[str, str, Sequence[str], str | None]] = (
    ("aiodist run", "AIODIST_WORKERS", ("OMPI_COMM_WORLD_RANK", "PMI_RANK"), None),
    (TORCHRUN, "WORLD_SIZE", ("RANK",), "TORCHELASTIC_RUN_ID"),
    ("mpiexec", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",), None),
    ("mpiexec", "PMI_SIZE", ("PMI_RANK",), None),
    (TORCHRUN, "WORLD_SIZE", ("RANK",), "MASTER_ADDR"),  # any launcher that sets the same as torchrun
    ("srun", "SLURM_STEP_NUM_TASKS", ("SLURM_PROCID",), None),
)
"""Launcher, variable of the number of workers, of the rank, and one that must also be set; innermost first."""


def stall_seconds() -> float:
    """Return how long a run may make no progress before a warning; 0 for no warning."""
    seconds = _seconds("AIODIST_STALL_SECONDS", ", 0 for no stall report")
    return 10.0 if seconds is None else seconds


def lost_seconds() -> float | None:
    """Return how long a worker may be stopped or cut off before it counts as lost; None for the defaults."""
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
    """Return the path of the process's trace, a file for each worker; None for no trace."""
    path, found = os.environ.get("AIODIST_TRACE") or None, launched()
    if path is None or found is None or found.workers <= 1:
        return path
    stem, suffix = os.path.splitext(path)  # noqa: PTH122  (keep the spelling of the path)
    return f"{stem}.{found.rank}{suffix}"


def fix_hashes(seed: int) -> None:
    """Restart this process with a seed for string hashes, unless ``PYTHONHASHSEED`` is set.

    Then the order of a set of strings is the same in every run of the command. On Windows, where a process cannot be
    replaced, nothing happens.
    """
    if "PYTHONHASHSEED" not in os.environ and hasattr(os, "fork"):
        os.execve(  # noqa: S606  (the same interpreter with the same arguments)
            sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": str(seed)}
        )


def completes_words() -> bool:
    """Return whether a shell has started this process to complete words of the command line."""
    return "_ARGCOMPLETE" in os.environ


def launched() -> Launched | None:
    """Return how this process was launched, as far as the environment shows; None without a launcher."""
    for by, variable, ranks, required in _LAUNCHERS:
        workers = _count(variable)
        if workers is not None and (required is None or required in os.environ):
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
    task_id: int  # this process's index in the job

    @property
    def workers(self) -> int:
        """The number of workers of the cluster: a chief is the first of them."""
        return sum(len(self.spec.get(job, ())) for job in ("chief", "master", "worker"))

    @property
    def rank(self) -> int:
        """This process's rank among them."""
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
    """Return the cluster of ``TF_CONFIG``; None if there is none. A ValueError shows the expected form."""
    text = os.environ.get("TF_CONFIG")
    import json  # here, to keep the import of aiodist light

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
    """Keep Open MPI, before it is initialised, from handling the signals of crashes.

    It prints a stack trace, for which it allocates memory: if the crash was in the allocator, it hangs, and the worker
    is neither alive nor dead.
    """
    os.environ.setdefault("OMPI_MCA_opal_signal", "")


def journal_folder() -> str | None:
    """Return the folder of the launcher's journal; None if there is none."""
    return os.environ.get("AIODIST_NOTES") or None


def control_address() -> str | None:
    """Return the name or number by which the others reach the first worker; None if it is not set."""
    return os.environ.get("AIODIST_CONTROL_ADDRESS") or None


def with_workers(workers: int, notes: str) -> dict[str, str]:
    """Return the environment for the workers that ``aiodist run`` starts, with the folder of their journal.

    Python buffers output to pipes, which agents read from, so the last output of a killed worker would be lost.
    Therefore several workers do not buffer, unless the user decides otherwise.

    Open MPI's launcher leaves its folder behind when it is killed, so that lies within the journal's, which is removed.
    """
    own = {"AIODIST_WORKERS": str(workers), "AIODIST_NOTES": notes}
    unbuffered = {"PYTHONUNBUFFERED": "1"} if workers > 1 else {}
    return {"PRTE_MCA_prte_local_tmpdir_base": notes, **_OPEN_MPI_STARTS, **unbuffered, **os.environ, **own}
