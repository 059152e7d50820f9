"""What a strategy does with data: the methods that `Strategy` inherits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodist._arrays.values import regroup
from aiodist.data.contexts import InputContext, ValueContext
from aiodist.data.cutting import cut, group
from aiodist.data.dataset import NumpyDataset
from aiodist.data.distributed import DistributedDataset
from aiodist.strategy.scope import require_cross_replica


class DataMethods:
    """The data methods of a strategy, which has `num_replicas_in_sync` replicas."""

    if TYPE_CHECKING:

        @property
        def num_replicas_in_sync(self) -> int:
            """How many replicas work in step."""
            ...

    def experimental_distribute_dataset(self, dataset: Any, options: None = None) -> DistributedDataset:
        """Return a dataset that gives each replica its part of every global batch.

        A global batch of m examples is cut along the first axis into n consecutive parts of ceil(m/n), the last ones
        short or empty. With one replica the batches come as they are.

        Args:
            dataset: an iterable or async iterable of global batches: nests of arrays of equal first size, e.g. a
                `NumpyDataset` or a PyTorch ``DataLoader``.
            options: None.

        Raises:
            ReplicaContextError: called, or iterated, inside a replica; called under another strategy.
            TypeError: the dataset is not iterable; options. While iterating: a leaf of a batch is no array.
            ValueError: while iterating: the arrays of a batch differ in their first size, or one has no first axis.
        """
        require_cross_replica(self, "strategy.experimental_distribute_dataset")
        check_options(options)
        return DistributedDataset(dataset, 1, partial(_cut_only, self.num_replicas_in_sync))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: None = None
    ) -> DistributedDataset:
        """Return a dataset over the per-replica batches that a function's dataset yields: n of them make a step.

        The k-th batch of a step is replica k's. Where less than n are left for the last step, the replicas without one
        get arrays of no rows, otherwise like replica 0's: nothing is dropped, and a MEAN along the first axis divides
        by the true count.

        Args:
            dataset_fn: called once, now, with an `InputContext`; returns an iterable or async iterable.
            options: None.

        Raises:
            ReplicaContextError: called, or iterated, inside a replica; called under another strategy.
            TypeError: the function is none, or a coroutine function; what it returns is not iterable; options.
            ValueError: while iterating: the batches of a step differ in structure.
        """
        require_cross_replica(self, "strategy.distribute_datasets_from_function")
        check_options(options)
        size = self.num_replicas_in_sync
        dataset = called(dataset_fn, "dataset_fn", InputContext(num_replicas_in_sync=size))
        return DistributedDataset(dataset, size, partial(group, num_replicas=size))

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: None = None
    ) -> DistributedDataset:
        """Do the same as `distribute_datasets_from_function`, of which this is the older name.

        Raises:
            ReplicaContextError, TypeError, ValueError: as `distribute_datasets_from_function`.
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a nest of per-replica values that a function makes, one replica after the other.

        Args:
            value_fn: called once for each replica, with a `ValueContext`; returns nests of equal structure.

        Returns:
            The nest with a `PerReplica` for each leaf, equal ones too, but none for a None that all have; with one
            replica, what the function returned.

        Raises:
            ReplicaContextError: called inside a replica, or under another strategy.
            TypeError: the function is none, or a coroutine function.
            ValueError: the structures differ.
        """
        require_cross_replica(self, "strategy.experimental_distribute_values_from_function")
        size = self.num_replicas_in_sync
        values = [called(value_fn, "value_fn", ValueContext(replica_id, size)) for replica_id in range(size)]
        return regroup(values, "values", always_wrap=True)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> NumpyDataset:
        """Return a dataset of the examples in a nest of NumPy arrays: row k of each array is the k-th example's.

        Args:
            numpy_input: the arrays; they are not copied.
            session: None.

        Raises:
            ReplicaContextError: called inside a replica, or under another strategy.
            TypeError: a leaf is no NumPy array; a session.
            ValueError: the arrays differ in their first size, or one has no first axis.
        """
        require_cross_replica(self, "strategy.experimental_make_numpy_dataset")
        if session is not None:
            raise TypeError(f"session must be None, there are no sessions here, got {session!r}")
        return NumpyDataset(numpy_input)


def _cut_only(num_replicas: int, batches: Any) -> Any:
    (batch,) = batches
    return cut(batch, num_replicas)


def check_options(options: Any) -> None:
    """Check that there are none.

    Raises:
        TypeError: there are.
    """
    if options is not None:
        raise TypeError(f"options must be None, got {options!r}")


def called(fn: Any, name: str, context: InputContext | ValueContext) -> Any:
    """Return what a function says of a context; it makes data, and does not wait.

    Raises:
        TypeError: it is no function, or a coroutine function.
    """
    if not callable(fn):
        raise TypeError(f"{name} must be a function of one {type(context).__name__}, got {fn!r}")
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"{name} must be a plain function, got the coroutine function {fn!r}")
    return fn(context)
