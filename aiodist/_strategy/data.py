"""A strategy's data methods, which `Strategy` inherits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodist._arrays.values import regroup_data, select_replica
from aiodist._core.errors import ReplicaContextError
from aiodist._data.share import Share
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.current import current
from aiodist._strategy.scope import HasReplicas, require_cross_replica, strategy_in_force

if TYPE_CHECKING:
    from aiodist._data.dataset import NumpyDataset
    from aiodist._data.distributed import DistributedDataset, InputContext, ValueContext

# Datasets are imported by the methods that make one: most programs make none.


class DataMethods(HasReplicas):
    """The data methods of a strategy."""

    def experimental_distribute_dataset(self, dataset: Any, options: None = None) -> DistributedDataset:
        """Return a dataset that gives each replica its part of every global batch.

        A global batch of m examples is cut along the first axis into n consecutive parts of ceil(m/n), the last ones
        short or empty. With one replica the batches are passed on unchanged. Over several workers every worker iterates
        over the same global batches, and takes the parts of its own replicas.

        Args:
            dataset: an iterable or async iterable of global batches: nests of arrays with equal sizes along the first
                axis, e.g. a `NumpyDataset` or a PyTorch ``DataLoader``.
            options: None.

        Raises:
            ReplicaContextError: called or iterated inside a replica, or called under another strategy.
            TypeError: the dataset is not iterable, or ``options`` is not None; while iterating, a leaf of a batch is
                not an array.
            ValueError: while iterating, the arrays of a batch have different sizes along the first axis, or one has no
                axis.
        """
        require_cross_replica(self, "strategy.experimental_distribute_dataset")
        _check_options(options)
        from aiodist._data.distributed import DistributedDataset, StepRule

        rule = StepRule(1, partial(_my_parts, self._replicas.share), _refuse_inside_replica)
        return DistributedDataset(dataset, rule)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: None = None
    ) -> DistributedDataset:
        """Return a dataset of the per-replica batches that a function's dataset yields. Each step takes n of them.

        The k-th batch of a step is replica k's. If fewer than n are left for the last step, the other replicas get
        arrays without rows that are otherwise like replica 0's: nothing is dropped, and a MEAN along the first axis
        divides by the true count.

        Over several workers the function makes this worker's pipeline, and a step takes a batch for each local replica.
        The workers agree at every step whether any of them has a batch left, so that all end together. Replicas without
        a batch get arrays without rows, also on a worker whose pipeline has ended early. Iterate asynchronously there.

        Args:
            dataset_fn: called once, at this call, on every worker, with an `InputContext` that says which pipeline to
                make; returns an iterable or async iterable.
            options: None.

        Raises:
            CollectiveError: while iterating, the workers disagree.
            ReplicaContextError: called or iterated inside a replica, or called under another strategy.
            TypeError: ``dataset_fn`` is not a plain function or does not return an iterable, or ``options`` is not
                None.
            ValueError: while iterating, the batches of a step differ in structure.
        """
        require_cross_replica(self, "strategy.distribute_datasets_from_function")
        _check_options(options)
        share = self._replicas.share
        from aiodist._data.batches import group
        from aiodist._data.distributed import DistributedDataset, InputContext, StepRule

        dataset = _called(dataset_fn, "dataset_fn", InputContext(share.workers, share.rank, share.replicas))
        size = len(share.mine)
        rule = StepRule(size, partial(group, num_replicas=size), _refuse_inside_replica, share.fill_up)
        return DistributedDataset(dataset, rule)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: None = None
    ) -> DistributedDataset:
        """Call `distribute_datasets_from_function`; this is its older name.

        Raises:
            ReplicaContextError, TypeError, ValueError: as `distribute_datasets_from_function`.
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a nest of per-replica values that a function makes, in replica order.

        Args:
            value_fn: called once for each local replica, with a `ValueContext`; returns nests of equal structure.

        Returns:
            The nest with a `PerReplica` for each leaf; None stays None where all replicas have it. With one replica,
            what the function returned.

        Raises:
            ReplicaContextError: called inside a replica, or under another strategy.
            TypeError: ``value_fn`` is not a plain function.
            ValueError: the structures differ.
        """
        require_cross_replica(self, "strategy.experimental_distribute_values_from_function")
        replicas, mine, *_ = self._replicas.share
        from aiodist._data.distributed import ValueContext

        values = [_called(value_fn, "value_fn", ValueContext(replica_id, replicas)) for replica_id in mine]
        return regroup_data(values, "values", mine)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> NumpyDataset:
        """Return a dataset of the examples in a nest of NumPy arrays, where row k of each array is example k's.

        Args:
            numpy_input: the arrays, of equal size along the first axis; they are not copied.
            session: None.

        Raises:
            ReplicaContextError: called inside a replica, or under another strategy.
            TypeError: a leaf is not a NumPy array, or ``session`` is not None.
            ValueError: the arrays have different sizes along the first axis, or one has no axis.
        """
        require_cross_replica(self, "strategy.experimental_make_numpy_dataset")
        if session is not None:
            raise TypeError(f"session must be None, there are no sessions here, got {session!r}")
        from aiodist._data.dataset import NumpyDataset

        return NumpyDataset(numpy_input)


def _my_parts(share: Share, batches: Sequence[Any]) -> Any:
    """Return the parts of a step's only batch that belong to this process's replicas."""
    (batch,) = batches
    from aiodist._data.batches import cut

    parts = cut(batch, share.replicas)
    if len(share.mine) == share.replicas:
        return parts
    mine = [select_replica(replica_id, parts, share.replicas) for replica_id in share.mine]
    return regroup_data(mine, "batches", share.mine)


def _refuse_inside_replica() -> None:
    here = current.get()
    if isinstance(here, ReplicaContext) and strategy_in_force(here) is not None:
        raise ReplicaContextError(
            f"a distributed dataset was iterated inside replica {here.replica_id_in_sync_group}; "
            "each of its batches is one step for all replicas, so a replica that takes one takes the others' parts "
            "away: iterate outside, and pass the batch, "
            "`async for batch in dataset: await strategy.run(step, args=(batch,))`"
        )


def _check_options(options: Any) -> None:
    if options is not None:
        raise TypeError(f"options must be None, got {options!r}")


def _called(fn: Any, name: str, context: InputContext | ValueContext) -> Any:
    """Return what a dataset or value function returns for a context.

    Raises:
        TypeError: it is not a plain function.
    """
    if not callable(fn):
        raise TypeError(f"{name} must be a function of one {type(context).__name__}, got {fn!r}")
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"{name} must be a plain function, got the coroutine function {fn!r}")
    return fn(context)
