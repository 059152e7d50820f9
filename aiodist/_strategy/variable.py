"""`Variable`: state with one component for each replica. A collective takes one as an array (`ArrayLike`).

Components are arrays that never change: an assignment replaces them. In replicas, an assignment to a mirrored variable
is a collective like any other, whose kind belongs to the variable and the method (`Request`): calls for two variables
never combine, and a report names the variable. An assignment to a sync-on-read variable changes the replica's own
component, at the call.

The k-th variable that each replica creates is the same one, made once, with replica 0's value. Creating one is not a
collective, and nobody waits in it: the arguments for the k-th variable are compared when each replica gets there, and
the end of the run shows whether all have created equally many.
"""

from __future__ import annotations

import enum
import itertools
import reprlib
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from sys import _getframe
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self
from weakref import WeakKeyDictionary

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.host import Array, ArrayLike, host_type_of
from aiodist._arrays.leaves import Spec as ValueSpec
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import DistributedValues, Mirrored, PerReplica, check_unmasked, components_of
from aiodist._collectives.execution import executor
from aiodist._collectives.host import copied, fold, frozen
from aiodist._collectives.kinds import ALL_REDUCE, Collective, Kind
from aiodist._collectives.work import Work
from aiodist._core.call import Call, OrderCheck, Place, leaf_text, place
from aiodist._core.errors import ReplicaContextError
from aiodist._core.ledger import Group, Member
from aiodist._runtime import requests as arguments
from aiodist._runtime.current import current
from aiodist._runtime.participant import Participant
from aiodist._runtime.requests import Request
from aiodist._strategy.scope import Replicas, replicas_of, require_all_workers, strategy_in_force
from aiodist_kernels import Accumulate, ReduceOp, policy, pool
from aiodist_kernels.pool import empty_like


class _NamedChoice(enum.StrEnum):
    @classmethod
    def _missing_(cls, value: object) -> Any:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls.__members__[value.upper()]
        known = ", ".join(repr(str(member)) for member in cls)
        raise ValueError(f"{cls.__name__} must be one of {known}, got {value!r}")


class VariableSynchronization(_NamedChoice):
    """When the components of a variable are combined. Strings of any case are accepted for members.

    Attributes:
        AUTO: as ON_WRITE.
        NONE: never; not allowed for a strategy's variables, as in TensorFlow.
        ON_WRITE: at every assignment, so that all components are equal: a mirrored variable.
        ON_READ: when it is read outside of replicas; each replica assigns to its own component.
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(_NamedChoice):
    """How replicas' values or components are combined. Strings of any case are accepted for members.

    Attributes:
        NONE: not at all; values assigned to a mirrored variable must be equal.
        SUM: the sum.
        MEAN: the mean.
        ONLY_FIRST_REPLICA: replica 0's value.
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


_REDUCE_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


# Values of one replica.

_LADDER = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}  # V: bfloat16, as the libraries that have it register it


def _initial(value: Any, dtype: Any) -> Array:
    """Return a read-only array of a variable's initial value, which shares no memory with it."""
    given = _as_array("a variable", value)
    wanted = (given.dtype if dtype is None else np.dtype(dtype)).newbyteorder("=")
    if wanted.kind != "b":
        kernels.result_dtype(ReduceOp.SUM, wanted)  # whatever can be summed can be held
    return frozen(copied(_cast("a variable", value, given, wanted)))


def _as_array(what: str, value: Any) -> Array:
    check_unmasked(value, "for a variable")
    foreign = host_type_of(value)
    array = np.asarray(value if foreign is None else foreign.view(value))
    if array.dtype.kind not in _LADDER:
        raise TypeError(f"{what} expects an array of numbers, or a number, got {array.dtype}: {reprlib.repr(value)}")
    return array


def _cast(what: str, value: Any, given: Array, dtype: np.dtype[Any]) -> Array:
    """Cast as NumPy does in place; a Python int to an unsigned integer, too, and bfloat16 like other floats."""
    if given.dtype == dtype and given.dtype.isnative:
        return given
    rank, wanted = _LADDER[given.dtype.kind], _LADDER.get(dtype.kind, -1)
    is_python = not isinstance(value, (np.ndarray, np.generic))
    if rank > wanted or ((given.dtype.kind, dtype.kind) == ("i", "u") and not is_python):
        raise TypeError(f"{what} expects values that fit {dtype}, got {given.dtype}; cast them: value.astype(...)")
    return np.asarray(value if given.dtype.kind in "iu" and is_python and host_type_of(value) is None else given, dtype)


_CHANGES = {"assign_add": np.add, "assign_sub": np.subtract}


def updated(method: str, old: Array, value: Array, *, fresh: bool = False) -> Array:
    """Return a new component: a read-only array that shares no memory with the value, unless that is fresh."""
    if method == "assign":
        return frozen(value if fresh else copied(value))
    out = None if value.nbytes < pool.POOLED_FROM else empty_like(value, old.dtype)
    return frozen(np.asarray(_CHANGES[method](old, value, out=out)))


# Values of several.


def check_equal(name: str, values: Sequence[Array], first: int = 0) -> None:
    """Check that a variable's replicas get equal values; ``first`` is the first one's id, and all NaNs are equal."""
    for position, value in enumerate(values):
        if not _equal(value, values[0]):
            raise differ(name, first + position, first)


def _equal(a: Array, b: Array) -> bool:
    return a is b or bool((a == b).all()) or bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  (only a NaN is not itself)


def differ(name: str, replica_id: int, first: int = 0) -> ValueError:
    """Return the error for an assignment that would give a mirrored variable different components."""
    return ValueError(
        f"the mirrored variable {name!r} would get different values: replica {replica_id}'s is not replica {first}'s. "
        "Assign what a collective or `await extended.reduce_to(op, value, variable)` returned; give the variable an "
        "aggregation ('sum', 'mean' or 'only_first_replica') for what replicas assign; or make it "
        "synchronization='on_read'"
    )


def _parts(aggregation: VariableAggregation, value: Array, size: int) -> list[Array]:
    """Return components whose aggregate is ``value``; for integers the first ones are larger."""
    if aggregation is not VariableAggregation.SUM:
        return [value] * size
    if value.dtype.kind == "c":  # by component: a complex division makes NaN of infinities
        part = np.empty_like(value)
        for of, to in ((value.real, part.real), (value.imag, part.imag)):
            np.divide(of, size, out=to)
        return [part] * size
    if value.dtype.kind not in "iu":
        return [np.asarray(value / size, value.dtype)] * size
    whole, rest = np.divmod(value, size, dtype=np.result_type(value.dtype, np.min_scalar_type(size)))
    return [np.asarray(whole + (replica_id < rest), value.dtype) for replica_id in range(size)]


# Creating.


class Spec(NamedTuple):
    """The properties of a variable apart from its value, which must be equal on all replicas."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    @property
    def mirrored(self) -> bool:
        """Whether it has the same value on every replica."""
        return self.synchronization is VariableSynchronization.ON_WRITE

    def check(self) -> None:
        """Check that values of its dtype can be aggregated."""
        if self.op is ReduceOp.MEAN and self.dtype.kind in "iu":
            raise ValueError(
                f"aggregation MEAN needs a variable of floating-point numbers, got {self.dtype}: pass dtype=..."
            )
        if self.op is not None:
            kernels.result_dtype(self.op, self.dtype)

    def __str__(self) -> str:
        how = "mirrored" if self.mirrored else "sync-on-read"
        what = leaf_text(self.shape, self.dtype.name, "array")
        trainable = "" if self.trainable else ", not trainable"
        return f"{self.name!r}: {what}, {how}, aggregation {self.aggregation.name}{trainable}"

    @property
    def op(self) -> ReduceOp | None:
        """The reduction by which values or components are combined; None where they are not reduced."""
        return _REDUCE_OPS.get(self.aggregation)

    def collective(self, kind: Kind, detail: Any = None) -> Collective:
        """Return a collective on values of it."""
        op = self.op if kind is ALL_REDUCE else None
        return Collective(kind, op, detail, ValueSpec((self.shape,), (self.dtype,), (None,), single=True))

    def call(self, kind: str, subject: str | None, name: str | None, op: ReduceOp | None = None) -> Call:
        """Return a call of a kind on a value of it."""
        op_name = None if op is None else op.name
        shapes, dtypes = (self.shape,), (self.dtype.name,)
        return Call(kind, op=op_name, subject=subject, name=name, shapes=shapes, dtypes=dtypes, arrays=("array",))

    def aggregate(self, values: Sequence[Array], accumulate: Accumulate = "native", first: int = 0) -> Array:
        """Return the aggregate of the replicas' values, which may be one of them. ``first`` is the first one's id."""
        if self.op is not None:
            return frozen(fold(self.op, values, None, accumulate))
        if self.aggregation is VariableAggregation.NONE:
            check_equal(self.name, values, first)
        return values[0]


@dataclass(slots=True)
class _Unfinished:
    """A variable that some replica of a run has not created yet."""

    variable: Any
    spec: Spec
    place: Place  # where it has been created first
    creation: str  # by whom, and where
    left: int  # how many have not


class _Creations(NamedTuple):
    """The variables that the replicas of one run have created so far."""

    counts: list[int]  # by position
    unfinished: dict[int, _Unfinished]  # by number; a finished one would be kept as long as the run is recorded


_creations: WeakKeyDictionary[Group, _Creations] = WeakKeyDictionary()
"""By the group of a run's replicas, to which they must not refer."""


def _next_creation(member: Member, spec: Spec, at: Place, named: bool, make: Callable[[], Any]) -> Any:
    """Return the next variable of a replica, made here unless another replica has created it already."""
    group, creation = member.group, f"replica {member.replica_id} at {at.location}"
    counts, unfinished = _creations.setdefault(group, _Creations([0] * len(group.members), {}))
    number = counts[member.position]
    if number not in unfinished:
        unfinished[number] = _Unfinished(make(), spec, at, creation, len(counts))
    found = unfinished[number]
    anywhere = named or group.ledger.order_check is OrderCheck.SIGNATURE  # a name of the user's stands in for the place
    if spec != found.spec or not (anywhere or at[:3] == found.place[:3]):
        raise ValueError(
            f"replicas create different variables as their #{number}: {found.creation} creates {found.spec}; "
            f"{creation} creates {spec}. Every replica must create the same variables in the same order: create them "
            "under strategy.scope(), or outside of branches on a replica's own data. Where two places are meant to be "
            "one variable, give both the same name"
        )
    counts[member.position] += 1
    found.left -= 1
    if not found.left:
        del unfinished[number]
    return found.variable


def check_created(members: Sequence[Member]) -> None:
    """Check, at the end of a run, that every replica has created as many variables as the others."""
    counts = found.counts if (found := _creations.get(members[0].group)) else [0]
    if len(set(counts)) > 1:
        told = zip(members, counts, strict=True)
        each = [f"replica {one.replica_id}: {count}" for one, count in told if not one.position or count != counts[0]]
        raise ValueError(
            f"replicas created different numbers of variables: {', '.join(each)}; every replica must create the same "
            "variables in the same order"
        )


# Components.

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class State:
    """What a variable is, and its components.

    Worker threads make the new value of a large variable, and the event loop's thread puts it in place. Assignments
    take effect in the order of their collectives: where a replica has issued the next one without awaiting the last,
    and its value is still being made, the event loop's thread makes it, too (`settle`).
    """

    spec: Spec
    strategy: Any  # whose it is; None: the default one's
    _components: list[Array]
    subject: str = field(default_factory=lambda: str(next(_numbers)))  # tells it from others of its name
    requests: dict[Any, Request] = field(default_factory=dict)  # to create it or assign to it, by method and name
    _change: Callable[[], Array] | None = None  # makes what a large assignment is about to put in place
    mirrored: bool = field(init=False)
    _replicas: Replicas = field(init=False)

    def __post_init__(self) -> None:
        self.mirrored = self.spec.mirrored
        self._replicas = _replicas_of(self.strategy)

    def put(self, components: Sequence[Array]) -> None:
        """Set the components: read-only arrays whose memory nobody else uses; replicas may share one."""
        self._components = list(components)

    def present(self) -> list[Array]:
        """Return the components."""
        if not self._components:
            raise ReplicaContextError(
                f"the variable {self.spec.name!r} gets replica 0's initial value, which has not come yet; wait for it "
                "before the variable is used: in a replica e.g. with `await ctx.barrier()`, outside with any awaited "
                "call, e.g. `await strategy.run(fn)`"
            )
        return self._components

    def total(self) -> Array:
        """Return the value outside of replicas; it may be a component."""
        components = self.present()
        if not self.mirrored and self._replicas.sharing is not None:
            raise ValueError(
                f"the sync-on-read variable {self.spec.name!r} has components on other workers, which a read cannot "
                "wait for; write `await strategy.reduce(op, variable, axis=None)`"
            )
        if self.mirrored or len(components) == 1:
            return components[0]
        if self.spec.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"the sync-on-read variable {self.spec.name!r} has aggregation NONE, so outside a replica it has no "
                "one value; read it in a replica, look at variable.values, or give it an aggregation"
            )
        return self.spec.aggregate(components)

    def converted(self, value: Any) -> Array:
        """Return an assigned value as an array of the variable's shape and dtype, possibly the value itself."""
        shape, dtype = self.spec.shape, self.spec.dtype
        if type(value) is np.ndarray and value.shape == shape and value.dtype is dtype:
            return value
        what = f"the variable {self.spec.name!r}"
        given = _as_array(what, value)
        if given.shape != shape:
            raise ValueError(
                f"{what} has the shape {shape}, and nothing is broadcast; got a value of shape {given.shape}"
            )
        return _cast(what, value, given, dtype)

    # Assignments in replicas.

    def request(self, variable: Variable, method: str, name: str | None) -> Request:
        """Return the request for an assignment of replicas to a mirrored variable, which gives the variable."""
        found = self.requests.get((method, name))
        if found is None:
            spec, workers = self.spec, self._replicas.sharing
            call = spec.call(f"{spec.name}.{method}", self.subject, name, spec.op)
            over = None if workers is None else workers.over_workers(self, partial(self._apply, variable, method))
            meet = partial(self._meet, variable, method)
            found = Request(spec.collective(ALL_REDUCE), call, meet, over_workers=over)
            self.requests[method, name] = found
        return found

    def _meet(self, variable: Variable, method: str, values: Sequence[Array], options: CommunicationOptions) -> Any:
        """Apply what all replicas assign."""
        spec = self.spec
        if not policy.blocks(values[0].nbytes * (len(values) + 2)):
            return self._apply(variable, method, spec.aggregate(values, options.accumulate))
        self.settle()
        old, aggregated = self.present()[0], partial(spec.aggregate, values, options.accumulate)
        total: Any = Work([], aggregated)
        if spec.op is not None:
            total = executor(spec.collective(ALL_REDUCE), len(values), (), options.accumulate).run(values)
            if type(total) is not Work:
                total = Work([], partial(np.asarray, total))
        work = total.then(lambda value: updated(method, old, value, fresh=spec.op is not None))
        self._change = change = lambda: updated(method, old, aggregated())

        def put() -> Variable:
            new = work.result()
            if self._change is change:
                self._change = None
                self.put([new] * len(self._components))
            return variable

        return Work(work.phases, put)

    def settle(self) -> None:
        """Apply the last assignment, even if a thread is still computing its value."""
        make, self._change = self._change, None
        if make is not None:
            with suppress(ValueError):  # of replicas that assign different values, which it tells them by itself
                self.put([make()] * len(self._components))

    def _apply(self, variable: Variable, method: str, value: Any) -> Variable:
        """Assign one value to all components of a mirrored variable: one array serves all."""
        self.settle()
        old = self.present()
        self.put([updated(method, old[0], np.asarray(value))] * len(old))
        return variable

    def update_own(self, position: int, method: str, value: Array) -> None:
        """Apply one replica's assignment to a sync-on-read variable."""
        components = self.present()
        components[position] = updated(method, components[position], value)

    # Assignments from outside.

    def assign_outside(self, variable: Variable, method: str, value: Any) -> None:
        """Assign outside of replicas, at once; see `Variable.assign`."""
        spec, size, share = self.spec, len(self.present()), self._replicas.share
        if self.mirrored and self._replicas.sharing is not None:
            require_all_workers()
            if isinstance(value, PerReplica):
                raise ValueError(
                    f"{method} outside a replica takes no per-replica value where the mirrored variable {spec.name!r} "
                    "has components on other workers, which it cannot wait for: write "
                    f"`variable.{method}(await strategy.reduce(op, value, axis=None))`"
                )
        given = components_of(value, size) if isinstance(value, DistributedValues) else (value,)
        is_one = isinstance(value, Mirrored) or not isinstance(value, DistributedValues)
        if is_one:  # a Mirrored is a copy for each replica of one value, not what each of them would assign
            given = given[:1]
        each = [self.converted(one) for one in given]
        if self.mirrored:
            self._apply(variable, method, each[0] if is_one else spec.aggregate(each, first=share.mine.start))
            return
        if method != "assign" and spec.aggregation is VariableAggregation.SUM and self.strategy is not None:
            raise ValueError(
                f"{method} outside a replica is not for the sync-on-read variable {spec.name!r}, whose aggregation is "
                f"SUM: it is not clear whether the value counts once or for each component. Call {method} in a "
                "replica, or assign(variable.read_value() ± value)"
            )
        if is_one and method == "assign":
            each = _parts(spec.aggregation, each[0], share.replicas)[share.mine.start : share.mine.stop]
        elif is_one:
            each *= size
        self.put([updated(method, *pair) for pair in zip(self.present(), each, strict=True)])


def _replicas_of(strategy: Any) -> Replicas:
    return Replicas(1) if strategy is None else replicas_of(strategy)


class Variable(ArrayLike):
    """State of a strategy, with one component for each replica. It can be used as an array.

    A **mirrored** variable (``synchronization`` "auto" or "on_write") has the same value on every replica. A
    **sync-on-read** variable ("on_read") has a value on each replica. A read in a replica gives the replica's own
    component, elsewhere the aggregate. An assignment in a replica is awaited, elsewhere it is not::

        await variable.assign_add(x)      # in a replica; for a mirrored variable a collective
        variable.assign_add(x)            # anywhere else

    A variable belongs to the strategy under whose scope it is created. In a replica function every replica creates the
    same variables in the same order; each is made once, with replica 0's initial value, for all replicas.

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
        value = _initial(initial_value() if callable(initial_value) else initial_value, dtype)
        how, combined = VariableSynchronization(synchronization), VariableAggregation(aggregation)
        if how is VariableSynchronization.NONE:
            raise ValueError("synchronization NONE is for variables without a strategy; use 'on_write' or 'on_read'")
        if how is VariableSynchronization.AUTO:
            how = VariableSynchronization.ON_WRITE
        trained = how is not VariableSynchronization.ON_READ if trainable is None else bool(trainable)
        spec = Spec(name or "Variable", value.shape, value.dtype, trained, how, combined)
        spec.check()
        here, frame = current.get(), _getframe(1)
        strategy = strategy_in_force(here)
        replicas = _replicas_of(strategy)
        local, workers = replicas.local, replicas.sharing
        if not isinstance(here, Participant):
            variable = cls._made(State(spec, strategy, [value] * local if workers is None else []))
            if workers is not None:
                workers.created_outside(state_of(variable), value, name, frame)
            return variable
        here.check("Variable(…)")
        here = here.of_run or here
        at, make = place(frame.f_code, frame.f_lasti), lambda: cls._made(State(spec, strategy, []))
        variable = _next_creation(here.member, spec, at, name is not None, make)
        if here.member.replica_id == 0:
            state_of(variable).put([value] * local)
        if workers is not None:
            workers.created_in_replica(state_of(variable), here, value, name, frame)
        return variable

    @classmethod
    def _made(cls, state: State) -> Self:
        variable = super().__new__(cls)
        variable._state = state
        return variable

    def __repr__(self) -> str:
        return f"<Variable {self._state.spec}>"

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

        In a replica the call returns an awaitable, which gives the variable. For a mirrored variable it is a collective
        that aggregates the replicas' values; with aggregation NONE they must be equal. For a sync-on-read variable the
        call changes the replica's own component at once.

        Outside of replicas the call takes effect at once and returns the variable, which may be awaited. A sync-on-read
        variable with SUM gets components that add up to the value. A `Mirrored` is one value; a `PerReplica` stands for
        what the replicas would assign.

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
        """Add a value; to a mirrored variable, the aggregate of the replicas' values.

        Raises:
            ValueError: as `assign`; also outside of replicas for a sync-on-read variable with SUM.
            Exception: as `assign`.
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
        state.assign_outside(self, method, value)
        return self

    def __await__(self) -> Generator[Any, Any, Self]:
        """Return the variable at once, so that the result of an assignment without waiting can be awaited, too."""
        yield from ()
        return self

    def __copy__(self) -> Self:
        """Return another variable of the same strategy with the same value, as `copy.deepcopy` does.

        Raises:
            ReplicaContextError: called in a replica, where each would make a variable of its own.
        """
        if isinstance(current.get(), Participant):
            raise ReplicaContextError(
                f"the variable {self.name!r} was copied in a replica, where each would make a variable of its own; "
                "copy it outside, or write Variable(variable.read_value()), which replicas make together"
            )
        return self._made(State(self._state.spec, self._state.strategy, list(self._state.present())))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"the variable {self.name!r} cannot be pickled: it belongs to a strategy, which lives in one process. "
            "Pickle its value, variable.numpy(), and create a variable of that under a scope"
        )


def state_of(variable: Variable) -> State:
    """Return a variable's state."""
    return variable._state  # noqa: SLF001  (declared above, for this module alone)


def as_distributed(leaf: Any) -> Any:
    """Return a variable's components as a mirrored or per-replica value; anything else unchanged."""
    if not isinstance(leaf, Variable):
        return leaf
    return Mirrored(leaf.values) if state_of(leaf).mirrored else PerReplica(leaf.values)


for _class in (VariableSynchronization, VariableAggregation, Variable):
    _class.__module__ = "aiodist"
del _class
