"""The names of TensorFlow 1, each of which calls its successor."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict
from typing import Any, NamedTuple

from aiodist._arrays import nests
from aiodist._arrays.options import CommunicationOptions
from aiodist._runtime.requests import checked_name
from aiodist._strategy.extended import StrategyExtended
from aiodist._strategy.variable import Variable

CollectiveHints = CommunicationOptions


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


class V1Strategy:
    """A strategy's methods by their names in TensorFlow 1. New programs use the names that the docstrings give."""

    @property
    @abstractmethod
    def extended(self) -> StrategyExtended:
        """The strategy's devices and settings."""

    @abstractmethod
    async def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function on every replica."""

    @abstractmethod
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a nest of per-replica values."""

    @abstractmethod
    def _components(self, value: Any) -> tuple[Any, ...]:
        """Return the same, be there coroutines in it."""

    async def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Run a function on every replica, with the next element of an iterator if there is one; now `run`.

        Args:
            fn: a function of no argument, or of one argument with ``input_iterator``.
            input_iterator: an iterator or asynchronous iterator of per-replica values.

        Raises:
            StopAsyncIteration: the iterator is exhausted.
            TypeError: ``input_iterator`` is not an iterator.
            Exception: as `run`.
        """
        return await self.run(fn, () if input_iterator is None else (await _next(input_iterator),))

    async def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function on every replica; now `run`.

        Raises:
            Exception: as `run`.
        """
        return await self.run(fn, args, kwargs)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a nest of per-replica values; now `experimental_local_results`.

        Raises:
            ValueError: as `experimental_local_results`.
        """
        return self.experimental_local_results(value)

    async def group(self, value: Any, name: str | None = None) -> None:
        """Await all awaitables in a value, component by component.

        Args:
            value: a nest of per-replica values.
            name: a label without effect.

        Raises:
            Exception: what an await raises.
        """
        checked_name(name)
        leaves = nests.flatten_with_none(list(self._components(value)))[0]
        awaitable = {id(leaf): leaf for leaf in leaves if inspect.isawaitable(leaf)}  # a plain one comes n times
        for leaf in awaitable.values():
            await leaf

    def configure(
        self,
        session_config: Any = None,  # noqa: ARG002  (there are no sessions)
        cluster_spec: Mapping[str, Sequence[str]] | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Say which worker of a cluster this process is, for strategies over several workers.

        Args:
            session_config: ignored; there are no sessions.
            cluster_spec: the addresses of each job's tasks, by job name.
            task_type: this process's job.
            task_id: this process's index in the job.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the settings contradict each other, or the strategy is for one process.
        """
        settings = ClusterSettings.of(cluster_spec, task_type, task_id)
        if settings is not None:
            self._use_cluster(settings)

    def _use_cluster(self, settings: ClusterSettings) -> None:
        """Keep the settings of a cluster.

        Raises:
            ValueError: the strategy is for one process.
        """
        raise ValueError(
            f"{type(self).__name__} is for one process and cannot use {settings.task_type!r} {settings.task_id} of a "
            "cluster; MultiWorkerMirroredStrategy is for several"
        )

    def update_config_proto(self, config_proto: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a configuration with this strategy's devices and collective settings filled in.

        Args:
            config_proto: a mapping, which is copied deeply.

        Raises:
            TypeError: ``config_proto`` is not a mapping.
        """
        if not isinstance(config_proto, Mapping):
            raise TypeError(f"update_config_proto expects a mapping of settings, got {config_proto!r}")
        extended = self.extended
        collectives = {"order_check": str(extended.order_check), **asdict(extended.communication_options)}
        return {**deepcopy(dict(config_proto)), "devices": list(extended.devices), "collectives": collectives}

    def colocate_vars_with(self, variable: Variable) -> AbstractContextManager[object]:
        """Return a context manager in which variables are created on the devices of another; see ``extended``'s.

        Raises:
            ReplicaContextError, TypeError: as `StrategyExtended.colocate_vars_with`.
        """
        return self.extended.colocate_vars_with(variable)


async def _next(iterator: Any) -> Any:
    if hasattr(iterator, "__anext__"):
        return await anext(iterator)
    if not hasattr(iterator, "__next__"):
        raise TypeError(f"input_iterator must be an iterator, got {iterator!r}; write iter(dataset) or aiter(dataset)")
    try:
        return next(iterator)
    except StopIteration:  # which cannot pass through a coroutine
        raise StopAsyncIteration from None
