"""StrategyExtended: a strategy's devices and settings, and the methods that libraries use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from anyio.lowlevel import checkpoint

from aiodist._arrays import nests
from aiodist._arrays.devices import resolve
from aiodist._arrays.host import host_type_of
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.slices import IndexedSlices
from aiodist._arrays.values import DistributedValues, regroup
from aiodist._collectives.host import packs
from aiodist._collectives.kinds import ALL_REDUCE, BROADCAST
from aiodist._core.call import OrderCheck
from aiodist._runtime import requests as arguments
from aiodist._strategy import across, cross_device_ops
from aiodist._strategy.conversion import frozen_copy
from aiodist._strategy.destinations import devices_of, placed
from aiodist._strategy.off_loop import call_off_loop, nbytes
from aiodist._strategy.on_devices import OnDevices, to_copy, to_reduce
from aiodist._strategy.scope import replicas_here, require_cross_replica
from aiodist._strategy.update import Update, VariableComponent, update_of
from aiodist._strategy.variable import Variable
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.arguments import check_unmasked

if TYPE_CHECKING:
    from aiodist._strategy.base import Strategy
    from aiodist._strategy.cross_device_ops import CrossDeviceOps


@dataclass(frozen=True)
class StrategyExtended:
    """A strategy's devices and settings, and the methods that libraries use.

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
    _strategy: Strategy | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        options: Any = self.communication_options
        if not isinstance(options, CommunicationOptions):
            raise TypeError(f"communication_options must be CommunicationOptions, got {options!r}")
        object.__setattr__(self, "devices", resolve(self.devices))
        object.__setattr__(self, "order_check", OrderCheck.parse(self.order_check))

    @classmethod
    def on(
        cls,
        devices: Sequence[str] | None,
        options: CommunicationOptions | None,
        order_check: str,
        ops: CrossDeviceOps | None = None,
    ) -> StrategyExtended:
        """Return the `StrategyExtended` for arguments that a user gives to a strategy.

        Raises:
            TypeError, ValueError, DeviceNotFoundError: as `MirroredStrategy`.
        """
        if options is not None and not isinstance(options, CommunicationOptions):
            raise TypeError(f"communication_options must be CommunicationOptions or None, got {options!r}")
        hinted = cross_device_ops.check(ops)
        return cls(resolve(devices), hinted.merge(options), OrderCheck.parse(order_check))

    def _bind(self, strategy: Strategy) -> None:
        if self._strategy is not None:
            raise ValueError(f"this StrategyExtended is that of {self._strategy!r} already; each strategy has its own")
        object.__setattr__(self, "_strategy", strategy)

    def _required(self, what: str) -> Strategy:
        """Return the strategy, and check that this is in its cross-replica context.

        Raises:
            ReplicaContextError: it is not.
            ValueError: there is no strategy.
        """
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
            options: how to carry it out.

        Returns:
            The reduced value for one destination; for several a `Mirrored` with a component for each. Dtypes are those
            of `ReplicaContext.all_reduce`. Values on GPUs are reduced onto GPUs.

        Raises:
            ReplicaContextError: called inside a replica, or under another strategy.
            TypeError: the op does not take a dtype, or ``destinations`` has the wrong type.
            ValueError: an unknown op; different shapes or dtypes; a plain value with SUM or PRODUCT on several
                replicas; a device that is misspelled or given twice.
            DeviceNotFoundError: this machine does not have a device.
        """
        (result,) = await self._reduce("extended.reduce_to", reduce_op, [(value, destinations)], options)
        return result

    async def batch_reduce_to(
        self,
        reduce_op: Any,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values, each onto its destinations; see `reduce_to`.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name.
            value_destination_pairs: pairs of a value and its destinations.
            options: how to carry it out.

        Returns:
            A list of the results, in the order of the pairs.

        Raises:
            ReplicaContextError, TypeError, ValueError, DeviceNotFoundError: as `reduce_to`.
        """
        return await self._reduce("extended.batch_reduce_to", reduce_op, value_destination_pairs, options)

    async def _reduce(self, what: str, reduce_op: Any, pairs: Iterable[tuple[Any, Any]], options: Any) -> list[Any]:
        strategy = self._required(what)
        replicas = replicas_here(strategy)
        op = arguments.reduce_op(reduce_op)
        chosen = self.communication_options.merge(arguments.options(options, None))
        targets = [(value, devices_of(destinations, self.devices)) for value, destinations in pairs_of(pairs)]
        there = OnDevices(strategy, [value for value, _ in targets])
        values = there.on_host
        results: list[Any] = []
        for pack in packs([*map(nbytes, values)], chosen.bytes_per_pack):
            some = [values[place] for place in pack]
            results += await call_off_loop(some, partial(_reduced, op, some, replicas, chosen.accumulate))
        destinations = [devices for _, devices in targets]
        results = [placed(result, devices) for result, devices in zip(results, destinations, strict=True)]
        reduced, accumulate = to_reduce(op, replicas), chosen.accumulate
        return await there.join(results, ALL_REDUCE, reduced, op=op, accumulate=accumulate, destinations=destinations)

    async def broadcast_to(self, value: Any, destinations: Any) -> Any:
        """Copy a value onto devices.

        Args:
            value: a nest of arrays, numbers and variables, the same for all devices.
            destinations: a device, a sequence of devices, a distributed value or a variable.

        Returns:
            A copy for one destination; for several a `Mirrored` with a copy for each. Arrays are read-only.

        Raises:
            ReplicaContextError: called inside a replica, or under another strategy.
            TypeError: the value is a per-replica value or a masked array.
            ValueError, DeviceNotFoundError: for destinations, as `reduce_to`.
        """
        there = OnDevices(self._required("extended.broadcast_to"), [value])
        devices = devices_of(destinations, self.devices)
        await checkpoint()
        results = [placed(nests.map_leaves(_copy, there.on_host[0]), devices)]
        (result,) = await there.join(results, BROADCAST, to_copy, destinations=[devices])
        return result

    async def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function on every replica, as `Strategy.run` does.

        Raises:
            Exception: as `Strategy.run`.
        """
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

        The component can be used as an array and has ``assign``, ``assign_add`` and ``assign_sub``, which are not
        awaited. The variable changes once every call has returned, and not at all if one raises.

        Args:
            variable: a variable of this strategy.
            fn: a plain or coroutine function.
            args: a tuple or list of further arguments; of per-replica values in them each call gets its component.
            kwargs: keyword arguments, likewise.
            group: whether to return one regrouped value rather than a tuple.

        Returns:
            What the calls returned, regrouped as the results of `Strategy.run` are; with ``group=False`` a tuple with
            an entry for each replica.

        Raises:
            ReplicaContextError: called inside a replica, or under another strategy.
            RuntimeError: the variable was assigned to in the meantime.
            TypeError: an argument has the wrong type.
            ValueError: the variable belongs to another strategy, or the components of a mirrored variable would differ.
        """
        self._required("extended.update")
        update = await self._update(partial(self._new_update, variable, fn, args, kwargs), variable)
        results = update.apply(variable)
        return regroup(results, replicas=replicas_here(variable._strategy)) if group else tuple(results)

    async def _update(self, make: Callable[[], Awaitable[Update]], variable: Any) -> Update:  # noqa: ARG002  (for workers)
        return await make()

    async def _new_update(self, variable: Any, fn: Any, args: Any, kwargs: Any) -> Update:
        self._check_own(variable)
        if not callable(fn):
            raise TypeError(f"extended.update expects a function, got {fn!r}")
        args, kwargs = arguments.call_arguments(args, kwargs)
        await checkpoint()
        return await update_of(variable, fn, args, kwargs)

    def value_container(self, value: Any) -> Any:
        """Return the variable that a component in an update belongs to; anything else unchanged."""
        return value._variable if isinstance(value, VariableComponent) else value

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Return whether a variable was created under this strategy.

        Raises:
            TypeError: ``variable`` is not a `Variable`.
        """
        variable = self.value_container(variable)
        if not isinstance(variable, Variable):
            raise TypeError(f"expected an aiodist.Variable, got {variable!r}")
        owner = None if self._strategy is None or self._strategy._is_default else self._strategy
        return variable._strategy is owner

    def colocate_vars_with(self, variable: Variable) -> AbstractContextManager[None]:
        """Return a context manager in which variables are created on the devices of another one.

        Every variable of a strategy is on all of its devices, so this only checks the variable.

        Raises:
            TypeError: ``variable`` is not a `Variable`.
            ValueError: it belongs to another strategy.
        """
        self._check_own(variable)
        return nullcontext()

    def _check_own(self, variable: Any) -> None:
        if not self.variable_created_in_scope(variable):
            raise ValueError(f"{variable!r} was not created under {self._strategy!r}; create it in its scope()")


def pairs_of(given: Any) -> list[tuple[Any, Any]]:
    """Return pairs of a value and its destinations.

    Raises:
        TypeError: ``given`` has another form.
    """
    alone = isinstance(given, (DistributedValues, Variable)) or not isinstance(given, Iterable)
    pairs: list[Any] = [given] if alone else list(given)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"value_destination_pairs must be pairs (value, destinations), got {pair!r}")
    return pairs


def _reduced(op: ReduceOp, values: Sequence[Any], replicas: Sequence[int], accumulate: Accumulate) -> list[Any]:
    return [across.reduce_nest(op, value, None, replicas, accumulate) for value in values]


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, DistributedValues):
        raise TypeError(across.one_for_all(leaf))
    if isinstance(leaf, IndexedSlices):
        return IndexedSlices(frozen_copy(leaf.values), frozen_copy(leaf.indices), leaf.dense_shape)
    if isinstance(leaf, Variable):
        leaf = leaf.read_value()
    check_unmasked(leaf, "to be copied")
    foreign = host_type_of(leaf)
    if foreign is not None:
        return foreign.give(foreign.view(leaf).copy(order="K"))
    return frozen_copy(leaf) if isinstance(leaf, np.ndarray) else leaf
