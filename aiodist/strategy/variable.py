"""Variables: state with one component for each replica, kept the same on all of them, or brought together on reading.

Components are arrays that never change: an assignment puts others in their place. So a value that was read stays what
it was, whatever is assigned later, by whichever replica.

What replicas assign to a mirrored variable meets in a collective like any other, of a kind that belongs to the variable
and the method (`Kind`): calls for two variables never combine, and a report names the variable. Below this file nobody
knows of variables.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from sys import _getframe
from types import FrameType
from typing import Any, Self

import numpy as np

from aiodist.collective.kinds import Kind
from aiodist.collective.signature import Signature
from aiodist.replica import arguments, refusal
from aiodist.replica.context import ReplicaContext
from aiodist.replica.current import CrossReplica, current
from aiodist.strategy import aggregation as aggregating
from aiodist.strategy.conversion import converted, frozen_copy, initial_array
from aiodist.strategy.creation import Creations, Site, Spec, creations_of
from aiodist.strategy.variable_enums import VariableAggregation, VariableSynchronization
from aiodist.vocabulary.arraylike import Array, ArrayLike
from aiodist.vocabulary.errors import ReplicaContextError
from aiodist.vocabulary.reports import Reason
from aiodist.vocabulary.values import DistributedValues, Mirrored, PerReplica
from aiodist_kernels import Accumulate


class Variable(ArrayLike):
    """State of a strategy, with one component for each replica. It reads as an array, and is an operand like one.

    A **mirrored** variable (``synchronization`` "auto" or "on_write") has the same value on every replica. A
    **sync-on-read** one ("on_read") has a value on each, and ``aggregation`` makes one of them when it is read.

    A read in a replica gives its own component; elsewhere it gives the aggregate. An assignment in a replica is
    awaited, elsewhere it is not::

        await variable.assign_add(x)      # in a replica; for a mirrored variable all replicas meet in it, and what
                                          # they assign is aggregated
        variable.assign_add(x)            # anywhere else

    Created under a scope it belongs to that strategy, outside any to the default strategy, with one component. Created
    in a replica function it is made once, with replica 0's initial value; every replica creates the same variables in
    the same order, and gets the identical object.

    Args:
        initial_value: an array or number, or a function that returns one. It is copied.
        trainable: whether an optimiser should change it; None: yes, unless it is sync-on-read.
        name: what errors and reports call it; None: "Variable". Where several places of a replica function are to
            create one variable, it stands in for the place.
        dtype: of its components; None: that of ``np.asarray(initial_value)``.
        synchronization: a `VariableSynchronization`, or its name.
        aggregation: a `VariableAggregation`, or its name.

    Raises:
        ReplicaContextError: created in a replica's worker thread.
        TypeError: the initial value is no array of numbers, or does not fit ``dtype``.
        ValueError: an unknown synchronization or aggregation, or synchronization NONE; MEAN of integers; a trainable
            variable that is sync-on-read; the replicas create different variables.
    """

    __slots__ = ("__weakref__", "_components", "_kinds", "_spec", "_strategy")
    _components: list[Array]
    _kinds: dict[str, Kind]
    _spec: Spec
    _strategy: Any  # None: the default one

    # Another replica may already have made what this call creates: so it is made here, and not in __init__.
    def __new__(
        cls,
        initial_value: Any,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | str = "auto",
        aggregation: VariableAggregation | str = "none",
    ) -> Self:
        """Return the variable, which another replica may have made already."""
        arguments.check_name(name)
        value = initial_array(initial_value() if callable(initial_value) else initial_value, dtype)
        how, combined = _synchronization(synchronization), VariableAggregation(aggregation)
        aggregating.check(combined, value.dtype)
        spec = Spec(name or "Variable", value.shape, value.dtype, _trainable(trainable, how), how, combined)
        here = current.get()
        if not isinstance(here, ReplicaContext):
            size = 1 if here is None else here.strategy.num_replicas_in_sync
            return cls._made(spec, _owner(here), [value] * size)
        refusal.check_current(here, "Variable(…)")
        here = here._of_run
        if here.num_replicas_in_sync == 1:
            return cls._made(spec, _owner(here), [value])
        frame = _getframe(1)
        site = Site(here.replica_id_in_sync_group, frame.f_code, frame.f_lasti, name is not None)
        return cls._in_replica(here, spec, value, site)

    @classmethod
    def _in_replica(cls, here: ReplicaContext, spec: Spec, value: Array, site: Site) -> Self:
        creations: Creations = creations_of(here._member.group)
        variable: Any = creations.known(here._member.group, spec, site)
        if variable is None:
            variable = cls._made(spec, _owner(here), [])
        if site.replica_id == 0:
            variable._put([value] * here.num_replicas_in_sync)
        creations.add(variable, site)
        made: Self = variable
        return made

    @classmethod
    def _made(cls, spec: Spec, strategy: Any, components: Sequence[Array]) -> Self:
        variable = super().__new__(cls)
        variable._spec = spec
        variable._strategy = strategy
        variable._kinds = {}
        variable._put(components)
        return variable

    def _put(self, components: Sequence[Array]) -> None:
        """Set the components, each to a copy of its own."""
        self._components = [frozen_copy(component) for component in components]

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        how = "mirrored" if self._mirrored else "sync-on-read"
        return f"<Variable {self.name!r}: {self.dtype.name}[{shape}], {how}, aggregation {self.aggregation.name}>"

    @property
    def name(self) -> str:
        """What it is called."""
        return self._spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each component."""
        return self._spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of each component."""
        return self._spec.dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimiser should change it."""
        return self._spec.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When its components are brought together: ON_WRITE or ON_READ."""
        return self._spec.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How what replicas assign, or its components, become one."""
        return self._spec.aggregation

    @property
    def values(self) -> tuple[Array, ...]:
        """The components, read-only arrays, in replica-id order."""
        return tuple(self._present())

    @property
    def _mirrored(self) -> bool:
        return self._spec.synchronization is VariableSynchronization.ON_WRITE

    def _present(self) -> list[Array]:
        if not self._components:
            raise ReplicaContextError(
                f"the variable {self.name!r} gets replica 0's initial value, and replica 0 has not created it yet; "
                "wait for it, e.g. with `await ctx.barrier()`, before the variable is used"
            )
        return self._components

    # Reading.

    def read_value(self) -> Array:
        """Return the value: in a replica its own component, elsewhere the aggregate; a read-only array.

        Raises:
            ReplicaContextError: replica 0, whose initial value it gets, has not created it yet.
            ValueError: it belongs to another strategy than the replica; or it is sync-on-read with aggregation NONE,
                and read outside a replica.
        """
        components = self._present()
        if self._strategy is None:
            return components[0]
        context = self._replica("read")
        if context is not None:
            return components[context.replica_id_in_sync_group]
        return components[0] if self._mirrored or len(components) == 1 else self._aggregate(components)

    def _aggregate(self, components: Sequence[Array]) -> Array:
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"the sync-on-read variable {self.name!r} has aggregation NONE, so outside a replica it has no one "
                "value; read it in a replica, look at variable.values, or give it an aggregation"
            )
        return frozen_copy(aggregating.aggregate(self.aggregation, components, self.name))

    def _replica(self, verb: str) -> ReplicaContext | None:
        """Return the context of the replica that this is in; None outside.

        Raises:
            ValueError: it is a replica of another strategy.
        """
        here = current.get()
        if not isinstance(here, ReplicaContext):
            return None
        if _owner(here) is not self._strategy:
            raise ValueError(f"{self._whose()} and cannot be {verb} in a replica of {here.strategy!r}")
        return here._of_run

    def _whose(self) -> str:
        owner = "the default strategy" if self._strategy is None else repr(self._strategy)
        return f"the variable {self.name!r} was created under {owner}"

    # Assigning.

    def assign(self, value: Any, *, name: str | None = None) -> Any:
        """Give the variable another value.

        In a replica the call returns an awaitable, whose await gives the variable. For a mirrored variable it is a
        collective: what the replicas assign is aggregated, and with aggregation NONE must be equal. For a sync-on-read
        variable it changes the replica's own component at once.

        Elsewhere the call applies at once and returns the variable. A sync-on-read variable of aggregation SUM gets
        components that add up to the value; a per-replica value is what replicas would have assigned.

        Args:
            value: an array or number of the variable's shape; nothing is broadcast.
            name: stands in for the call site of the collective.

        Raises:
            CollectiveError: (at the await) the replicas did not meet in the assignment.
            ReplicaContextError: called in a replica's worker thread.
            TypeError: the value does not fit the variable's dtype.
            ValueError: another shape; another strategy's variable; aggregation NONE and different values.
        """
        return self._assign("assign", value, name, _getframe(1))

    def assign_add(self, value: Any, *, name: str | None = None) -> Any:
        """Add a value, as `assign` gives one: to a mirrored variable, what the replicas' values are aggregated to.

        Args:
            value: an array or number of the variable's shape.
            name: stands in for the call site of the collective.

        Raises:
            ValueError: as `assign`; and outside a replica, for a sync-on-read variable of aggregation SUM, where it
                cannot be told whether the value counts once or for each replica.
            CollectiveError, ReplicaContextError, TypeError: as `assign`.
        """
        return self._assign("assign_add", value, name, _getframe(1))

    def assign_sub(self, value: Any, *, name: str | None = None) -> Any:
        """Subtract a value; see `assign_add`."""
        return self._assign("assign_sub", value, name, _getframe(1))

    def _assign(self, method: str, value: Any, name: str | None, frame: FrameType) -> Any:
        arguments.check_name(name)
        context = self._replica("assigned to")
        if context is None:
            self._assign_across(method, value)
            return self
        refusal.check_current(context, f"variable.{method}")
        array = self._converted(value)
        if self._mirrored:
            reduce_op, path = self.aggregation.reduce_op, context._path(frame, name)
            signature = (self._kind(method), reduce_op, None, name, None, self.shape, self.dtype, None, path)
            return context._issue(frame, signature, array)
        self._update_component(context.replica_id_in_sync_group, method, array)
        return _Applied(self)

    def _kind(self, method: str) -> Kind:
        """Return this variable's own kind of collective for that method."""
        if method not in self._kinds:
            self._kinds[method] = Kind(f"{self.name}.{method}", Reason.AXIS, partial(self._meet, method))
        return self._kinds[method]

    def _meet(self, method: str, _: Signature, values: Sequence[Array], accumulate: Accumulate) -> Variable:
        """Apply what the replicas assign: all of them have arrived."""
        self._update_all(method, [aggregating.aggregate(self.aggregation, values, self.name, accumulate)])
        return self

    def _assign_across(self, method: str, value: Any) -> None:
        """Assign outside replicas."""
        here = current.get()
        if isinstance(here, CrossReplica) and self._strategy not in (None, here.strategy):
            raise ValueError(f"{self._whose()} and cannot be assigned to under {here.strategy!r}")
        size = len(self._present())
        if isinstance(value, DistributedValues):
            values = [self._converted(component) for component in self._matching(value, size)]
        else:
            values = [self._converted(value)]
        if self._mirrored:
            self._update_all(method, [aggregating.aggregate(self.aggregation, values, self.name)])
        else:
            self._update_all(method, self._components_of(method, values, size))

    def _components_of(self, method: str, values: list[Array], size: int) -> list[Array]:
        """Return what each component of a sync-on-read variable gets of a value that is assigned from outside."""
        if self.aggregation is VariableAggregation.SUM and method != "assign":
            raise ValueError(
                f"{method} outside a replica is not for the sync-on-read variable {self.name!r}, whose aggregation is "
                f"SUM: each component would change by the value, and their sum by {size} times as much. "
                f"Call {method} in a replica, or assign(variable.read_value() ± value)"
            )
        if len(values) == size or method != "assign":
            return values
        return aggregating.parts(self.aggregation, values[0], size)

    def _matching(self, value: DistributedValues[Any], size: int) -> tuple[Any, ...]:
        if len(value.values) != size:
            raise ValueError(
                f"the variable {self.name!r} has {size} components, one for each replica, got a "
                f"{type(value).__name__} with {len(value.values)}"
            )
        return value.values

    def _converted(self, value: Any) -> Array:
        return converted(value, self.shape, self.dtype, self.name)

    def _update_all(self, method: str, values: Sequence[Array]) -> None:
        """Update every component by its value, or by the one value that there is."""
        update: Callable[[Array, Array], Array] = aggregating.UPDATES[method]
        old = self._present()
        each = list(values) * len(old) if len(values) == 1 else values
        self._put([update(*pair) for pair in zip(old, each, strict=True)])

    def _update_component(self, replica_id: int, method: str, value: Array) -> None:
        components = self._present()
        components[replica_id] = frozen_copy(aggregating.UPDATES[method](components[replica_id], value))


class _Applied:
    """An assignment that no other replica takes part in: applied by the call, awaited like the others."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def __await__(self) -> Generator[Any, Any, Variable]:
        yield from ()
        return self._variable


def _owner(here: ReplicaContext | CrossReplica | None) -> Any:
    """Return the strategy whose variables are at home here; None for the default one."""
    return None if here is None or here.strategy._is_default else here.strategy


def _synchronization(value: Any) -> VariableSynchronization:
    """Return ON_WRITE or ON_READ.

    Raises:
        ValueError: it is NONE, or no synchronization.
    """
    how = VariableSynchronization(value)
    if how is VariableSynchronization.NONE:
        raise ValueError("synchronization NONE is for variables of no strategy; use 'auto', 'on_write' or 'on_read'")
    return VariableSynchronization.ON_WRITE if how is VariableSynchronization.AUTO else how


def _trainable(value: bool | None, how: VariableSynchronization) -> bool:
    on_read = how is VariableSynchronization.ON_READ
    if on_read and value:
        raise ValueError("a sync-on-read variable is not trainable: leave trainable out, or use 'on_write'")
    return not on_read if value is None else bool(value)


def as_distributed(leaf: Any) -> Any:
    """Return a variable's components as a mirrored or per-replica value; anything else as it is."""
    if not isinstance(leaf, Variable):
        return leaf
    return Mirrored(leaf.values) if leaf._mirrored else PerReplica(leaf.values)


Variable.__module__ = "aiodist"
