"""Variables: state with one component for each replica, kept the same on all of them, or brought together on reading.

Components are arrays that never change: an assignment puts others in their place. So a value that was read stays what
it was, whatever is assigned later, by whichever replica, and the replicas of a mirrored variable share one array.

Below this floor nobody knows of variables: a collective takes one as the array that it reads as (`ArrayLike`).
"""

from __future__ import annotations

from collections.abc import Generator
from sys import _getframe
from types import FrameType
from typing import Any, NoReturn, Self

import numpy as np

from aiodist._arrays.host import Array, ArrayLike
from aiodist._arrays.values import Mirrored, PerReplica
from aiodist._core.errors import ReplicaContextError
from aiodist._runtime import requests as arguments
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.current import CrossReplica, current
from aiodist._strategy import aggregation as aggregating
from aiodist._strategy.aggregation import VariableAggregation, VariableSynchronization, initial_array
from aiodist._strategy.creation import Site, Spec, creations_of
from aiodist._strategy.state import State


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
        TypeError: the initial value is no array of numbers, or does not fit ``dtype``; SUM or MEAN of bool.
        ValueError: an unknown synchronization or aggregation, or synchronization NONE; MEAN of integers; a trainable
            variable that is sync-on-read; the replicas create different variables.
    """

    __slots__ = ("__weakref__", "state")
    state: State  # for other modules of this package

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
        name = arguments.checked_name(name)
        value = initial_array(initial_value() if callable(initial_value) else initial_value, dtype)
        how, combined = _synchronization(synchronization), VariableAggregation(aggregation)
        aggregating.check(combined, value.dtype)
        spec = Spec(name or "Variable", value.shape, value.dtype, _trainable(trainable, how), how, combined)
        here = current.get()
        strategy = _owner(here)
        if not isinstance(here, ReplicaContext):
            if strategy is not None and strategy.sharing is not None:
                variable = cls._made(State(spec, strategy, []))
                strategy.sharing.created_outside(variable.state, value, name, _getframe(1))
                return variable
            size = 1 if strategy is None else strategy.num_local_replicas
            return cls._made(State(spec, strategy, [value] * size))
        here.check("Variable(…)")
        here = here.of_run or here
        if here.num_replicas_in_sync == 1:
            return cls._made(State(spec, strategy, [value]))
        frame, member = _getframe(1), here.member
        site = Site(member.replica_id, member.position, frame.f_code, frame.f_lasti, name is not None)
        creations = creations_of(member.group)
        variable = creations.known(member.group, spec, site)
        if variable is None:
            variable = cls._made(State(spec, strategy, []))
        if site.replica_id == 0:
            variable.state.put([value] * strategy.num_local_replicas)
        creations.add(variable, spec, site)
        if strategy.sharing is not None:
            strategy.sharing.created_in_replica(variable.state, here, value, site, frame)
        return variable

    @classmethod
    def _made(cls, state: State) -> Self:
        variable = super().__new__(cls)
        variable.state = state
        return variable

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        how = "mirrored" if self.state.mirrored else "sync-on-read"
        return f"<Variable {self.name!r}: {self.dtype.name}[{shape}], {how}, aggregation {self.aggregation.name}>"

    @property
    def name(self) -> str:
        """What it is called."""
        return self.state.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each component."""
        return self.state.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of each component."""
        return self.state.spec.dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimiser should change it."""
        return self.state.spec.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When its components are brought together, ON_WRITE or ON_READ."""
        return self.state.spec.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How what replicas assign, or its components, become one."""
        return self.state.spec.aggregation

    @property
    def values(self) -> tuple[Array, ...]:
        """The components, read-only arrays, in replica-id order."""
        return tuple(self.state.present())

    # Reading.

    def read_value(self) -> Array:
        """Return the value: in a replica its own component, elsewhere the aggregate; a read-only array.

        Raises:
            ReplicaContextError: replica 0, whose initial value it gets, has not created it yet.
            ValueError: it belongs to another strategy than the replica; or it is sync-on-read with aggregation NONE,
                and read outside a replica.
        """
        state = self.state
        if state.strategy is None:
            return state.present()[0]
        context = self._replica("read")
        if context is not None:
            return state.present()[context.member.position]
        return state.total()

    def _replica(self, verb: str) -> ReplicaContext | None:
        """Return the context of the replica that this is in; None outside.

        Raises:
            ValueError: it is a replica of another strategy.
        """
        here = current.get()
        if not isinstance(here, ReplicaContext):
            return None
        if _owner(here) is not self.state.strategy:
            raise ValueError(f"{self._whose()} and cannot be {verb} in a replica of {here.strategy!r}; {_OWN_OR_VALUE}")
        return here.of_run or here

    def _whose(self) -> str:
        owner = "the default strategy" if self.state.strategy is None else f"another strategy, {self.state.strategy!r},"
        return f"the variable {self.name!r} was created under {owner}"

    # Assigning.

    def assign(self, value: Any, *, name: str | None = None) -> Any:
        """Give the variable another value.

        In a replica the call returns an awaitable, whose await gives the variable. For a mirrored variable it is a
        collective: what the replicas assign is aggregated, and with aggregation NONE must be equal. For a sync-on-read
        variable it changes the replica's own component at once.

        Elsewhere the call applies at once and returns the variable. A sync-on-read variable of aggregation SUM gets
        components that add up to the value. A `Mirrored` value is one value; a `PerReplica` is what replicas would
        have assigned.

        Args:
            value: an array or number of the variable's shape; nothing is broadcast.
            name: stands in for the call site of the collective.

        Raises:
            CollectiveError: (at the await) the replicas did not meet in the assignment.
            OverflowError: a Python int that the variable's dtype cannot hold.
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
            CollectiveError, OverflowError, ReplicaContextError, TypeError: as `assign`.
        """
        return self._assign("assign_add", value, name, _getframe(1))

    def assign_sub(self, value: Any, *, name: str | None = None) -> Any:
        """Subtract a value; see `assign_add`."""
        return self._assign("assign_sub", value, name, _getframe(1))

    def _assign(self, method: str, value: Any, name: str | None, frame: FrameType) -> Any:
        name, state = arguments.checked_name(name), self.state
        context = self._replica("assigned to")
        if context is not None:
            context.check(f"variable.{method}")
            array = state.converted(value)
            if state.mirrored:
                return context.issue(frame, state.request(self, method, name), array, None)
            state.update_own(context.member.position, method, array)
            return _Applied(self)
        here = current.get()
        if isinstance(here, CrossReplica) and state.strategy not in (None, here.strategy):
            raise ValueError(f"{self._whose()} and cannot be assigned to under {here.strategy!r}; {_OWN_OR_VALUE}")
        state.assign_outside(method, value)
        return self

    # Copying.

    def __copy__(self) -> Self:
        """Return another variable of the same strategy with the same value, as `copy.deepcopy` does.

        Raises:
            ReplicaContextError: in a replica, where each would make one of its own.
        """
        if isinstance(current.get(), ReplicaContext):
            raise ReplicaContextError(
                f"the variable {self.name!r} was copied in a replica, where each replica would make another variable; "
                "copy it outside, or write Variable(variable.read_value()), which replicas make together"
            )
        return self._made(State(self.state.spec, self.state.strategy, self.state.present()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"the variable {self.name!r} cannot be pickled: it belongs to a strategy, which lives in one process. "
            "Pickle its value, variable.numpy(), and create a variable of that, or assign it, under a scope"
        )


class _Applied:
    """An assignment that no other replica takes part in: applied by the call, awaited like the others."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def __await__(self) -> Generator[Any, Any, Variable]:
        yield from ()
        return self._variable


_OWN_OR_VALUE = "create it in that one's scope(), or pass its value, variable.numpy()"


def _owner(here: ReplicaContext | CrossReplica | None) -> Any:
    """Return the strategy whose variables are at home here; None for the default one."""
    return None if here is None or here.strategy.is_default else here.strategy


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
    return Mirrored(leaf.values) if leaf.state.mirrored else PerReplica(leaf.values)


Variable.__module__ = "aiodist"
