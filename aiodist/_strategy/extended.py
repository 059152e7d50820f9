"""`StrategyExtended`: a strategy's devices and settings, and the methods that libraries use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import numpy as np
from anyio.lowlevel import checkpoint

from aiodist._arrays.device import framework_of
from aiodist._arrays.devices import resolve
from aiodist._arrays.host import Array, ArrayLike
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import DistributedValues, regroup, split
from aiodist._collectives.kinds import ALL_REDUCE
from aiodist._core.call import OrderCheck
from aiodist._runtime import arguments
from aiodist._runtime.current import current
from aiodist._runtime.participant import Participant
from aiodist._strategy.reductions import COPY, Operation, combine
from aiodist._strategy.scope import (
    HasReplicas,
    Scope,
    replicas_here,
    replicas_of,
    require_cross_replica,
    unless_default,
)
from aiodist._strategy.variable import Variable, check_equal, require_own, state_of, updated

# Cross-device ops by their TensorFlow names. In TensorFlow they choose an algorithm, and so the order of additions.
# Here every reduction is a left fold in replica-id order, so they are hints that never change a result.

CollectiveHints = CommunicationOptions


@dataclass(eq=False)  # a user's subclass may set attributes of its own
class CrossDeviceOps:
    """A hint at how to reduce values across devices; the base class of the named ones."""


@dataclass(eq=False)
class ReductionToOneDevice(CrossDeviceOps):
    """A hint by its TensorFlow name: reduce on one device, and copy the result to the others.

    Attributes:
        reduce_to_device: the device, or None.
        accumulation_fn: None; the reduce op determines how values are combined.

    Raises:
        ValueError: ``accumulation_fn`` is not None.
    """

    reduce_to_device: str | None = None
    accumulation_fn: None = None

    def __post_init__(self) -> None:
        if self.accumulation_fn is not None:
            raise ValueError(
                f"accumulation_fn must be None, because the reduce op combines values; got {self.accumulation_fn!r}"
            )


@dataclass(eq=False)
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """A hint by its TensorFlow name: reduce inside groups of devices, then across the groups.

    Attributes:
        num_packs: how many packs to put small values into.
    """

    num_packs: int = 1


class NcclAllReduce(HierarchicalCopyAllReduce):
    """A hint by its TensorFlow name; aiodist does not use NCCL. Arguments are those of `HierarchicalCopyAllReduce`."""


CrossDeviceOps.__module__ = ReductionToOneDevice.__module__ = "aiodist"
HierarchicalCopyAllReduce.__module__ = NcclAllReduce.__module__ = "aiodist"


class VariableComponent(ArrayLike):
    """A component of a variable in the function of an update. Assignments to it do not wait."""

    __slots__ = ("_components", "_replica_id", "variable")

    def __init__(self, variable: Variable, components: list[Array], replica_id: int) -> None:
        self.variable = variable
        self._components = components
        self._replica_id = replica_id

    def __repr__(self) -> str:
        return f"<component {self._replica_id} of {self.variable!r}>"

    def __getattr__(self, name: str) -> Any:  # name, shape, dtype and so on
        return getattr(self.variable, name)

    def read_value(self) -> Array:
        """Return the component, a read-only array."""
        return self._components[self._replica_id]

    def assign(self, value: Any, method: str = "assign") -> VariableComponent:
        """Assign to the component, as the variables' method of that name does."""
        new = state_of(self.variable).converted(value)
        self._components[self._replica_id] = updated(method, self.read_value(), new)
        return self

    assign_add = partialmethod(assign, method="assign_add")
    assign_sub = partialmethod(assign, method="assign_sub")


@dataclass(frozen=True)
class StrategyExtended:
    """A strategy's devices and settings, and the methods that libraries use.

    Awaited methods raise `ReplicaContextError` inside a replica, or under another strategy.

    Args:
        devices: one device for each replica; see `MirroredStrategy`.
        communication_options: the options of every collective; a call's own options override them.
        order_check: how call sites are compared; see `MirroredStrategy`.

    Raises:
        DeviceNotFoundError, TypeError, ValueError: as `MirroredStrategy`.
    """

    devices: tuple[str, ...]
    communication_options: CommunicationOptions = field(default_factory=CommunicationOptions)
    order_check: OrderCheck = OrderCheck.CALL_SITE
    _strategy: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(options := self.communication_options, CommunicationOptions):
            raise TypeError(f"communication_options must be CommunicationOptions, got {options!r}")
        object.__setattr__(self, "devices", resolve(self.devices))
        object.__setattr__(self, "order_check", OrderCheck.parse(self.order_check))

    def _required(self, what: str) -> Any:
        """Return the strategy, after checking that this is its cross-replica context."""
        if self._strategy is None:
            raise ValueError(f"{what} needs a strategy: pass this StrategyExtended to Strategy(extended) first")
        require_cross_replica(self._strategy, what)
        return self._strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that replicas run on, in replica order."""
        return self.devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold the components of variables, which are the replicas' devices."""
        return self.devices

    # Values.

    async def reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce a per-replica value over the replicas, onto devices.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name.
            value: a nest of per-replica values. MEAN, MIN and MAX return a plain value unchanged.
            destinations: a device, a sequence of devices, a distributed value or a variable.
            options: the options of the reduction; they override the strategy's.

        Returns:
            The reduced value for one destination; for several, a `Mirrored` with a component for each. Dtypes are those
            of `ReplicaContext.all_reduce`. Values on GPUs are reduced onto GPUs.

        Raises:
            Exception: as `Strategy.reduce`, and for devices as `MirroredStrategy`.
        """
        (result,) = await self._reduce("extended.reduce_to", reduce_op, [(value, destinations)], options)
        return result

    async def batch_reduce_to(
        self,
        reduce_op: Any,
        pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce each value of a pair onto its destinations, and return the results in a list; see `reduce_to`.

        Raises:
            Exception: as `reduce_to`.
        """
        results: list[Any] = await self._reduce("extended.batch_reduce_to", reduce_op, pairs, options)
        return results

    async def _reduce(self, what: str, reduce_op: Any, pairs: Any, options: Any) -> Any:
        strategy = self._required(what)
        chosen = self.communication_options.merge(arguments.options(options, None))
        operation = Operation(ALL_REDUCE, arguments.reduce_op(reduce_op), None, chosen.accumulate)
        found: list[Any] = list(pairs) if isinstance(pairs, Iterable) else [pairs]
        for pair in found:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"each of pairs must be a pair (value, destinations), got {pair!r}")
        goals = [_devices_of(destinations, self.devices) for _, destinations in found]
        return await combine(strategy, what, operation, [value for value, _ in found], goals)

    async def broadcast_to(self, value: Any, destinations: Any) -> Any:
        """Copy a value onto devices.

        Args:
            value: a nest of arrays and variables, the same for all devices; other leaves are passed on as they are.
            destinations: a device, a sequence of devices, a distributed value or a variable.

        Returns:
            A copy for one destination; for several, a `Mirrored` with a copy for each. Arrays are read-only.

        Raises:
            TypeError: the value is a per-replica value or a masked array.
            Exception: for destinations, as `reduce_to`.
        """
        strategy = self._required("extended.broadcast_to")
        goals = [_devices_of(destinations, self.devices)]
        (result,) = await combine(strategy, "extended.broadcast_to", COPY, [value], goals)
        return result

    async def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `Strategy.run`."""
        return await self._required("extended.call_for_each_replica").run(fn, args, kwargs)

    # Variables.

    async def update(
        self,
        variable: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call a function on each component of a variable, in cross-replica context: ``fn(component, *args)``.

        The component can be used as an array and has ``assign``, ``assign_add`` and ``assign_sub``, which do
        not wait. The variable changes once every call has returned, and not at all if one raises.

        Args:
            variable: a variable of this strategy.
            fn: a plain or coroutine function.
            args: a tuple or list of further arguments; each call gets its component of per-replica values in them.
            kwargs: keyword arguments, likewise.
            group: whether to return one regrouped value rather than a tuple.

        Returns:
            The calls' return values, regrouped like the results of `Strategy.run`; with ``group=False`` a tuple with an
            entry for each replica.

        Raises:
            ReplicaContextError: the variable belongs to another strategy.
            RuntimeError: the variable was assigned to in the meantime.
            TypeError: an argument has the wrong type.
            ValueError: the components of a mirrored variable would differ.
        """
        strategy = self._required("extended.update")
        require_own(self._variable(variable), strategy)
        if not callable(fn):
            raise TypeError(f"extended.update expects a function, got {fn!r}")
        arguments.check_iterated(fn, "extended.update")
        calls = split_arguments(args, kwargs, replicas_of(strategy).local)
        await checkpoint()
        state, workers = state_of(variable), replicas_of(strategy).several_workers
        state.settle()
        before = variable.values
        components, results = list(before), list[Any]()
        with Scope(strategy):
            for replica_id, (own_args, own_kwargs) in enumerate(calls):
                result = fn(VariableComponent(variable, components, replica_id), *own_args, **own_kwargs)
                results.append(await result if inspect.isawaitable(result) else result)
                arguments.check_awaited(results[-1], "result")
            if state.mirrored and workers is not None:
                await workers.compare_update(state, components)
            state.settle()
            if any(now is not then for now, then in zip(variable.values, before, strict=True)):
                raise RuntimeError(
                    f"the variable {variable.name!r} was assigned to while it was updated; in the function of an "
                    "update assign to the component that it is passed, and let other assignments wait"
                )
            if state.mirrored:
                check_equal(variable.name, components)
                components = components[:1] * len(components)
            state.put(components)
            return regroup(results, replicas=replicas_here(strategy)) if group else tuple(results)

    def value_container(self, value: Any) -> Any:
        """Return the variable that a component in an update belongs to; anything else unchanged."""
        return value.variable if isinstance(value, VariableComponent) else value

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Return whether a variable was created under this strategy.

        Raises:
            TypeError: ``variable`` is not a `Variable`.
        """
        return bool(state_of(self._variable(variable)).strategy is unless_default(self._strategy))

    def _variable(self, value: Any) -> Variable:
        variable = self.value_container(value)
        if not isinstance(variable, Variable):
            raise TypeError(f"expected an aiodist.Variable, got {variable!r}")
        return variable

    def colocate_vars_with(self, variable: Variable) -> AbstractContextManager[object]:
        """Return a context manager in which variables are created on the devices of another one.

        Every variable of a strategy is on all of its devices, so this is the strategy's scope. In the strategy's
        replicas it does nothing.

        Raises:
            ReplicaContextError: the variable belongs to another strategy; or, on entry, another strategy is in force.
            TypeError: ``variable`` is not a `Variable`.
        """
        require_own(self._variable(variable), self._strategy)
        here = current.get()
        in_replica = isinstance(here, Participant) and here.strategy is self._strategy
        return nullcontext() if in_replica or self._strategy is None else Scope(self._strategy)


def _devices_of(destinations: Any, replicas: tuple[str, ...]) -> tuple[str, ...]:
    """Return the devices of a destination, where ``replicas`` are the replicas' devices."""
    if isinstance(destinations, (DistributedValues, Variable)):
        if len(destinations.values) != len(replicas):
            raise ValueError(
                f"expected as destination a value with {len(replicas)} components, got {len(destinations.values)}"
            )
        return replicas
    if isinstance(destinations, str):
        return resolve([destinations])
    if len(replicas) == 1 and (isinstance(destinations, np.ndarray) or framework_of(destinations) is not None):
        return replicas
    if not isinstance(destinations, Sequence):
        raise TypeError(
            "destinations must be a device such as 'CPU:0', a sequence of devices, a distributed value or a variable, "
            f"got {destinations!r}"
        )
    return resolve(destinations)


def split_arguments(args: Any, kwargs: Any, size: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return each replica's arguments: its components of per-replica values, and everything else unchanged."""
    args, kwargs = arguments.call_arguments(args, kwargs)
    of_args, of_kwargs = ([split(value, size) for value in given] for given in (args, kwargs.values()))
    return [
        (tuple([each[i] for each in of_args]), dict(zip(kwargs, [each[i] for each in of_kwargs], strict=True)))
        for i in range(size)
    ]


def new_extended(devices: Any, options: Any, order_check: Any, ops: Any = None) -> StrategyExtended:
    """Return a `StrategyExtended` for a strategy's arguments."""
    if ops is not None and not isinstance(ops, CrossDeviceOps):
        raise TypeError(
            f"cross_device_ops must be CrossDeviceOps or None, got {ops!r}; e.g. aiodist.HierarchicalCopyAllReduce()"
        )
    return StrategyExtended(devices, CommunicationOptions() if options is None else options, order_check)


def bind(extended: StrategyExtended, strategy: HasReplicas) -> None:
    """Bind a `StrategyExtended` to a new strategy."""
    known = extended._strategy  # noqa: SLF001  (declared above, for this module alone)
    if known is not None:
        raise ValueError(f"this StrategyExtended already belongs to {known!r}; each strategy needs its own")
    object.__setattr__(extended, "_strategy", strategy)
