"""Variables that replicas create: the k-th creation of every replica is the same variable, made once.

Its value is replica 0's. Creating one is not a collective, nobody waits in it: what replicas say of their k-th variable
is compared as each comes by, and the end of the run shows whether all have created as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from aiodist._arrays.leaves import Spec as ValueSpec
from aiodist._core.call import Call, OrderCheck, place
from aiodist._core.ledger import Group, Member
from aiodist._strategy.aggregation import VariableAggregation, VariableSynchronization
from aiodist_kernels import ReduceOp


class Spec(NamedTuple):
    """What a variable is, beside its value; for one variable the replicas' are equal."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    @property
    def value(self) -> ValueSpec:
        """What a value of it is to a collective."""
        return ValueSpec((self.shape,), (self.dtype,), (None,), single=True)

    def call(self, kind: str, subject: str | None, name: str | None, op: ReduceOp | None = None) -> Call:
        """Return a call of a kind on a value of it."""
        op_name = None if op is None else op.name
        shapes, dtypes = (self.shape,), (self.dtype.name,)
        return Call(kind, op=op_name, subject=subject, name=name, shapes=shapes, dtypes=dtypes, arrays=("array",))


class Site(NamedTuple):
    """Where a replica creates a variable; ``named`` where a name of the user's stands in for the place."""

    replica_id: int
    position: int
    code: CodeType
    offset: int
    named: bool

    def __str__(self) -> str:
        return f"replica {self.replica_id} at {place(self.code, self.offset).location}"


class Creations:
    """The variables that the replicas of one run have created so far."""

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self._unfinished: dict[int, tuple[Any, Spec, Site]] = {}

    def known(self, group: Group, spec: Spec, site: Site) -> Any:
        """Return the variable that another replica has already created as this replica's next one; None if none has."""
        number = self.counts[site.position]
        if number not in self._unfinished:
            return None
        variable, their_spec, their_site = self._unfinished[number]
        difference = _difference(group, their_spec, their_site, spec, site)
        if difference is not None:
            raise ValueError(
                f"replicas create different variables as their #{number}: {difference}. Every replica must create the "
                "same variables in the same order; create them under strategy.scope(), or outside of branches on a "
                "replica's own data"
            )
        return variable

    def add(self, variable: object, spec: Spec, site: Site) -> None:
        """Note that a replica has created its next variable."""
        number = self.counts[site.position]
        self.counts[site.position] += 1
        self._unfinished.setdefault(number, (variable, spec, site))
        if min(self.counts) > number:
            del self._unfinished[number]


_creations: WeakKeyDictionary[Group, Creations] = WeakKeyDictionary()


def creations_of(group: Group) -> Creations:
    """Return the variables that the replicas of a run have created."""
    found = _creations.get(group)
    if found is None:
        found = _creations[group] = Creations(len(group.members))
    return found


def check_complete(members: Sequence[Member]) -> None:
    """Check, at the end of a run, that every replica has created as many variables as the others."""
    found = _creations.get(members[0].group)
    if found is None or len(set(found.counts)) == 1:
        return
    counts = ", ".join(
        f"replica {member.replica_id}: {count}"
        for member, count in zip(members, found.counts, strict=True)
        if member.position == 0 or count != found.counts[0]
    )
    raise ValueError(
        f"replicas created different numbers of variables: {counts}; every replica must create the same variables in "
        "the same order"
    )


def _difference(group: Group, theirs: Spec, their_site: Site, mine: Spec, my_site: Site) -> str | None:
    for field, own, other in zip(Spec._fields, mine, theirs, strict=True):
        if own != other:
            return f"{field} is {_text(other)} for {their_site}, {_text(own)} for {my_site}"
    if my_site.named or group.ledger.order_check is OrderCheck.SIGNATURE:
        return None
    if place(my_site.code, my_site.offset)[:3] == place(their_site.code, their_site.offset)[:3]:
        return None
    return f"{their_site}, {my_site}; where the places are meant to be one variable, give both the same name"


def _text(value: object) -> str:
    return repr(value) if type(value) is str else str(value)
