"""The names of TensorFlow 1, each of which calls its successor."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aiodist._arrays import nests
from aiodist._arrays.options import CommunicationOptions
from aiodist._runtime.requests import checked_name
from aiodist._strategy.cluster import ClusterSettings

if TYPE_CHECKING:
    from aiodist._strategy.extended import StrategyExtended
    from aiodist._strategy.variable import Variable

CollectiveHints = CommunicationOptions


class V1Strategy:
    """A strategy's methods by their names in TensorFlow 1. New programs use the names that the docstrings give."""

    if TYPE_CHECKING:

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
        leaves = nests.flatten_with_none(list(self.experimental_local_results(value)))[0]
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

    def colocate_vars_with(self, variable: Variable) -> AbstractContextManager[None]:
        """Return a context manager in which variables are created on the devices of another; see ``extended``'s.

        Raises:
            TypeError, ValueError: as `StrategyExtended.colocate_vars_with`.
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
