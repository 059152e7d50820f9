"""The settings of a cluster, as `Strategy.configure`, ``TF_CONFIG`` and ``cluster_resolver`` have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


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
            raise TypeError(
                f"cluster_spec must be a mapping from job names to lists of addresses 'host:port', got {cluster_spec!r}"
            )
        spec = {job: tuple(addresses) for job, addresses in cluster_spec.items()}
        if task_type not in spec:
            raise ValueError(f"task_type must be a job of the cluster, one of {sorted(spec)}, got {task_type!r}")
        if isinstance(task_id, bool) or not isinstance(task_id, int):
            raise TypeError(f"task_id must be an int, got {task_id!r}")
        if not 0 <= task_id < len(spec[task_type]):
            raise ValueError(f"task_id must be from 0 to {len(spec[task_type]) - 1} for {task_type!r}, got {task_id}")
        return cls(spec, task_type, task_id)
