"""Failing: a call that goes wrong on this worker before its record is brought, for want of memory say.

Who waits for it here raises what went wrong there and then, may catch that, and call on. So the other workers must hear
of it, or they would put what they bring together with the next call. The record is brought all the same, and says that
the call has failed (`Flag.FAILED`). The records then tell every worker the same:

- it has failed on all that make it: each has raised its own error, and they go on with the next call;
- it has failed on some, or the calls are not the same: nobody carries it out, and those give the strategy up.

What was rejected: to break off at once, as where a step fails that others are in the midst of (an error that is the
same everywhere could not be caught).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiodist.replica.awaiting import InterruptedStep
from aiodist.workers.calls import digest
from aiodist.workers.lane import Disagreement
from aiodist.workers.record import Flag
from aiodist.workers.transfers import Steps

if TYPE_CHECKING:
    from aiodist.collective.rendezvous import Rendezvous
    from aiodist.replica.carrying import Carrier

_UNKNOWN = digest("a call of which no digest can be made")


def bring_failure(carrier: Carrier, meeting: Rendezvous, error: Exception) -> Steps[None]:
    """Meet the other workers in a call that has failed here; return where it has on all that make it.

    Raises:
        InterruptedStep: some of them could have carried it out, or make another call: the strategy has ended.
    """
    group, lane = carrier.group, carrier.lane
    meeting.fail(error)
    group.failed = meeting
    group.keep()
    carrier.fail_at_once(meeting, error)
    try:
        yield from lane.agree(_digest_of(carrier, meeting), flags=Flag.FAILED)
    except Disagreement:
        if not meeting.complete:
            carrier.finish_with(meeting, error)
        carrier.team.give_up(error)
        raise InterruptedStep from error
    lane.in_exchange = False
    carrier.moving = True
    group.failed = None


def _digest_of(carrier: Carrier, meeting: Rendezvous) -> bytes:
    try:
        return carrier.team.digests.of(meeting.call)
    except Exception:  # noqa: BLE001  (which may be what has failed)
        return _UNKNOWN
