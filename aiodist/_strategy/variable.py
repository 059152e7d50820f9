"""`Variable`: state with one component for each replica, which can be used as an array.

Components are immutable arrays: an assignment replaces them. In a replica, assigning to a mirrored variable is a
collective whose kind names the variable and the method, so assignments to different variables never combine and a
report says which variable it was. Assigning to a sync-on-read variable changes the replica's own component at once.

The k-th variable that each replica creates is one variable, made once, with replica 0's value. Its creation is not a
collective and does not wait: each replica's arguments are compared with those of the first, and at the end of the run
all replicas must have created equally many.
"""

from __future__ import annotations

import enum
import itertools
import reprlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from sys import _getframe
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self
from weakref import WeakKeyDictionary

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.host import Array, ArrayLike, as_numpy, check_unmasked, copied, frozen, host_type_of
from aiodist._arrays.leaves import Spec
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import DistributedValues, Mirrored, PerReplica, components_of
from aiodist._collectives.execution import executor
from aiodist._collectives.host import fold
from aiodist._collectives.kinds import ALL_REDUCE, Collective, Kind
from aiodist._collectives.work import Work
from aiodist._core.call import Call, OrderCheck, Place, leaf_text, place
from aiodist._core.errors import ReplicaContextError
from aiodist._core.ledger import Group, Member
from aiodist._runtime.arguments import checked_name
from aiodist._runtime.current import current
from aiodist._runtime.participant import Participant
from aiodist._runtime.requests import Request
from aiodist._strategy.scope import replicas_of, require_all_workers, strategy_in_force, unless_default
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
        ON_WRITE: at every assignment, so all components are equal: a mirrored variable.
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


# The value of one replica.

_KIND_RANKS = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}  # V: bfloat16, as ml_dtypes and others register it


def _initial(value: Any, dtype: Any) -> Array:
    """Return a variable's initial value as a read-only array with memory of its own."""
    given = _as_array("a variable", value)
    wanted = (given.dtype if dtype is None else np.dtype(dtype)).newbyteorder("=")
    if wanted.kind != "b":
        kernels.result_dtype(ReduceOp.SUM, wanted)  # a TypeError for what cannot be summed
    return frozen(copied(_cast("a variable", value, given, wanted)))


def _as_array(what: str, value: Any) -> Array:
    check_unmasked(value, "for a variable")
    array = as_numpy(value)
    if array.dtype == object and isinstance(value, int):
        raise OverflowError(f"{what} expects ints of at most 64 bits, got {reprlib.repr(value)}")
    if array.dtype.kind not in _KIND_RANKS:
        raise TypeError(f"{what} expects an array of numbers, or a number, got {array.dtype}: {reprlib.repr(value)}")
    return array


def _cast(what: str, value: Any, given: Array, dtype: np.dtype[Any]) -> Array:
    """Cast as NumPy does in place, but also Python ints to unsigned integers, and bfloat16 like other floats."""
    if given.dtype == dtype and given.dtype.isnative:
        return given
    rank, wanted = _KIND_RANKS[given.dtype.kind], _KIND_RANKS.get(dtype.kind, -1)
    is_python = not isinstance(value, (np.ndarray, np.generic))
    if rank > wanted or ((given.dtype.kind, dtype.kind) == ("i", "u") and not is_python):
        raise TypeError(f"{what} expects values that fit {dtype}, got {given.dtype}; cast them: value.astype(...)")
    return np.asarray(value if given.dtype.kind in "iu" and is_python and host_type_of(value) is None else given, dtype)


def updated(method: str, old: Array, value: Array, *, fresh: bool = False) -> Array:
    """Return a new component: a read-only array that shares no memory with the value, unless that is fresh."""
    if method == "assign":
        return frozen(value if fresh else copied(value))
    out = None if value.nbytes < pool.POOLED_FROM else empty_like(value, old.dtype)
    change = np.add if method == "assign_add" else np.subtract
    return frozen(np.asarray(change(old, value, out=out)))


# The values of several replicas.


def check_equal(name: str, values: Sequence[Array], first: int = 0) -> None:
    """Check that replicas assign equal values, where all NaNs are equal; ``first`` is the id of the first replica."""
    for position, value in enumerate(values):
        if not _equal(value, values[0]):
            raise unequal_values(name, first + position, first)


def _equal(a: Array, b: Array) -> bool:
    return a is b or bool((a == b).all()) or bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  (only a NaN is not itself)


def unequal_values(name: str, replica_id: int, first: int = 0) -> ValueError:
    """Return the error for an assignment that would give a mirrored variable different components."""
    return ValueError(
        f"the mirrored variable {name!r} would get different values: replica {replica_id}'s is not replica {first}'s. "
        "Assign what a collective or `await extended.reduce_to(op, value, variable)` returned; give the variable an "
        "aggregation ('sum', 'mean' or 'only_first_replica') for what replicas assign; or make it "
        "synchronization='on_read'"
    )


def _addends(value: Array, size: int) -> list[Array]:
    """Return components whose sum is ``value``; for integers the first ones are larger."""
    if value.dtype.kind == "c":  # a complex division would turn infinities into NaN
        part = np.empty_like(value)
        np.divide(value.real, size, out=part.real)
        np.divide(value.imag, size, out=part.imag)
        return [part] * size
    if value.dtype.kind not in "iu":
        return [np.asarray(value / size, value.dtype)] * size
    whole, rest = np.divmod(value, size, dtype=np.result_type(value.dtype, np.min_scalar_type(size)))
    return [np.asarray(whole + (replica_id < rest), value.dtype) for replica_id in range(size)]


# Creation.


class VariableSpec(NamedTuple):
    """The properties of a variable apart from its value, which must be equal on all replicas."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    @property
    def mirrored(self) -> bool:
        """Whether the variable has the same value on every replica."""
        return self.synchronization is VariableSynchronization.ON_WRITE

    @property
    def op(self) -> ReduceOp | None:
        """The reduce op of the aggregation; None if it is not a reduction."""
        return _REDUCE_OPS.get(self.aggregation)

    def check(self) -> None:
        """Check that values of the dtype can be aggregated."""
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

    def collective(self, kind: Kind, detail: Any = None) -> Collective:
        """Return a collective on values of the variable."""
        op = self.op if kind is ALL_REDUCE else None
        return Collective(kind, op, detail, Spec((self.shape,), (self.dtype,), (None,), single=True))

    def call(self, kind: str, subject: str | None, name: str | None, op: ReduceOp | None = None) -> Call:
        """Return a call on a value of the variable."""
        op_name = None if op is None else op.name
        shapes, dtypes = (self.shape,), (self.dtype.name,)
        return Call(kind, op=op_name, subject=subject, name=name, shapes=shapes, dtypes=dtypes, arrays=("array",))

    def aggregate(self, values: Sequence[Array], accumulate: Accumulate = "native", first: int = 0) -> Array:
        """Return the aggregate of replicas' values, possibly one of them; ``first`` is the id of the first replica."""
        if self.op is not None:
            return frozen(fold(self.op, values, None, accumulate))
        if self.aggregation is VariableAggregation.NONE:
            check_equal(self.name, values, first)
        return values[0]


@dataclass(slots=True)
class _Creation:
    """A variable that some replicas of a run have created and others have not."""

    variable: Any
    spec: VariableSpec
    place: Place
    replica: str  # the first to create it, and where
    missing: int  # the number of replicas that have not created it


_creations: WeakKeyDictionary[Group, tuple[list[int], dict[int, _Creation]]] = WeakKeyDictionary()
"""By the group of a run: each replica's number of variables, and by number those that some have not created yet.

Others are dropped, because the group is kept as long as the run is recorded. Nothing here must refer to it.
"""


def _next_creation(member: Member, spec: VariableSpec, at: Place, named: bool, make: Callable[[], Any]) -> Any:
    """Return the next variable of a replica, made here unless another replica has created it already."""
    group, replica = member.group, f"replica {member.replica_id} at {at.location}"
    counts, unfinished = _creations.setdefault(group, ([0] * len(group.members), {}))
    number = counts[member.position]
    if number not in unfinished:
        unfinished[number] = _Creation(make(), spec, at, replica, len(counts))
    found = unfinished[number]
    anywhere = named or group.ledger.order_check is OrderCheck.SIGNATURE  # a name given by the user replaces the place
    if spec != found.spec or not (anywhere or at[:3] == found.place[:3]):
        raise ValueError(
            f"replicas create different variables as their #{number}: {found.replica} creates {found.spec}; "
            f"{replica} creates {spec}. Every replica must create the same variables in the same order: create them "
            "under strategy.scope(), or outside of branches on a replica's own data. Where two places are meant to be "
            "one variable, give both the same name"
        )
    counts[member.position] += 1
    found.missing -= 1
    if not found.missing:
        del unfinished[number]
    return found.variable


def check_created(members: Sequence[Member]) -> None:
    """Check, at the end of a run, that all replicas have created equally many variables."""
    counts, _ = _creations.get(members[0].group, ([0], {}))
    if len(set(counts)) == 1:
        return
    each = [
        f"replica {member.replica_id}: {count}"
        for member, count in zip(members, counts, strict=True)
        if member is members[0] or count != counts[0]
    ]
    raise ValueError(
        f"replicas created different numbers of variables: {', '.join(each)}; every replica must create the same "
        "variables in the same order"
    )


# Components and assignments.

_numbers = itertools.count()


class State:
    """A variable's properties and components.

    The new value of a large variable is computed in worker threads and put in place by the event loop's thread.
    Assignments take effect in the order of their collectives: if the next one comes while a value is still being
    computed, because the replicas did not await the last one, the event loop's thread computes it, too (`settle`).
    """

    def __init__(self, spec: VariableSpec, strategy: Any) -> None:
        self.spec = spec
        self.mirrored = spec.mirrored
        self.strategy = strategy  # None: the default one
        self.replicas = replicas_of(strategy)
        self.subject = str(next(_numbers))  # tells it from others of its name in the order check
        self._requests: dict[Any, Request] = {}  # to create it or assign to it, by method and name
        self._components: list[Array] = []  # none until replica 0's initial value is there
        self._pending: Callable[[], Array] | None = None  # computes the value of an assignment still in worker threads

    def begin(self, value: Array, name: str | None, frame: FrameType) -> None:
        """Begin with an initial value, that of replica 0, for a variable created outside of replicas in a frame."""
        workers = self.replicas.several_workers
        if workers is None:
            self.fill(value)
        else:
            self.subject = workers.create(self, value, name, frame)

    def begin_in_replica(self, here: Participant, value: Array, name: str | None, frame: FrameType) -> None:
        """Begin with an initial value if it is replica 0's, for a variable that each replica creates."""
        workers, key = self.replicas.several_workers, ("create", name)
        if here.member.replica_id == 0:
            self.fill(value)
        if workers is not None:
            if key not in self._requests:
                self.subject, self._requests[key] = workers.creation(self, here.member, name)
            here.contribute(frame, self._requests[key], value)

    def put(self, components: Sequence[Array]) -> None:
        """Set the components: read-only arrays with memory of their own, of which replicas may share one."""
        self._components = list(components)

    def fill(self, component: Array) -> None:
        """Set all components to one, as `put` does."""
        self._components = [component] * self.replicas.local

    def present(self) -> list[Array]:
        """Return the components."""
        if not self._components:
            raise ReplicaContextError(
                f"the variable {self.spec.name!r} gets replica 0's initial value, which has not arrived yet; wait for "
                "it before the variable is used: in a replica e.g. with `await ctx.barrier()`, outside with any "
                "awaited call, e.g. `await strategy.run(fn)`"
            )
        return self._components

    def total(self) -> Array:
        """Return the value outside of replicas, possibly a component."""
        components = self.present()
        if self.mirrored:
            return components[0]
        if self.replicas.several_workers is not None:
            raise ValueError(
                f"the sync-on-read variable {self.spec.name!r} has components on other workers, which a read cannot "
                "wait for; write `await strategy.reduce(op, variable, axis=None)`"
            )
        if len(components) == 1:
            return components[0]
        if self.spec.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"the sync-on-read variable {self.spec.name!r} has aggregation NONE, so outside a replica it has no "
                "single value; read it in a replica, look at variable.values, or give it an aggregation"
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

    # In replicas.

    def request(self, variable: Variable, method: str, name: str | None) -> Request:
        """Return the request for an assignment to a mirrored variable; its result is the variable."""
        found = self._requests.get((method, name))
        if found is None:
            spec, workers = self.spec, self.replicas.several_workers
            call = spec.call(f"{spec.name}.{method}", self.subject, name, spec.op)
            over = None if workers is None else workers.assignment(self, partial(self._apply, variable, method))
            compute = partial(self._assign_all, variable, method)
            found = Request(spec.collective(ALL_REDUCE), call, compute, over_workers=over)
            self._requests[method, name] = found
        return found

    def _assign_all(
        self, variable: Variable, method: str, values: Sequence[Array], options: CommunicationOptions
    ) -> Any:
        """Assign the aggregate of all replicas' values."""
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
        self._pending = pending = lambda: updated(method, old, aggregated())

        def put() -> Variable:
            new = work.result()
            if self._pending is pending:
                self._pending = None
                self.fill(new)
            return variable

        return Work(work.phases, put)

    def settle(self) -> None:
        """Apply the last assignment, even if worker threads are still computing its value."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with suppress(ValueError):  # unequal values: that assignment raises the error itself
                self.fill(pending())

    def _apply(self, variable: Variable, method: str, value: Any) -> Variable:
        """Assign one value to a mirrored variable, whose components are then one array."""
        self.settle()
        self.fill(updated(method, self.present()[0], np.asarray(value)))
        return variable

    def update_own(self, position: int, method: str, value: Array) -> None:
        """Apply one replica's assignment to a sync-on-read variable."""
        components = self.present()
        components[position] = updated(method, components[position], value)

    # Outside of replicas.

    def assign_outside(self, variable: Variable, method: str, value: Any) -> None:
        """Assign outside of replicas, at once; see `Variable.assign`."""
        spec, size = self.spec, len(self.present())
        if self.mirrored and self.replicas.several_workers is not None:
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
        each, own = [self.converted(one) for one in given], self.replicas.share.own
        if self.mirrored:
            self._apply(variable, method, each[0] if is_one else spec.aggregate(each, first=own.start))
            return
        is_sum = spec.aggregation is VariableAggregation.SUM
        if method != "assign" and is_sum and self.strategy is not None:
            raise ValueError(
                f"{method} outside a replica is not for the sync-on-read variable {spec.name!r}, whose aggregation is "
                f"SUM: it is not clear whether the value counts once or for each component. Call {method} in a "
                "replica, or assign(variable.read_value() ± value)"
            )
        if is_one and method == "assign" and is_sum:
            each = _addends(each[0], self.replicas.share.replicas)[own.start : own.stop]
        elif is_one:
            each *= size
        self.put([updated(method, *pair) for pair in zip(self.present(), each, strict=True)])


class Variable(ArrayLike):
    """State of a strategy, with one component for each replica. It can be used as an array.

    A **mirrored** variable (``synchronization`` "auto" or "on_write") has the same value on every replica. A
    **sync-on-read** variable ("on_read") has a value on each replica. A read in a replica gives the replica's own
    component, elsewhere the aggregate. An assignment in a replica is awaited, elsewhere it is not::

        await variable.assign_add(x)      # in a replica; for a mirrored variable a collective
        variable.assign_add(x)            # anywhere else

    A variable belongs to the strategy under whose scope it is created. In a replica function, every replica must create
    the same variables in the same order; each is made once for all replicas, with replica 0's initial value.

    Args:
        initial_value: an array or number, or a function that returns one. It is copied.
        trainable: whether an optimiser should change it; None: True, unless it is sync-on-read.
        name: the name in errors and reports; None: "Variable". If replicas create one variable in different places of
            the function, they must give it the same name.
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
        name = checked_name(name)
        value = _initial(initial_value() if callable(initial_value) else initial_value, dtype)
        when, how = VariableSynchronization(synchronization), VariableAggregation(aggregation)
        if when is VariableSynchronization.NONE:
            raise ValueError("synchronization NONE is for variables without a strategy; use 'on_write' or 'on_read'")
        if when is VariableSynchronization.AUTO:
            when = VariableSynchronization.ON_WRITE
        trained = when is not VariableSynchronization.ON_READ if trainable is None else bool(trainable)
        spec = VariableSpec(name or "Variable", value.shape, value.dtype, trained, when, how)
        spec.check()
        here, frame = current.get(), _getframe(1)
        make = partial(cls._with, spec, strategy_in_force(here))
        if not isinstance(here, Participant):
            variable = make()
            state_of(variable).begin(value, name, frame)
            return variable
        here.check("Variable(…)")
        here = here.of_run or here
        variable = _next_creation(here.member, spec, place(frame.f_code, frame.f_lasti), name is not None, make)
        state_of(variable).begin_in_replica(here, value, name, frame)
        return variable

    @classmethod
    def _with(cls, spec: VariableSpec, strategy: Any) -> Self:
        variable = super().__new__(cls)
        variable._state = State(spec, strategy)
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
            ReplicaContextError: the variable belongs to another strategy than the one in force, or replica 0 has not
                created it yet, which gives the initial value.
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
        """Return the current replica, None outside of replicas, after checking that the strategies agree."""
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

        In a replica the call returns an awaitable of the variable. For a mirrored variable it is a collective that
        aggregates the replicas' values; with aggregation NONE they must be equal. For a sync-on-read variable the call
        changes the replica's own component at once.

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
        name, state = checked_name(name), self._state
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
        variable = self._with(self._state.spec, self._state.strategy)
        state_of(variable).put(self._state.present())
        return variable

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


def require_own(variable: Variable, strategy: Any) -> None:
    """Check that a variable was created under a strategy."""
    if state_of(variable).strategy is not unless_default(strategy):
        raise ReplicaContextError(f"{variable!r} was not created under {strategy!r}; create it in its scope()")


def as_distributed(leaf: Any, strategy: Any) -> Any:
    """Return the components of a strategy's variable as a mirrored or per-replica value; anything else unchanged.

    A variable without a strategy is one value, which may be read anywhere.
    """
    if not isinstance(leaf, Variable):
        return leaf
    if state_of(leaf).strategy is None:
        return leaf.read_value()
    require_own(leaf, strategy)
    return Mirrored(leaf.values) if state_of(leaf).mirrored else PerReplica(leaf.values)


VariableSynchronization.__module__ = VariableAggregation.__module__ = Variable.__module__ = "aiodist"
