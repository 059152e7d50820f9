"""The kinds of collectives as signatures have them: what they compute, and what of them is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from aiodist._arrays.leaves import Spec
from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives import kinds as computed
from aiodist._collectives.kinds import Collective, Detail
from aiodist._core.report import Reason
from aiodist.collective.signature import DETAIL, DTYPES, KIND, OP, SHAPES, STRUCTURE, TYPES, Signature
from aiodist.workers import crossing
from aiodist.workers.crossing import Crossing


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of collective.

    Attributes:
        name: as it is called on a replica context.
        detail: what the signature's detail is, and so what is wrong when that differs.
        combine: for kinds of their own, from signature, the replicas' values in replica order and the options, to the
            result, or the `Work` that it takes; None where a function of the user's makes it.
        computes: what it computes, where that stands in the table of collectives.
        across: plans how it crosses to other workers; None where a function of the user's makes the result.
        token: tells kinds of one name apart, where several processes must agree on which is meant.
    """

    name: str
    detail: Reason
    combine: Callable[[Signature, list[Any], CommunicationOptions], Any] | None = None
    computes: computed.Kind | None = None
    across: Crossing | None = None
    token: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def shared(self) -> bool:
        """Whether one result serves all replicas; else there is one for each."""
        return self.computes is None or self.computes.shared

    @property
    def merges(self) -> bool:
        """Whether a function of the user's makes the result."""
        return self.combine is None and (self.computes is None or self.computes.detail is Detail.FUNCTION)

    def check(self, signature: Signature, size: int) -> None:
        """Check that so many replicas can carry a signature out.

        Raises:
            TypeError, ValueError: as `Collective.check`.
        """
        if self.computes is not None:
            collective_of(signature).check(size)


ALL_REDUCE = Kind("all_reduce", Reason.AXIS, computes=computed.ALL_REDUCE, across=crossing.all_reduce)
ALL_GATHER = Kind("all_gather", Reason.AXIS, computes=computed.ALL_GATHER, across=crossing.all_gather)
BROADCAST = Kind("broadcast", Reason.SOURCE, computes=computed.BROADCAST, across=crossing.broadcast)
REDUCE_SCATTER = Kind("reduce_scatter", Reason.AXIS, computes=computed.REDUCE_SCATTER, across=crossing.reduce_scatter)
ALL_TO_ALL = Kind("all_to_all", Reason.AXIS, computes=computed.ALL_TO_ALL, across=crossing.all_to_all)
BARRIER = Kind("barrier", Reason.AXIS, computes=computed.BARRIER, across=crossing.barrier)
NEW_GROUP = Kind("new_group", Reason.AXIS, computes=computed.NEW_GROUP, across=crossing.barrier)
MERGE_CALL = Kind("merge_call", Reason.MERGE_FN, computes=computed.MERGE_CALL)


@lru_cache(maxsize=1024)
def collective_of(signature: Signature) -> Collective:
    """Return what a signature asks for, of a kind that stands in the table of collectives."""
    kind = signature[KIND].computes
    single, detail, marks = signature[STRUCTURE] is None, signature[DETAIL], signature[TYPES]
    if kind.detail in (Detail.NONE, Detail.FUNCTION):
        detail = None
    elif kind.detail is not Detail.SOURCE and single:
        detail = (detail,)
    if signature[SHAPES] is None or kind.plan is None:
        return Collective(kind, detail=detail)
    if single:
        spec = Spec((signature[SHAPES],), (signature[DTYPES],), (marks,), single=True)
    else:
        spec = Spec(signature[SHAPES], signature[DTYPES], marks or (None,) * len(signature[SHAPES]))
    return Collective(kind, signature[OP], detail, spec)
