"""Recipes: how a call is planned that comes again, all being known of it but the values.

A training loop makes the same calls again and again. What does not depend on the values is found out once for a call
and a layout; what is kept is never changed, and holds no memory that a result lies in. A single array, the commonest
value, goes ways of its own, which give what the others give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from aiodist.collective.signature import DTYPES, KIND, OP, SHAPES, STRUCTURE, TYPES, Signature
from aiodist.workers.crossing import NOTHING, Plan, Span, all_reduce
from aiodist.workers.record import ALL_RECEIVE_ALL, PAYLOAD
from aiodist.workers.single import Single, SingleReduction
from aiodist.workers.small import SmallReduction
from aiodist_kernels import Accumulate, ReduceOp
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
    if across is all_reduce and signature[STRUCTURE] is None and signature[TYPES] is None and not span.ordered:
        found = _of_an_array(signature, accumulate, span)
        if found is not None:
            return found
    return lambda values: across(signature, values, accumulate, span)


def _of_an_array(signature: Signature, accumulate: Accumulate, span: Span) -> Recipe | None:
    op, dtype, shape, layout = signature[OP], signature[DTYPES], signature[SHAPES], span.layout
    rule = rule_for(op, dtype, accumulate)
    if dtype != rule.dtype or dtype.isbuiltin != 1:
        return None
    size = 1
    for length in shape:
        size *= length
    nbytes = size * rule.accumulator.itemsize
    if 0 < nbytes <= PAYLOAD and layout.workers <= ALL_RECEIVE_ALL:
        return lambda values: Plan([SmallReduction(op, rule, values, layout.replicas)], _only)
    if nbytes <= PAYLOAD or layout.local > 1 or not rule.dtype == rule.accumulator == rule.result:
        return None
    single = Single(ReduceOp.SUM if op is ReduceOp.MEAN else op, rule, shape, layout)
    return lambda values: Plan([SingleReduction(single, values[0])], _only)


def _nothing(values: Sequence[Any]) -> Plan:  # noqa: ARG001  (a recipe's)
    return NOTHING


def _only(results: Sequence[Any]) -> Any:
    return results[0][0]
