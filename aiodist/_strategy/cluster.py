"""The cluster of a strategy over several workers, and which worker this process is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ClusterSettings(NamedTuple):
    """A cluster, and this process's place in it.

    Attributes:
        spec: the addresses of each job's tasks, by job name.
        task_type: this process's job.
        task_id: this process's index in the job, from 0.
    """

    spec: Mapping[str, tuple[str, ...]]
    task_type: str
    task_id: int

    @classmethod
    def of(cls, cluster_spec: Any, task_type: Any, task_id: Any) -> ClusterSettings | None:
        """Return the given settings; None if there are none.

        Raises:
            TypeError: a setting has the wrong type.
            ValueError: a setting is missing, or the cluster does not have such a task.
        """
        if cluster_spec is None and task_type is None and task_id is None:
            return None
        if cluster_spec is None or task_type is None or task_id is None:
            raise ValueError(
                "cluster_spec, task_type and task_id are given together, e.g. {'worker': [...]}, 'worker', 0"
            )
        spec = _spec(cluster_spec)
        if not isinstance(task_type, str):
            raise TypeError(f"task_type must be the name of a job, a string, got {task_type!r}")
        if task_type not in spec:
            raise ValueError(f"task_type must be a job of the cluster, one of {sorted(spec)}, got {task_type!r}")
        if isinstance(task_id, bool) or not isinstance(task_id, int):
            raise TypeError(f"task_id must be an int, got {task_id!r}")
        if not 0 <= task_id < len(spec[task_type]):
            raise ValueError(f"task_id must be from 0 to {len(spec[task_type]) - 1} for {task_type!r}, got {task_id}")
        return cls(spec, task_type, task_id)


def _spec(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise TypeError(f"cluster_spec must be a mapping from job names to lists of addresses, got {value!r}")
    for job, addresses in value.items():
        listed = isinstance(addresses, Sequence) and not isinstance(addresses, str)
        if not isinstance(job, str) or not listed or not all(isinstance(address, str) for address in addresses):
            raise TypeError(
                f"cluster_spec must map job names to lists of addresses 'host:port', got {job!r}: {addresses!r}"
            )
        if not addresses:
            raise ValueError(f"the job {job!r} of cluster_spec must have at least one address")
    return {job: tuple(addresses) for job, addresses in value.items()}
