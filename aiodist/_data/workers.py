"""The agreement of several workers on the next step of a dataset, of which each has a pipeline of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist._core.report import Reason
from aiodist._data.batches import without_rows
from aiodist.collective.kinds import Kind
from aiodist.collective.signature import Signature
from aiodist.workers.crossing import Crossing, Plan, Span, reduce_columns
from aiodist.workers.objects import Gathering
from aiodist_kernels import Accumulate, ReduceOp

if TYPE_CHECKING:
    from aiodist.replica.team import Team


async def fill_up(team: Team, batches: Sequence[Any]) -> Sequence[Any]:
    """Return this worker's batches of a step; one of no rows where only other workers have some; none at the end.

    Args:
        team: the workers.
        batches: those that this worker has taken for the step, perhaps none.

    Raises:
        CollectiveError: the workers do not meet.
        TypeError, ValueError: replicas are left without a batch, and batches cannot be cut; see `batches.cut`.
    """
    if team.span.layout.workers == 1:
        return batches
    code = fill_up.__code__
    somebody_has, somebody_has_none = await team.perform(_WHO_HAS_ONE, code, 0, bool(batches))
    if not somebody_has or not somebody_has_none:
        return batches
    pattern = without_rows(batches[0]) if batches else None
    patterns = await team.perform(_PATTERNS, code, 0, (bool(batches), pattern))
    return batches or next([found] for has_batch, found in patterns if has_batch)


def _plan_who(_: Any, values: Sequence[bool], accumulate: Accumulate, span: Span) -> Plan:
    """Plan to tell whether anybody has a batch, and whether anybody has none."""
    mine = np.array([values[0], not values[0]], np.int32)
    plan = reduce_columns(ReduceOp.MAX, [[mine]], [None], accumulate, span._replace(ordered=False))
    return plan._replace(finish=lambda results: plan.finish(results)[0].tolist())


def _plan_patterns(_: Any, values: Sequence[Any], __: Any, ___: Span) -> Plan:
    """Plan to tell what batches look like."""
    return Plan([Gathering(values[0])], lambda results: results[0])


def _signature(name: str, across: Crossing) -> Signature:
    return Kind(name, Reason.AXIS, None, across=across), None, None, None, None, None, None, None, None


_WHO_HAS_ONE = _signature("next step of a dataset", _plan_who)
_PATTERNS = _signature("last steps of a dataset", _plan_patterns)
