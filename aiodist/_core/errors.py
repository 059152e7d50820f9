"""The errors of aiodist: few, each saying who raises it and what to do.

Argument errors are the built-in `TypeError` and `ValueError`, raised at the call that made them.
"""

from __future__ import annotations

from aiodist._core.report import CollectiveReport


class CollectiveError(RuntimeError):
    """Replicas did not meet in a collective. Raised at the await of every replica that waits, and out of `run`.

    Attributes:
        report: who differs, in what, and where.
    """

    def __init__(self, report: CollectiveReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return str(self.report)

    def __repr__(self) -> str:
        """Return the first line alone: asyncio logs this of a task that nobody awaits, on one line."""
        return f"{type(self).__name__}({str(self).partition(chr(10))[0]!r})"


class CollectiveMismatchError(CollectiveError):
    """The replicas are at different collectives: another order, kind, reduce op, shape, dtype or call site.

    Make every replica issue the same calls in the same order; where two branches are meant to meet in one
    collective, give both calls the same ``name``.
    """


class IncompleteCollectiveError(CollectiveError):
    """A replica ended without the collective, or was cancelled out of it, while others wait in it."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """``timeout_seconds`` passed before every replica had arrived. The report says where each missing one is now."""


class WorkerLostError(CollectiveError):
    """A worker of the job died, was stopped, was cut off, or ended. The strategy is of no use then.

    Raised at the await of every replica that waits, and by every later use of the strategy on several workers.
    """


class DeadlockError(CollectiveError):
    """Nothing can run any more: what every replica waits for can only come from one that waits, too.

    Raised on an event loop that can prove it: that of ``aiodist check`` and `aiodist.testing`. No timer is pending, and
    no thread, subprocess or socket is at work. The report says who waits for what, and shows the cycle where there is
    one. Raised by `MultiWorkerMirroredStrategy`, too, where another worker waits in an earlier strategy for the one
    that makes this; and by what workers wait in, where each does with another strategy, for the others have made or
    used them in another order.
    """


class ReplicaContextError(RuntimeError):
    """A call in the wrong context: outside a replica, in another's, after the run, or under another strategy."""


class DeviceNotFoundError(ValueError):
    """A device was asked for that this machine does not have. The text lists those that exist."""


class StallWarning(RuntimeWarning):
    """All replicas of a run have stood still for a while, one of them in a collective.

    The text says who waits for what. It is no error: what they wait for may yet come, a slow download, say. The time
    is that of the environment variable ``AIODIST_STALL_SECONDS``, 10 by default; 0 turns the warning off.
    """


for _error in (
    StallWarning,
    CollectiveError,
    CollectiveMismatchError,
    IncompleteCollectiveError,
    CollectiveTimeoutError,
    WorkerLostError,
    DeadlockError,
    ReplicaContextError,
    DeviceNotFoundError,
):
    _error.__module__ = "aiodist"  # a traceback shows the name that a user imports
del _error
