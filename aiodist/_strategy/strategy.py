"""Strategies: the replicas of a program, operations on them, and the strategy in force."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import anyio.to_thread
import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.devices import gpu_number
from aiodist._arrays.environment import ClusterSettings
from aiodist._arrays.leaves import describe_leaf
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import regroup, regroup_data, split
from aiodist._collectives.kinds import ALL_GATHER, ALL_REDUCE
from aiodist._core.errors import ReplicaContextError
from aiodist._core.recorder import RecordedRuns, Recorder
from aiodist._runtime import arguments
from aiodist._runtime.context import ReplicaContext, context_of
from aiodist._runtime.current import CrossReplica, current
from aiodist._runtime.participant import Participant
from aiodist._runtime.scheduler import Run, new_detached_run
from aiodist._runtime.tasks import ReplicaCall, run_replicas
from aiodist._strategy.extended import CrossDeviceOps, StrategyExtended, bind, new_extended, split_arguments
from aiodist._strategy.reductions import Operation, combine, named
from aiodist._strategy.scope import (
    HasReplicas,
    Replicas,
    Scope,
    replicas_here,
    replicas_of,
    require_cross_replica,
    strategy_in_force,
)
from aiodist._strategy.variable import Variable, as_distributed, check_created
from aiodist_kernels import ReduceOp, plan_for, warm

if TYPE_CHECKING:  # datasets are imported by the methods that make one: most programs make none
    from aiodist._data.dataset import NumpyDataset
    from aiodist._data.distributed import DistributedDataset, InputContext, ValueContext


class Strategy(HasReplicas):
    """A set of replicas that work in step; the base class of `MirroredStrategy`.

    The default strategy, which is in force if no other is, has one replica, on CPU:0. Methods that are awaited or make
    data are for use outside of replicas. In a replica, or under another strategy, they raise `ReplicaContextError`.

    Args:
        extended: the strategy's devices and settings; strategies cannot share one.

    Raises:
        TypeError: ``extended`` is not a `StrategyExtended`.
        ValueError: ``extended`` belongs to another strategy.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        if not isinstance(extended, StrategyExtended):
            raise TypeError(f"expected a StrategyExtended, got {extended!r}; for a strategy use MirroredStrategy()")
        bind(extended, self)
        self._extended = extended
        self._replicas = Replicas(len(extended.devices))
        self._runs = RecordedRuns()
        self._recorder = Recorder(self._runs)

    def __repr__(self) -> str:
        devices = self._extended.devices
        shown = ", ".join(devices) if len(devices) <= 4 else f"{', '.join(devices[:2])}, … {devices[-1]}"
        return f"<{type(self).__name__}: {len(devices)} replica{'s' * (len(devices) > 1)} on {shown}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # `copy` calls it, too
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, because variables and runs belong to it: "
            "pass it on, or make another strategy of the same devices"
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that work in step, over all workers."""
        return self._replicas.share.replicas

    @property
    def extended(self) -> StrategyExtended:
        """The strategy's devices and settings."""
        return self._extended

    @property
    def recorder(self) -> Recorder:
        """The last collectives of every replica, of the runs in progress and of the last one that ended."""
        return self._recorder

    @property
    def cluster_resolver(self) -> ClusterSettings | None:
        """The cluster that the strategy spans; None for one process."""
        return None

    def scope(self) -> Scope[Self]:
        """Return a context manager that enters this strategy's cross-replica context and returns the strategy.

        It may be entered again. In a replica or in another strategy's scope it raises `ReplicaContextError`. The
        default strategy's scope does nothing.
        """
        return Scope(self)

    # Methods that all workers call are plain functions, so the call site is known even if another task awaits them.

    def run(
        self,
        fn: Callable[..., Awaitable[Any] | Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> CoroutineType[Any, Any, Any]:
        """Run a function on every replica, each in a task of its own, and wait for all of them.

        Over several workers it runs on the replicas of all; arguments and results are those of this worker's.

        Args:
            fn: a coroutine function, or a plain function, which runs without interruption.
            args: a tuple or list of positional arguments. Each replica gets its component of per-replica values in
                them, at any depth; everything else is passed unchanged.
            kwargs: keyword arguments, likewise.
            options: the options of this run's collectives; they override the strategy's.

        Returns:
            The replicas' return values, regrouped leaf by leaf. Arrays, numbers, bools, strings and bytes become
            `PerReplica`, whatever their values. None, or any other object, is returned bare if all replicas returned
            the identical one. With one replica its own value is returned.

        Raises:
            CollectiveError: the replicas disagree, or a collective can never be complete; a worker is gone.
            ExceptionGroup: several replicas raised exceptions of several types.
            TypeError: an argument has the wrong type.
            ValueError: a per-replica value has the wrong number of components; the replicas created different numbers
                of variables, or returned nests of different structure, which are in the error's ``values``.
            Exception: what a replica raised, with a note that names the replica.
        """
        return named("Strategy.run", self._run(fn, args, kwargs, options, self._replicas.caller()))

    async def _run(self, fn: Any, args: Any, kwargs: Any, options: Any, site: Any) -> Any:
        calls = self._calls(fn, args, kwargs)
        return await self._carry_out(self._new_run(arguments.options(options, None)), calls, site)

    def _new_run(self, options: CommunicationOptions | None = None) -> Run:
        extended, share = self._extended, self._replicas.share
        merged = extended.communication_options.merge(options)
        total = share.replicas if len(share.own) < share.replicas else None  # other workers need finished groups
        return Run(self, extended.devices, extended.order_check, merged, first=share.own.start, total=total)

    def _new_detached_run(self) -> Run:
        return new_detached_run(self._new_run())

    async def _carry_out(self, run: Run, calls: Sequence[ReplicaCall], site: Any) -> Any:  # noqa: ARG002  (for workers)
        self._runs.begin(run.ledger, run.devices)
        try:
            results = await run_replicas(run, calls)
        finally:
            self._runs.end(run.ledger, run.devices)
        members = run.ledger.root.members
        check_created(members)
        return regroup(results, replicas=[member.replica_id for member in members])

    def _calls(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[ReplicaCall]:
        """Return the call that each replica of this process makes."""
        require_cross_replica(self, "strategy.run")
        if not callable(fn):
            raise TypeError(f"strategy.run expects a function, got {fn!r}{arguments.uncalled(fn)}")
        arguments.check_iterated(fn, "strategy.run")
        return [(fn, *own) for own in split_arguments(args, kwargs, self._replicas.local)]

    async def warmup(self, *specs: Any) -> None:
        """Compile the kernels that reductions will need, in a worker thread.

        Otherwise the first large reduction waits some tenths of a second for its kernel. Results are the same.

        Args:
            *specs: nests like those that will be reduced with SUM or MEAN, per replica or not; only their dtypes
                matter. None: float32 and float64.

        Raises:
            ImportError: the compiler for the replicas' kind of device is not installed.
            TypeError: a leaf is not an array or number, or cannot be summed.
        """
        devices, accumulate = self._extended.devices, self._extended.communication_options.accumulate
        leaves, _ = nests.flatten(self._components(specs or (np.float32(), np.float64()))[0])
        dtypes = dict.fromkeys(np.dtype(describe_leaf(leaf)[1]).newbyteorder("=") for leaf in leaves)
        ops = ReduceOp.SUM, ReduceOp.MEAN
        plans = [plan_for(op, dtype, len(devices), accumulate) for dtype in dtypes for op in ops]
        ordinals = sorted({gpu_number(device) for device in devices if device.startswith("GPU:")})
        if len(devices) > 1 and any(device.startswith("CPU:") for device in devices):
            await anyio.to_thread.run_sync(warm, plans)
        if ordinals:
            from aiodist._gpu import enqueue

            await anyio.to_thread.run_sync(enqueue.load, plans, ordinals)

    # Per-replica values.

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> CoroutineType[Any, Any, Any]:
        """Reduce a per-replica value over the replicas of all workers and, optionally, along axes.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name.
            value: a nest of per-replica values, as `run` returns them. MEAN, MIN and MAX return a plain value
                unchanged.
            axis: None, or an axis or a tuple of axes to reduce along as well. Sizes along them may differ between
                replicas; MEAN divides by the true number of elements.

        Returns:
            A nest of reduced values, with the dtypes of `ReplicaContext.all_reduce`; arrays are read-only. Values on
            GPUs become arrays of the same framework, on the GPU of replica 0's component.

        Raises:
            CollectiveError: the workers disagree, or one is gone.
            TypeError: the op does not take a dtype.
            ValueError: an unknown op; different shapes or dtypes; an axis out of range; a plain value with SUM or
                PRODUCT on several replicas.
        """
        accumulate = self._extended.communication_options.accumulate
        if isinstance(axis, (tuple, list)) and not axis:
            axis = None
        operation = Operation(ALL_REDUCE, arguments.reduce_op(reduce_op, value), axis, accumulate)
        return combine(self, "strategy.reduce", operation, value)

    def gather(self, value: Any, axis: int) -> CoroutineType[Any, Any, Any]:
        """Concatenate the components of a per-replica value, of all workers, along an axis, in replica order.

        Args:
            value: a nest of per-replica arrays of equal dtype (strings may differ in width); their sizes along ``axis``
                may differ.
            axis: the axis to concatenate along; a negative one counts from the end.

        Returns:
            A nest of read-only arrays; leaves that are not per-replica values are returned unchanged. Arrays on GPUs
            become arrays of the same framework, on the GPU of replica 0's component.

        Raises:
            CollectiveError: the workers disagree, or one is gone.
            TypeError: a component is not an array.
            ValueError: the axis is out of range, or the components differ in more than their size along it.
        """
        return combine(self, "strategy.gather", Operation(ALL_GATHER, axis=axis), value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a nest of per-replica values: a tuple with a nest for each replica.

        A plain value is repeated. Over several workers the tuple has this worker's components.

        Raises:
            TypeError: the value holds a coroutine, such as `run` returns: `await` is missing.
            ValueError: a per-replica value has the wrong number of components.
        """
        arguments.check_awaited(value, "value")
        return self._components(value)

    def _components(self, value: Any) -> tuple[Any, ...]:
        leaves, structure = nests.flatten_with_none(value)
        if any(isinstance(leaf, Variable) for leaf in leaves):
            value = structure.unflatten([as_distributed(leaf, self) for leaf in leaves])
        return tuple(split(value, len(replicas_here(self))))

    # Data.

    def _check_data_call(self, method: str, **unused: Any) -> None:
        require_cross_replica(self, f"strategy.{method}")
        for name, value in unused.items():
            if value is not None:
                raise TypeError(f"{name} must be None, got {value!r}")

    def experimental_distribute_dataset(self, dataset: Any, options: None = None) -> DistributedDataset:
        """Return a dataset that gives each replica its part of every global batch.

        A global batch of m examples is cut along the first axis into n consecutive parts of ceil(m/n), the last ones
        short or empty. Over several workers, each iterates over the same global batches and takes its own replicas'
        parts.

        Args:
            dataset: an iterable or async iterable of global batches: nests of arrays with equal sizes along the first
                axis, e.g. a `NumpyDataset` or a PyTorch ``DataLoader``.
            options: None.

        Raises:
            ReplicaContextError: the dataset is iterated inside a replica.
            TypeError: the dataset is not iterable; ``options`` is not None; a leaf of a batch is not an array.
            ValueError: the arrays of a batch have different sizes along the first axis, or one has no axis.
        """
        self._check_data_call("experimental_distribute_dataset", options=options)
        from aiodist._data.batches import cut
        from aiodist._data.distributed import DistributedDataset, StepRule

        share = self._replicas.share
        rule = StepRule(1, lambda batches: cut(batches[0], share.replicas, share.own), _refuse_inside_replica)
        return DistributedDataset(dataset, rule)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: None = None
    ) -> DistributedDataset:
        """Return a dataset of the per-replica batches that a function's dataset yields. Each step takes n of them.

        The k-th batch of a step is replica k's. If fewer than n are left for the last step, the other replicas get
        arrays without rows: nothing is dropped, and a MEAN along the first axis divides by the true count.

        Over several workers, the function makes this worker's pipeline, a step takes a batch for each local replica,
        and all workers end together, when none has a batch left. The dataset is then only an async iterable.

        Args:
            dataset_fn: called once on every worker, at this call, with an `InputContext` that says which pipeline to
                make; it returns an iterable or async iterable.
            options: None.

        Raises:
            ReplicaContextError: the dataset is iterated inside a replica.
            TypeError: ``dataset_fn`` is not a plain function or does not return an iterable; ``options`` is not None.
            ValueError: while iterating, the batches of a step differ in structure.
        """
        self._check_data_call("distribute_datasets_from_function", options=options)
        from aiodist._data.batches import group
        from aiodist._data.distributed import DistributedDataset, InputContext, StepRule

        share = self._replicas.share
        dataset = _called(dataset_fn, "dataset_fn", InputContext(share.workers, share.rank, share.replicas))
        size = len(share.own)
        rule = StepRule(size, partial(group, num_replicas=size), _refuse_inside_replica, share.fill_up)
        return DistributedDataset(dataset, rule)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: None = None
    ) -> DistributedDataset:
        """Call `distribute_datasets_from_function`, its current name."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a nest of per-replica values that a function makes, in replica order.

        Args:
            value_fn: called once for each local replica, with a `ValueContext`; it returns nests of equal structure.
                Each leaf becomes a `PerReplica`; None stays None if all replicas have it. With one replica, the
                function's own value is returned.

        Raises:
            TypeError: ``value_fn`` is not a plain function.
            ValueError: the structures differ.
        """
        self._check_data_call("experimental_distribute_values_from_function")
        from aiodist._data.distributed import ValueContext

        replicas, own, *_ = self._replicas.share
        values = [_called(value_fn, "value_fn", ValueContext(replica_id, replicas)) for replica_id in own]
        return regroup_data(values, "values", own)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> NumpyDataset:
        """Return a dataset of the examples in a nest of NumPy arrays, where row k of every array is example k.

        Args:
            numpy_input: the arrays, of equal size along the first axis; they are not copied.
            session: None.

        Raises:
            TypeError: a leaf is not a NumPy array, or ``session`` is not None.
            ValueError: the arrays have different sizes along the first axis, or one has no axis.
        """
        self._check_data_call("experimental_make_numpy_dataset", session=session)
        from aiodist._data.dataset import NumpyDataset

        return NumpyDataset(numpy_input)

    # The names of TensorFlow 1, each of which calls its successor.

    async def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Call `run`, with the next element of a plain or asynchronous iterator of per-replica values if there is one.

        Raises:
            StopAsyncIteration: the iterator is exhausted.
            TypeError: ``input_iterator`` is not an iterator.
            Exception: as `run`.
        """
        return await self.run(fn, () if input_iterator is None else (await _next(input_iterator),))

    async def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `run`, its current name."""
        return await self.run(fn, args, kwargs)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Call `experimental_local_results`, its current name."""
        return self.experimental_local_results(value)

    async def group(self, value: Any, name: str | None = None) -> None:
        """Await all awaitables in a nest of per-replica values, component by component; ``name`` has no effect.

        Raises:
            Exception: what an await raises.
        """
        arguments.checked_name(name)
        leaves = nests.flatten_with_none(list(self._components(value)))[0]
        for leaf in {id(leaf): leaf for leaf in leaves}.values():  # a plain value is in every component
            if inspect.isawaitable(leaf):
                await leaf

    def configure(
        self,
        session_config: Any = None,  # noqa: ARG002  (there are no sessions)
        cluster_spec: Mapping[str, Sequence[str]] | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Set which worker of a cluster this process is, for strategies over several workers.

        Args:
            session_config: ignored; there are no sessions.
            cluster_spec: the addresses of each job's tasks, by job name.
            task_type: this process's job.
            task_id: this process's index in the job.

        Raises:
            TypeError, ValueError: a setting has the wrong type; the settings contradict each other or the workers; the
                strategy is for one process.
        """
        settings = ClusterSettings.of(cluster_spec, task_type, task_id)
        if settings is not None:
            self._use_cluster(settings)

    def _use_cluster(self, settings: ClusterSettings) -> None:  # noqa: ARG002  (for workers)
        raise ValueError(f"{type(self).__name__} is for one process; MultiWorkerMirroredStrategy is for a cluster")

    def update_config_proto(self, config_proto: Mapping[str, Any]) -> dict[str, Any]:
        """Return a deep copy of a configuration with this strategy's devices and collective settings filled in.

        Raises:
            TypeError: ``config_proto`` is not a mapping.
        """
        if not isinstance(config_proto, Mapping):
            raise TypeError(f"update_config_proto expects a mapping of settings, got {config_proto!r}")
        extended = self._extended
        collectives = {"order_check": str(extended.order_check), **asdict(extended.communication_options)}
        return {**deepcopy(dict(config_proto)), "devices": list(extended.devices), "collectives": collectives}

    def colocate_vars_with(self, variable: Variable) -> AbstractContextManager[object]:
        """Call `StrategyExtended.colocate_vars_with`."""
        return self._extended.colocate_vars_with(variable)


# Data.


def _refuse_inside_replica() -> None:
    here = current.get()
    if isinstance(here, Participant) and strategy_in_force(here) is not None:
        raise ReplicaContextError(
            f"a distributed dataset was iterated inside replica {here.member.rank}; each of its batches is one step "
            "for all replicas: iterate outside, and pass the batch, "
            "`async for batch in dataset: await strategy.run(step, args=(batch,))`"
        )


def _called(fn: Any, name: str, context: InputContext | ValueContext) -> Any:
    """Return what a dataset or value function returns for a context."""
    if not callable(fn):
        raise TypeError(f"{name} must be a function of one {type(context).__name__}, got {fn!r}")
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"{name} must be a plain function, got the coroutine function {fn!r}")
    return fn(context)


async def _next(iterator: Any) -> Any:
    if hasattr(iterator, "__anext__"):
        return await anext(iterator)
    if not hasattr(iterator, "__next__"):
        raise TypeError(f"input_iterator must be an iterator, got {iterator!r}; write iter(dataset) or aiter(dataset)")
    try:
        return next(iterator)
    except StopIteration:  # which cannot pass through a coroutine
        raise StopAsyncIteration from None


class _DefaultStrategy(Strategy):
    def __init__(self) -> None:
        super().__init__(StrategyExtended(("CPU:0",)))
        self._replicas = Replicas(1, is_default=True)


class MirroredStrategy(Strategy):
    """Synchronous data parallelism on the devices of one machine: a replica for each device, all in one process.

    Args:
        devices: a device for each replica, e.g. ``["CPU:0", "CPU:1"]``, spelled as in TensorFlow, in any case; or a
            number n, for CPU:0 to CPU:n-1.
            ``CPU:k`` is a logical device and exists for every k. None: all GPUs, or CPU:0 without any.
        cross_device_ops: a hint, as in TensorFlow, e.g. ``HierarchicalCopyAllReduce()``; it never changes a result.
        communication_options: the options of every collective; they override ``cross_device_ops``.
        order_check: how call sites are compared: "call_site", the place of the call; "call_path", the places of all
            callers up to the replica's function, too; "signature", not at all.

    Raises:
        DeviceNotFoundError: this machine does not have a device.
        TypeError: an argument has the wrong type.
        ValueError: a device is misspelled or given twice, or ``order_check`` is unknown.
    """

    def __init__(
        self,
        devices: int | Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        order_check: str = "call_site",
    ) -> None:
        super().__init__(new_extended(devices, communication_options, order_check, cross_device_ops))


Strategy.__module__ = MirroredStrategy.__module__ = "aiodist"


# The strategy in force.

_default_strategy = functools.cache(_DefaultStrategy)
_default_context = functools.cache(lambda: ReplicaContext(_default_strategy(), 0))


def get_strategy() -> Strategy:
    """Return the strategy in force: the replica's, the scope's, or the default strategy."""
    here = current.get()
    return _default_strategy() if here is None else here.strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is in force."""
    return strategy_in_force(current.get()) is not None


def in_cross_replica_context() -> bool:
    """Return whether this is in a strategy's scope or in a merge function, and not in a replica."""
    return isinstance(current.get(), CrossReplica)


def get_replica_context() -> ReplicaContext:
    """Return this replica's context; None in cross-replica context; without a strategy, the default replica's.

    The return type omits None, so that replica functions need not check for it.
    """
    here = current.get()
    if isinstance(here, Participant):
        return context_of(here)
    return _default_context() if here is None else None  # type: ignore[return-value]


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter a strategy's cross-replica context permanently, in this thread or task and in the tasks that it starts.

    Args:
        strategy: the strategy; None for the default one.

    Raises:
        ReplicaContextError: called inside a replica, in a scope or in a merge function.
        TypeError: ``strategy`` has another type.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"expected a strategy or None, got {strategy!r}")
    here = current.get()
    if strategy_in_force(here) is not None:
        if isinstance(here, Participant):
            raise ReplicaContextError(f"a strategy cannot be set inside replica {here.replica.id}")
        if not here.lasting:
            raise ReplicaContextError(
                f"a strategy cannot be set in the scope or a merge function of {here.strategy!r}, whose end would undo "
                "it; leave that first"
            )
    if strategy is None or replicas_of(strategy).is_default:
        current.set(None)
    else:
        current.set(CrossReplica(strategy, replicas_of(strategy).local, lasting=True))
