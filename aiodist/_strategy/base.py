"""Strategies: the replicas of a program, and how to run a function on all of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import DistributedValues, check_awaited, regroup, select_replica
from aiodist._core.recorder import RecordedRuns, Recorder
from aiodist._runtime import requests as arguments
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.scheduler import Call, Run, new_standing_run, run_replicas
from aiodist._strategy import creation
from aiodist._strategy.data import DataMethods
from aiodist._strategy.extended import StrategyExtended, bind
from aiodist._strategy.operands import gathering, reduction
from aiodist._strategy.reductions import combine
from aiodist._strategy.scope import Replicas, Scope, components_here, replicas_here, require_cross_replica
from aiodist._strategy.v1 import ClusterSettings, V1Strategy
from aiodist._strategy.variable import as_distributed
from aiodist._strategy.warmup import compile_kernels


class Strategy(DataMethods, V1Strategy):
    """A set of replicas that work in step; the base class of `MirroredStrategy`.

    The default strategy, which is in force where no other is, has one replica, on CPU:0.

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

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas work in step."""
        return len(self._extended.devices)

    def __copy__(self) -> NoReturn:
        """Refuse: two strategies would have one set of replicas and variables."""
        self._refuse_copies()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse_copies()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copies()

    def _refuse_copies(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: variables, contexts and runs belong to this very "
            "one. Pass it on, or make another strategy of the same devices, extended.worker_devices"
        )

    @property
    def extended(self) -> StrategyExtended:
        """The strategy's devices and settings."""
        return self._extended

    @property
    def recorder(self) -> Recorder:
        """The last collectives of every replica, for the runs in progress and the last one that ended."""
        return self._recorder

    @property
    def cluster_resolver(self) -> ClusterSettings | None:
        """The cluster that the strategy spans; None for one process."""
        return None

    def scope(self) -> Scope[Self]:
        """Return a context manager that enters this strategy's cross-replica context, and gives the strategy.

        It may be entered again. The default strategy's scope does nothing.

        Raises (when entered):
            ReplicaContextError: this is inside a replica, or in another strategy's scope.
        """
        return Scope(self)

    async def run(
        self,
        fn: Callable[..., Awaitable[Any] | Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Run a function on every replica, each in a task of its own, and wait for all of them.

        Args:
            fn: a coroutine function, or a plain function, which runs without interruption.
            args: a tuple or list of positional arguments. Of per-replica values in them, at any depth, each replica
                gets its component; everything else is passed unchanged.
            kwargs: keyword arguments, likewise.
            options: the options of this run's collectives; they override the strategy's.

        Returns:
            What the replicas returned, regrouped leaf by leaf. Arrays, numbers, bools, strings and bytes become
            `PerReplica`, whatever their values. None, or any other object, is returned bare where all replicas returned
            the identical one. With one replica its own value is returned.

        Raises:
            CollectiveError: the replicas disagree, or a collective can never be complete.
            ExceptionGroup: several replicas raised exceptions of several types.
            ReplicaContextError: called inside a replica, or under another strategy.
            TypeError: ``args`` is neither a tuple nor a list, ``kwargs`` is not a mapping, or ``fn`` is not callable.
            ValueError: a per-replica value has another number of components; the replicas returned nests of
                different structure, which the error has in ``.values``, or created different numbers of variables.
            Exception: what a replica raised, with a note that names the replica.
        """
        calls = self._calls(fn, args, kwargs)
        run = self._new_run(arguments.options(options, None))
        return await self._run_calls(run, calls)

    def _new_run(self, options: CommunicationOptions | None = None) -> Run:
        extended = self._extended
        return Run(self, extended.devices, extended.order_check, extended.communication_options.merge(options))

    async def _run_calls(self, run: Run, calls: Sequence[Call]) -> Any:
        self._runs.begin(run.ledger, run.devices)
        try:
            results = await run_replicas(run, calls)
        finally:
            self._runs.end(run.ledger, run.devices)
        members = run.ledger.root.members
        creation.check_complete(members)
        return regroup(results, replicas=[member.replica_id for member in members])

    def _calls(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Call]:
        """Return the call that each replica of this process makes in a run."""
        require_cross_replica(self, "strategy.run")
        if not callable(fn):
            raise TypeError(f"strategy.run expects a function, got {fn!r}{arguments.uncalled(fn)}")
        if inspect.isasyncgenfunction(fn) or inspect.isasyncgenfunction(type(fn).__call__):
            raise TypeError(
                f"strategy.run expects a function that returns its result, got the async generator function {fn!r}, "
                "which nobody would iterate; is `return` missing where it says `yield`?"
            )
        args, kwargs = arguments.call_arguments(args, kwargs)
        return [(fn, *self._select(place, args, kwargs)) for place in range(self._replicas.local)]

    def _select(
        self, replica_id: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        size = self._replicas.local
        return (
            tuple(select_replica(replica_id, value, size) for value in args),
            {name: select_replica(replica_id, value, size) for name, value in kwargs.items()},
        )

    async def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduce a per-replica value over the replicas and, optionally, along axes.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name.
            value: a nest of per-replica values, as `run` returns them. MEAN, MIN and MAX return a plain value as it
                is.
            axis: None, or an axis or a tuple of axes to reduce along, too. Sizes along them may differ between
                replicas; MEAN divides by the true number of elements.

        Returns:
            A nest of reduced values, with the dtypes of `ReplicaContext.all_reduce`; arrays are read-only. Values on
            GPUs become arrays of the same framework, on the GPU of replica 0's component; with an ``axis`` they go
            through the host.

        Raises:
            ReplicaContextError: called inside a replica, or under another strategy.
            TypeError: the op does not take a dtype.
            ValueError: an unknown op; different shapes or dtypes; an axis out of range; a plain value with SUM or
                PRODUCT on several replicas.
        """
        require_cross_replica(self, "strategy.reduce")
        op = arguments.reduce_op(reduce_op, value)
        arguments.check_not_all_none(value, 3)
        accumulate = self._extended.communication_options.accumulate
        operation = reduction(op, axis, replicas_here(self), accumulate)
        (result,) = await combine(operation, [value], self._extended.devices)
        return result

    async def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the components of a per-replica value along an axis, in replica order.

        Args:
            value: a nest of per-replica arrays of equal dtype; their sizes along ``axis`` may differ.
            axis: the axis to concatenate along; a negative one counts from the end.

        Returns:
            A nest of read-only arrays; leaves that are not per-replica values are returned unchanged. Arrays on GPUs
            become arrays of the same framework, on the GPU of replica 0's component.

        Raises:
            ReplicaContextError: called inside a replica, or under another strategy.
            TypeError: a component is not an array.
            ValueError: the axis is out of range, or the components differ in more than their size along it.
        """
        require_cross_replica(self, "strategy.gather")
        arguments.check_not_all_none(value, 3)
        (result,) = await combine(gathering(axis, replicas_here(self)), [value], self._extended.devices)
        return result

    async def warmup(self, *specs: Any) -> None:
        """Compile the kernels that reductions will need, in a worker thread.

        Otherwise the first large reduction waits for its kernel, which takes some hundredths of a second. Small values
        need none. Results have the same bits in any case. For replicas on GPUs, the GPU kernels are compiled.

        Args:
            *specs: nests like those that will be reduced with SUM or MEAN; only their dtypes matter. Without any,
                kernels for float32 and float64 are compiled.

        Raises:
            ImportError: the compiler for the replicas' kind of device is not installed.
            TypeError: a leaf has no dtype, or one that cannot be summed.
        """
        options = self._extended.communication_options
        await compile_kernels(specs, self._extended.devices, options.accumulate)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a nest of per-replica values: a tuple with a nest for each replica.

        A plain value is repeated. Over several workers the tuple has this worker's components.

        Raises:
            TypeError: the value holds a coroutine, as `run` returns it: `await` is missing.
            ValueError: the number of a per-replica value's components is not the number of replicas.
        """
        check_awaited(value, "value")
        return self._components(value)

    def _components(self, value: Any) -> tuple[Any, ...]:
        value = as_distributed(value)
        size = components_here(self)
        if isinstance(value, DistributedValues) and len(value.values) == size:
            return value.values
        return tuple(select_replica(replica_id, value, size) for replica_id in range(size))

    def _new_standing_run(self) -> Run:
        return new_standing_run(self._new_run())


class _DefaultStrategy(Strategy):
    def __init__(self) -> None:
        super().__init__(StrategyExtended(("CPU:0",)))
        self._replicas = Replicas(1, is_default=True)


@functools.cache
def default_strategy() -> Strategy:
    """Return the strategy that is in force where no other is: one replica, on CPU:0."""
    return _DefaultStrategy()


@functools.cache
def default_replica_context() -> ReplicaContext:
    """Return the context of the default strategy's replica."""
    return ReplicaContext(default_strategy(), 0)


Strategy.__module__ = "aiodist"
