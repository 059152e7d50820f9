"""What a strategy on several workers does with data: each worker takes the parts of its own replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist._arrays.values import regroup, select_replica
from aiodist._core.report import Reason
from aiodist.collective.kinds import Kind
from aiodist.collective.signature import Signature
from aiodist.data.contexts import InputContext, ValueContext
from aiodist.data.cutting import cut, group, without_rows
from aiodist.data.distributed import DistributedDataset
from aiodist.data.methods import DataMethods, called, check_options
from aiodist.strategy.scope import require_cross_replica
from aiodist.workers.crossing import Crossing, Plan, Span, reduce_columns
from aiodist.workers.objects import Gathering
from aiodist_kernels import Accumulate, ReduceOp

if TYPE_CHECKING:
    from aiodist.replica.team import Team


class WorkersDataMethods(DataMethods):
    """The data methods of a strategy on several workers."""

    if TYPE_CHECKING:

        @property
        def _team(self) -> Team:
            """The workers."""
            ...

    def experimental_distribute_dataset(self, dataset: Any, options: None = None) -> DistributedDataset:
        """Return a dataset that gives each local replica its part of every global batch.

        Every worker iterates over the same global batches, and takes the parts of its own replicas.

        Args:
            dataset: as in `Strategy.experimental_distribute_dataset`; the same batches on every worker.
            options: None.

        Raises:
            ReplicaContextError, TypeError, ValueError: as `Strategy.experimental_distribute_dataset`.
        """
        require_cross_replica(self, "strategy.experimental_distribute_dataset")
        check_options(options)
        return DistributedDataset(dataset, 1, self._cut_mine)

    def _cut_mine(self, batches: Sequence[Any]) -> Any:
        layout = self._team.span.layout
        (batch,) = batches
        parts = cut(batch, layout.replicas)
        mine = range(layout.offset, layout.offset + layout.local)
        return regroup([select_replica(i, parts, layout.replicas) for i in mine], "batches", mine, always_wrap=True)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: None = None
    ) -> DistributedDataset:
        """Return a dataset over the per-replica batches of this worker's pipeline: a step takes one a local replica.

        The workers agree at every step whether any has a batch left: so all end together, and replicas without a batch
        get arrays of no rows, also those of a worker whose pipeline has ended early. Iterate asynchronously.

        Args:
            dataset_fn: called once on every worker, now, with an `InputContext` that says which pipeline is its own.
            options: None.

        Raises:
            CollectiveError: while iterating: the workers do not meet.
            ReplicaContextError, TypeError, ValueError: as `Strategy.distribute_datasets_from_function`.
        """
        require_cross_replica(self, "strategy.distribute_datasets_from_function")
        check_options(options)
        layout = self._team.span.layout
        context = InputContext(layout.workers, layout.rank, layout.replicas)
        dataset = called(dataset_fn, "dataset_fn", context)
        return DistributedDataset(dataset, layout.local, partial(group, num_replicas=layout.local), self._fill_up)

    async def _fill_up(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return this worker's batches of a step; batches of no rows where only others have one; none at the end."""
        if self._team.span.layout.workers == 1:
            return batches
        code = self._fill_up.__func__.__code__  # type: ignore[attr-defined]
        somebody_has, somebody_has_none = await self._team.perform(_WHO_HAS_ONE, code, 0, bool(batches))
        if not somebody_has or not somebody_has_none:
            return batches
        pattern = without_rows(batches[0]) if batches else None
        patterns = await self._team.perform(_PATTERNS, code, 0, (bool(batches), pattern))
        return batches or next([found] for has_batch, found in patterns if has_batch)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a nest of per-replica values that a function makes for this worker's replicas, one after the other.

        Args:
            value_fn: called once for each local replica, with a `ValueContext`; returns nests of equal structure.

        Raises:
            ReplicaContextError, TypeError, ValueError: as `Strategy.experimental_distribute_values_from_function`.
        """
        require_cross_replica(self, "strategy.experimental_distribute_values_from_function")
        layout = self._team.span.layout
        mine = range(layout.offset, layout.offset + layout.local)
        values = [called(value_fn, "value_fn", ValueContext(i, layout.replicas)) for i in mine]
        return regroup(values, "values", mine, always_wrap=True)


def _plan_who(_: Any, values: Sequence[bool], accumulate: Accumulate, span: Span) -> Plan:
    """Plan to tell whether anybody has a batch, and whether anybody has none."""
    mine = np.array([values[0], not values[0]], np.int32)
    plan = reduce_columns(ReduceOp.MAX, [[mine]], [None], accumulate, span._replace(ordered=False))
    return plan._replace(finish=lambda results: plan.finish(results)[0].tolist())


def _plan_patterns(_: Any, values: Sequence[Any], __: Any, ___: Span) -> Plan:
    """Plan to tell what batches look like."""
    return Plan([Gathering(values[0])], lambda results: results[0])


def _signature(name: str, across: Crossing) -> Signature:
    return Kind(name, Reason.AXIS, None, across=across), None, None, None, None, None, None, None, None


_WHO_HAS_ONE = _signature("next step of a dataset", _plan_who)
_PATTERNS = _signature("last steps of a dataset", _plan_patterns)
