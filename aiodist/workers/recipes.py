"""Recipes: how a call is planned that comes again, all being known of it but the values.

A training loop makes the same calls again and again. What does not depend on the values is found out once for a call
and a layout; what is kept is never changed, and holds no memory that a result lies in. Arrays of one dtype, the
commonest values, go ways of their own, which give what the others give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

from aiodist.collective.signature import DTYPES, KIND, OP, SHAPES, STRUCTURE, TYPES, Signature
from aiodist.workers.alone import Alone, AloneReduction
from aiodist.workers.crossing import NOTHING, Plan, Span, all_reduce
from aiodist.workers.layout import Layout
from aiodist.workers.record import ALL_RECEIVE_ALL, PAYLOAD
from aiodist.workers.small import SmallReduction
from aiodist_kernels import Accumulate
from aiodist_kernels.rules import rule_for

Recipe: TypeAlias = Callable[[Sequence[Any]], Plan]
"""Plans a collective of what the local replicas bring."""


def recipe_of(signature: Signature, accumulate: Accumulate, span: Span) -> Recipe:
    """Return how a call is planned.

    Args:
        signature: the call's.
        accumulate: the accumulator.
        span: the workers.
    """
    across = signature[KIND].across
    if across is None:  # a merge function of the user's makes the result
        return _nothing
    if across is all_reduce and signature[TYPES] is None and not span.ordered:
        found = _of_arrays(signature, accumulate, span.layout)
        if found is not None:
            return found
    return lambda values: across(signature, values, accumulate, span)


def _of_arrays(signature: Signature, accumulate: Accumulate, layout: Layout) -> Recipe | None:
    """Return how arrays of one dtype are reduced, where there is a way of their own for them."""
    single = signature[STRUCTURE] is None
    dtypes, shapes = signature[DTYPES], signature[SHAPES]
    if single:
        dtypes, shapes = (dtypes,), (shapes,)
    if not dtypes or any(dtype != dtypes[0] for dtype in dtypes):
        return None
    rule = rule_for(signature[OP], dtypes[0], accumulate)
    nbytes = sum(map(prod, shapes)) * rule.accumulator.itemsize
    if dtypes[0] != rule.dtype or rule.dtype.isbuiltin != 1 or not nbytes:
        return None
    if nbytes > PAYLOAD:
        return _alone(Alone(rule, shapes, layout), single=single)
    if single and layout.workers <= ALL_RECEIVE_ALL:
        return lambda values: Plan([SmallReduction(signature[OP], rule, values, layout.replicas)], _only)
    return None


class Straight:
    """How what one local replica brings is reduced, in one accumulator: a recipe for it.

    Args:
        known: what is known of it.
        single: it is an array, and no nest.
    """

    __slots__ = ("known", "single")

    def __init__(self, known: Alone, *, single: bool) -> None:
        self.known = known
        self.single = single

    def __call__(self, values: Sequence[Any]) -> Plan:
        """Return the plan."""
        reduction = self.reduction(values)
        return Plan([reduction], _only if self.single else _all, early=reduction.get_ready)

    def reduction(self, values: Sequence[Any]) -> AloneReduction:
        """Return the reduction alone."""
        return AloneReduction(self.known, values if self.single else values[0])


def _alone(known: Alone, *, single: bool) -> Recipe | None:
    return Straight(known, single=single) if known.layout.local == 1 and known.serves else None


def _nothing(values: Sequence[Any]) -> Plan:  # noqa: ARG001  (a recipe's)
    return NOTHING


def _only(results: Sequence[Any]) -> Any:
    return results[0][0]


def _all(results: Sequence[Any]) -> Any:
    return results[0]
