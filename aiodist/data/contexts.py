"""What functions that make data are told: which part of the input is theirs, and for which replica a value is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InputContext:
    """What a dataset function is told; see `Strategy.distribute_datasets_from_function`.

    Args:
        num_input_pipelines: how many times the function is called, over all workers.
        input_pipeline_id: which of those calls this is, from 0.
        num_replicas_in_sync: how many replicas work in step.

    Raises:
        ValueError: a count below 1, or an id that is not below the number of pipelines.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name in ("num_input_pipelines", "num_replicas_in_sync"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        _check_id("input_pipeline_id", self.input_pipeline_id, self.num_input_pipelines)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return a replica's share of a global batch.

        Raises:
            ValueError: the global batch does not divide evenly.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"global_batch_size must be divisible by the number of replicas, {self.num_replicas_in_sync}, "
                f"got {global_batch_size}"
            )
        return size


@dataclass(frozen=True, slots=True)
class ValueContext:
    """What a value function is told; see `Strategy.experimental_distribute_values_from_function`.

    Args:
        replica_id_in_sync_group: the replica that the value is for, from 0.
        num_replicas_in_sync: how many replicas work in step.

    Raises:
        ValueError: a count below 1, or an id that is not below it.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if self.num_replicas_in_sync < 1:
            raise ValueError(f"num_replicas_in_sync must be at least 1, got {self.num_replicas_in_sync}")
        _check_id("replica_id_in_sync_group", self.replica_id_in_sync_group, self.num_replicas_in_sync)


def _check_id(name: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{name} must be from 0 to {count - 1}, got {value}")


InputContext.__module__ = ValueContext.__module__ = "aiodist"
