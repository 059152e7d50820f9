"""Variables: state with one component for each replica, equal on all of them, or aggregated when it is read.

Components are arrays that never change; an assignment replaces them. So later assignments do not change a value that
was read, and the replicas of a mirrored variable share one array.

Lower floors know nothing of variables: a collective takes one as an array (`ArrayLike`).
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
    """State of a strategy, with one component for each replica. It can be used as an array.

    A **mirrored** variable (``synchronization`` "auto" or "on_write") has the same value on every replica. A
    **sync-on-read** variable ("on_read") has a value on each replica, and reading it outside of replicas combines them
    by ``aggregation``.

    A read in a replica gives the replica's own component, elsewhere the aggregate. An assignment in a replica is
    awaited, elsewhere it is not::

        await variable.assign_add(x)      # in a replica; for a mirrored variable this is a collective, which
                                          # aggregates the replicas' values
        variable.assign_add(x)            # anywhere else

    A variable that is created under a scope belongs to that strategy; without a scope it belongs to the default
    strategy, and has one component. In a replica function every replica creates the same variables in the same order;
    each is made once, with replica 0's initial value, and all replicas get the same object.

    Args:
        initial_value: an array or number, or a function that returns one. It is copied.
        trainable: whether an optimiser should change it; None: True, unless it is sync-on-read.
        name: the name in errors and reports; None: "Variable". If several places of a replica function create one
            variable, the name replaces the place.
        dtype: the components' dtype; None: that of ``np.asarray(initial_value)``.
        synchronization: a `VariableSynchronization`, or its name.
        aggregation: a `VariableAggregation`, or its name.

    Raises:
        ReplicaContextError: created in a replica's worker thread.
        TypeError: the initial value is not an array of numbers, or does not fit ``dtype``; SUM or MEAN of bool.
        ValueError: an unknown synchronization or aggregation, or synchronization NONE; MEAN of integers; a
            sync-on-read variable that is trainable; the replicas create different variables.
    """

    __slots__ = ("__weakref__", "state")
    state: State  # for other modules of this package

    # Another replica may already have made the variable, so __new__ makes or finds it, not __init__.
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
        """The variable's name in errors and reports."""
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
        """When its components are combined, ON_WRITE or ON_READ."""
        return self.state.spec.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values or components are combined."""
        return self.state.spec.aggregation

    @property
    def values(self) -> tuple[Array, ...]:
        """The components, as read-only arrays in replica-id order; over several workers this worker's."""
        return tuple(self.state.present())

    # Reading.

    def read_value(self) -> Array:
        """Return the value as a read-only array: in a replica its own component, elsewhere the aggregate.

        Raises:
            ReplicaContextError: replica 0, which gives the initial value, has not created the variable yet.
            ValueError: the variable belongs to another strategy; or it is sync-on-read with aggregation NONE, and read
                outside of replicas.
        """
        state = self.state
        if state.strategy is None:
            return state.present()[0]
        context = self._replica("read")
        if context is not None:
            return state.present()[context.member.position]
        return state.total()

    def _replica(self, verb: str) -> ReplicaContext | None:
        """Return the current replica's context; None outside of replicas.

        Raises:
            ValueError: the replica belongs to another strategy.
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
        """Assign a value.

        In a replica the call returns an awaitable, whose await gives the variable. For a mirrored variable this is a
        collective: the replicas' values are aggregated; with aggregation NONE they must be equal. For a sync-on-read
        variable the call changes the replica's own component at once.

        Outside of replicas the call takes effect at once and returns the variable. A sync-on-read variable with SUM
        gets components that add up to the value. A `Mirrored` is one value; a `PerReplica` stands for what the replicas
        would assign.

        Args:
            value: an array or number of the variable's shape; nothing is broadcast.
            name: replaces the call site of the collective.

        Raises:
            CollectiveError: at the await, the replicas disagree.
            OverflowError: a Python int that the variable's dtype cannot hold.
            ReplicaContextError: called in a replica's worker thread.
            TypeError: the value does not fit the variable's dtype.
            ValueError: another shape; another strategy's variable; aggregation NONE and different values.
        """
        return self._assign("assign", value, name, _getframe(1))

    def assign_add(self, value: Any, *, name: str | None = None) -> Any:
        """Add a value; to a mirrored variable, the aggregate of the replicas' values. Otherwise as `assign`.

        Args:
            value: an array or number of the variable's shape.
            name: replaces the call site of the collective.

        Raises:
            ValueError: as `assign`; also outside of replicas for a sync-on-read variable with SUM, because it is not
                clear whether the value counts once or for each replica.
            CollectiveError, OverflowError, ReplicaContextError, TypeError: as `assign`.
        """
        return self._assign("assign_add", value, name, _getframe(1))

    def assign_sub(self, value: Any, *, name: str | None = None) -> Any:
        """Subtract a value, as `assign_add` adds one.

        Raises:
            Exception: as `assign_add`.
        """
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
            ReplicaContextError: called in a replica, where each would make a variable of its own.
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
    """Return the strategy in force; None for the default one."""
    return None if here is None or here.strategy.is_default else here.strategy


def _synchronization(value: Any) -> VariableSynchronization:
    """Return ON_WRITE or ON_READ.

    Raises:
        ValueError: it is NONE or unknown.
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
    """Return a variable's components as a mirrored or per-replica value; anything else unchanged."""
    if not isinstance(leaf, Variable):
        return leaf
    return Mirrored(leaf.values) if leaf.state.mirrored else PerReplica(leaf.values)


Variable.__module__ = "aiodist"
