"""The state of a variable: its components, and the assignments that change them.

Components are arrays that never change: an assignment puts others in their place. What replicas assign to a mirrored
variable is a collective like any other, of a kind that belongs to the variable and the method (`Request`): calls for
two variables never combine, and a report names the variable. What they assign to a sync-on-read variable is applied to
their own components, by the call.

Worker threads make the new value of a large variable, and the event loop's thread puts it in place. Assignments take
effect in the order of their collectives: where a replica has issued the next one without awaiting the last, and its
value is still being made, the event loop's thread makes it, too (`State.settle`). Nothing but such a program ever does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from aiodist._arrays.host import Array
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import DistributedValues, Mirrored, PerReplica
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import ALL_REDUCE, Collective
from aiodist._collectives.work import Work
from aiodist._core.errors import ReplicaContextError
from aiodist._runtime.current import current
from aiodist._runtime.participant import Participant
from aiodist._runtime.requests import Request
from aiodist._strategy.aggregation import (
    VariableAggregation,
    VariableSynchronization,
    aggregate,
    converted,
    parts,
    updated,
)
from aiodist._strategy.creation import Spec
from aiodist._strategy.scope import replicas_of, require_all_workers
from aiodist_kernels import policy


class State:
    """What a variable is, and its components.

    Attributes:
        mirrored: it has the same value on every replica.
        strategy: whose it is; None: the default one's.
        subject: tells it from others of its name.
        requests: what replicas ask for when they create it or assign to it, by method and name.
    """

    __slots__ = ("_change", "_components", "mirrored", "requests", "spec", "strategy", "subject")

    def __init__(self, spec: Spec, strategy: Any, components: Sequence[Array]) -> None:
        self.spec = spec
        self.mirrored = spec.synchronization is VariableSynchronization.ON_WRITE
        self.strategy = strategy
        self.subject = str(next(_numbers))
        self.requests: dict[tuple[str, str | None], Request] = {}
        self._change: Callable[[], Array] | None = None  # makes what a large assignment is about to put in place
        self.put(components)

    @property
    def sharing(self) -> Any:
        """The `across_workers.Workers` that have other components; None where there are none."""
        return None if self.strategy is None else replicas_of(self.strategy).sharing

    def put(self, components: Sequence[Array]) -> None:
        """Set the components: read-only arrays, whose memory is nobody else's; replicas may have one in common."""
        self._components = list(components)

    def present(self) -> list[Array]:
        """Return the components."""
        if not self._components:
            inside = isinstance(current.get(), Participant)
            how = "with any awaited call of the strategy, e.g. `await strategy.run(fn)`"
            raise ReplicaContextError(
                f"the variable {self.spec.name!r} gets replica 0's initial value, which has not come yet; wait for it "
                f"before the variable is used, {'e.g. with `await ctx.barrier()`' if inside else how}"
            )
        return self._components

    def total(self) -> Array:
        """Return the value outside of replicas; it may be a component."""
        components = self.present()
        if not self.mirrored and self.sharing is not None:
            raise ValueError(
                f"the sync-on-read variable {self.spec.name!r} has components on other workers, which a read cannot "
                "wait for; outside a replica write `await strategy.reduce(op, variable, axis=None)`, or look at "
                "variable.values"
            )
        if self.mirrored or len(components) == 1:
            return components[0]
        if self.spec.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"the sync-on-read variable {self.spec.name!r} has aggregation NONE, so outside a replica it has no "
                "one value; read it in a replica, look at variable.values, or give it an aggregation"
            )
        return aggregate(self.spec.aggregation, components, self.spec.name)

    def converted(self, value: Any) -> Array:
        """Return a value that is assigned, as an array of the variable's shape and dtype; maybe the value itself."""
        return converted(value, self.spec.shape, self.spec.dtype, self.spec.name)

    def settle(self) -> None:
        """Have the last assignment take effect, though a thread may still be making its value."""
        make, self._change = self._change, None
        if make is not None:
            with suppress(ValueError):  # of replicas that assign different values, which it tells them by itself
                self.put([make()] * len(self._components))

    # Assignments in replicas.

    def request(self, variable: object, method: str, name: str | None) -> Request:
        """Return what replicas ask for when they assign to a mirrored variable: the variable."""
        found = self.requests.get((method, name))
        if found is not None:
            return found
        spec, op = self.spec, self.spec.aggregation.reduce_op
        call = spec.call(f"{spec.name}.{method}", self.subject, name, op)
        collective = Collective(ALL_REDUCE, op, None, spec.value)
        workers = None if self.strategy is None else replicas_of(self.strategy).assigning
        over = None if workers is None else workers.over_workers(self, partial(self._apply, variable, method))
        made = Request(collective, call, partial(self._meet, variable, method), over_workers=over)
        return self.requests.setdefault((method, name), made)

    def _meet(self, variable: object, method: str, values: Sequence[Array], options: CommunicationOptions) -> Any:
        """Apply what all replicas assign."""
        self.settle()
        spec = self.spec
        if not policy.blocks(values[0].nbytes * (len(values) + 2)):
            self._update_all(method, aggregate(spec.aggregation, values, spec.name, options.accumulate))
            return variable
        old = self.present()[0]
        aggregated = partial(aggregate, spec.aggregation, values, spec.name, options.accumulate)
        op, total = spec.aggregation.reduce_op, Work([], aggregated)
        if op is not None:
            collective = Collective(ALL_REDUCE, op, None, spec.value)
            found = executor(collective, len(values), (), options.accumulate).run(values)
            total = found if type(found) is Work else Work([], lambda: found)
        work = total.then(lambda value: updated(method, old, value, fresh=op is not None))
        self._change = change = lambda: updated(method, old, aggregated())

        def put() -> Any:
            new = work.result()
            if self._change is change:
                self._change = None
                self.put([new] * len(self._components))
            return variable

        return Work(work.phases, put)

    def _apply(self, variable: object, method: str, value: Any) -> Any:
        """Apply what the replicas of all workers assign."""
        self.settle()
        self._update_all(method, np.asarray(value))
        return variable

    def _update_all(self, method: str, value: Array) -> None:
        """Update the components of a mirrored variable, which are equal: one array serves all."""
        old = self.present()
        self.put([updated(method, old[0], value)] * len(old))

    def update_own(self, position: int, method: str, value: Array) -> None:
        """Apply what one replica assigns to a sync-on-read variable."""
        components = self.present()
        components[position] = updated(method, components[position], value)

    # Assignments from outside.

    def assign_outside(self, method: str, value: Any) -> None:
        """Assign outside of replicas, at once; see `Variable.assign`."""
        self.settle()
        size = len(self.present())
        if self.mirrored and self.sharing is not None:
            self._check_assignable(method, value)
        if isinstance(value, DistributedValues):
            if len(value.values) != size:
                raise ValueError(
                    f"the variable {self.spec.name!r} has {size} components, one for each replica, got a "
                    f"{type(value).__name__} with {len(value.values)}"
                )
            if isinstance(value, Mirrored):
                value = value.values[0]  # a copy for each replica of one value, not what each of them would assign
        if self.mirrored and not isinstance(value, DistributedValues):
            self._update_all(method, self.converted(value))
            return
        each = [self.converted(v) for v in (value.values if isinstance(value, DistributedValues) else (value,))]
        share = None if self.strategy is None else replicas_of(self.strategy).share
        first = 0 if share is None else share.mine.start
        if self.mirrored:
            self._update_all(method, aggregate(self.spec.aggregation, each, self.spec.name, first=first))
            return
        if method != "assign":
            self._check_counted(method, size)
        if not isinstance(value, DistributedValues):
            if method == "assign":
                replicas = size if share is None else share.replicas
                each = parts(self.spec.aggregation, each[0], replicas)[first : first + size]
            else:
                each *= size
        self.put([updated(method, *pair) for pair in zip(self.present(), each, strict=True)])

    def _check_assignable(self, method: str, value: Any) -> None:
        """Check that what is assigned can be the same on all workers."""
        require_all_workers()
        if isinstance(value, PerReplica):
            raise ValueError(  # noqa: TRY004  (the type is right elsewhere, and this value is not)
                f"{method} outside a replica is not for a per-replica value where the mirrored variable "
                f"{self.spec.name!r} has components on other workers, which it cannot wait for: the other replicas' "
                f"values are there. Write `variable.{method}(await strategy.reduce(op, value, axis=None))`, or "
                f"{method} in a replica"
            )

    def _check_counted(self, method: str, size: int) -> None:
        if self.strategy is None:  # one component, outside of any strategy: there is nothing to distinguish
            return
        if self.spec.aggregation is VariableAggregation.SUM:
            raise ValueError(
                f"{method} outside a replica is not for the sync-on-read variable {self.spec.name!r}, whose "
                f"aggregation is SUM: with {size} components it is not clear whether the value counts once or for "
                f"each. Call {method} in a replica, or assign(variable.read_value() ± value)"
            )


_numbers = itertools.count()
