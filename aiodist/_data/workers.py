"""The agreement of several workers on the next step of a dataset, of which each has a pipeline of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiodist._core.call import Call
from aiodist._data.batches import without_rows
from aiodist._workers.channel import Channel
from aiodist._workers.exchange import gather_objects
from aiodist._workers.record import Found
from aiodist._workers.transport import Steps

if TYPE_CHECKING:
    from aiodist._workers.team import Team

_WHO_HAS_ONE: Final = Call("next step of a dataset")
_PATTERNS: Final = Call("last steps of a dataset")


async def fill_up(team: Team, batches: Sequence[Any]) -> Sequence[Any]:
    """Return this worker's batches of a step; one of no rows where only other workers have some; none at the end.

    Args:
        team: the workers.
        batches: those that this worker has taken for the step, perhaps none.

    Raises:
        CollectiveError: the workers do not meet.
        TypeError, ValueError: replicas are left without a batch, and batches cannot be cut; see `batches.cut`.
    """
    if team.layout.workers == 1:
        return batches
    code = fill_up.__code__
    have = await team.perform(_WHO_HAS_ONE, code, 0, partial(_gather, bool(batches)))
    if all(have) or not any(have):
        return batches
    pattern = without_rows(batches[0]) if batches else None
    patterns = await team.perform(_PATTERNS, code, 0, partial(_gather, (bool(batches), pattern)))
    return batches or next([found] for has_batch, found in patterns if has_batch)


def _gather(own: Any, channel: Channel, found: Found) -> Steps[list[Any]]:  # noqa: ARG001  (nothing is accumulated)
    return (yield from gather_objects(channel.communicator, own))
