"""`Variable`: state with one component for each replica. A collective takes one as an array (`ArrayLike`)."""

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
from aiodist._runtime.current import current
from aiodist._runtime.participant import Participant
from aiodist._strategy import aggregation as aggregating
from aiodist._strategy.aggregation import VariableAggregation, VariableSynchronization, initial_array
from aiodist._strategy.creation import Site, Spec, creations_of
from aiodist._strategy.scope import Replicas, replicas_of, strategy_in_force
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
        ValueError: an unknown synchronization or aggregation, or synchronization NONE; MEAN of integers; the
            replicas create different variables.
    """

    __slots__ = ("__weakref__", "_state")
    _state: State

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
        how, combined = VariableSynchronization(synchronization), VariableAggregation(aggregation)
        if how is VariableSynchronization.NONE:
            raise ValueError(
                "synchronization NONE is for variables of no strategy; use 'auto', 'on_write' or 'on_read'"
            )
        if how is VariableSynchronization.AUTO:
            how = VariableSynchronization.ON_WRITE
        aggregating.check(combined, value.dtype)
        trained = how is not VariableSynchronization.ON_READ if trainable is None else bool(trainable)
        spec = Spec(name or "Variable", value.shape, value.dtype, trained, how, combined)
        here = current.get()
        strategy = strategy_in_force(here)
        replicas = Replicas(1) if strategy is None else replicas_of(strategy)
        if not isinstance(here, Participant):
            if replicas.sharing is not None:
                state = State(spec, strategy, [])
                replicas.sharing.created_outside(state, value, name, _getframe(1))
                return cls._made(state)
            return cls._made(State(spec, strategy, [value] * replicas.local))
        here.check("Variable(…)")
        here = here.of_run or here
        if here.member.group.size == 1:
            return cls._made(State(spec, strategy, [value]))
        frame, member = _getframe(1), here.member
        site = Site(member.replica_id, member.position, frame.f_code, frame.f_lasti, name is not None)
        creations = creations_of(member.group)
        variable: Self | None = creations.known(member.group, spec, site)
        if variable is None:
            variable = cls._made(State(spec, strategy, []))
        if site.replica_id == 0:
            state_of(variable).put([value] * replicas.local)
        creations.add(variable, spec, site)
        if replicas.sharing is not None:
            replicas.sharing.created_in_replica(state_of(variable), here, value, site, frame)
        return variable

    @classmethod
    def _made(cls, state: State) -> Self:
        variable = super().__new__(cls)
        variable._state = state
        return variable

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        how = "mirrored" if self._state.mirrored else "sync-on-read"
        return f"<Variable {self.name!r}: {self.dtype.name}[{shape}], {how}, aggregation {self.aggregation.name}>"

    @property
    def name(self) -> str:
        """The variable's name in errors and reports."""
        return self._state.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each component."""
        return self._state.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of each component."""
        return self._state.spec.dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimiser should change it."""
        return self._state.spec.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When its components are combined, ON_WRITE or ON_READ."""
        return self._state.spec.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values or components are combined."""
        return self._state.spec.aggregation

    @property
    def values(self) -> tuple[Array, ...]:
        """The components, as read-only arrays in replica-id order; over several workers this worker's."""
        return tuple(self._state.present())

    # Reading.

    def read_value(self) -> Array:
        """Return the value as a read-only array: in a replica its own component, elsewhere the aggregate.

        Raises:
            ReplicaContextError: the variable belongs to another strategy than the one in force; replica 0, which gives
                the initial value, has not created it yet.
            ValueError: it is sync-on-read with aggregation NONE, and read outside of replicas.
        """
        state = self._state
        if state.strategy is None:
            return state.present()[0]
        here = self._replica("read")
        if here is not None:
            return state.present()[here.member.position]
        return state.total()

    def _replica(self, verb: str) -> Participant | None:
        """Return the current replica; None outside of replicas."""
        here, owner = current.get(), self._state.strategy
        in_replica = isinstance(here, Participant)
        if here is not None and here.strategy is not owner:
            in_force = strategy_in_force(here)
            if in_force is not owner and (in_replica or (owner is not None and in_force is not None)):
                whose = "the default strategy" if owner is None else f"another strategy, {owner!r},"
                where = f"{'in a replica of' if in_replica else 'under'} {here.strategy!r}"
                raise ReplicaContextError(
                    f"the variable {self.name!r} was created under {whose} and cannot be {verb} {where}; "
                    "create it in that one's scope(), or pass its value, variable.numpy()"
                )
        return (here.of_run or here) if in_replica else None

    # Assigning.

    def assign(self, value: Any, *, name: str | None = None) -> Any:
        """Assign a value.

        In a replica the call returns an awaitable, whose await gives the variable. For a mirrored variable this is a
        collective: the replicas' values are aggregated; with aggregation NONE they must be equal. For a sync-on-read
        variable the call changes the replica's own component at once.

        Outside of replicas the call takes effect at once and returns the variable, which may be awaited: a step that
        was written for replicas can be called directly. A sync-on-read variable with SUM gets components that add up to
        the value. A `Mirrored` is one value; a `PerReplica` stands for what the replicas would assign.

        Args:
            value: an array or number of the variable's shape; nothing is broadcast.
            name: replaces the call site of the collective.

        Raises:
            CollectiveError: at the await, the replicas disagree.
            OverflowError: a Python int that the variable's dtype cannot hold.
            ReplicaContextError: called in a replica's worker thread; the variable belongs to another strategy.
            TypeError: the value does not fit the variable's dtype.
            ValueError: another shape; aggregation NONE and different values.
        """
        return self._assign("assign", value, name, _getframe(1))

    def assign_add(self, value: Any, *, name: str | None = None) -> Any:
        """Add a value; to a mirrored variable, the aggregate of the replicas' values. Otherwise as `assign`.

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
        name, state = arguments.checked_name(name), self._state
        here = self._replica("assigned to")
        if here is not None:
            here.check(f"variable.{method}")
            array = state.converted(value)
            if state.mirrored:
                return here.issue(frame, state.request(self, method, name), array)
            state.update_own(here.member.position, method, array)
            return self
        state.assign_outside(method, value)
        return self

    def __await__(self) -> Generator[Any, Any, Self]:
        """Return the variable at once: what an assignment that waits for nobody has returned may be awaited, too."""
        yield from ()
        return self

    # Copying.

    def __copy__(self) -> Self:
        """Return another variable of the same strategy with the same value, as `copy.deepcopy` does.

        Raises:
            ReplicaContextError: called in a replica, where each would make a variable of its own.
        """
        if isinstance(current.get(), Participant):
            raise ReplicaContextError(
                f"the variable {self.name!r} was copied in a replica, where each replica would make another variable; "
                "copy it outside, or write Variable(variable.read_value()), which replicas make together"
            )
        return self._made(State(self._state.spec, self._state.strategy, self._state.present()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"the variable {self.name!r} cannot be pickled: it belongs to a strategy, which lives in one process. "
            "Pickle its value, variable.numpy(), and create a variable of that, or assign it, under a scope"
        )


def state_of(variable: Variable) -> State:
    """Return a variable's state."""
    return variable._state  # noqa: SLF001  (declared above, for this module alone)


def as_distributed(leaf: Any) -> Any:
    """Return a variable's components as a mirrored or per-replica value; anything else unchanged."""
    if not isinstance(leaf, Variable):
        return leaf
    return Mirrored(leaf.values) if state_of(leaf).mirrored else PerReplica(leaf.values)


Variable.__module__ = "aiodist"
