"""The errors of aiodist. Wrong arguments raise the built-in `TypeError` and `ValueError` at the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodist._core.report import CollectiveReport


class CollectiveError(RuntimeError):
    """A collective cannot complete. Raised at the await of every replica that waits, and by `Strategy.run`.

    Attributes:
        report: which replicas differ, in what, and where.
    """

    def __init__(self, report: CollectiveReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return str(self.report)

    def __repr__(self) -> str:
        """Return the first line alone, because asyncio logs the repr of a task that nobody awaits on one line."""
        return f"{type(self).__name__}({str(self).partition(chr(10))[0]!r})"


class CollectiveMismatchError(CollectiveError):
    """The replicas are at different collectives: the order, kind, reduce op, shape, dtype or call site differs.

    Let every replica issue the same calls in the same order. If two branches are meant to meet in one collective, give
    both calls the same ``name``.
    """


class IncompleteCollectiveError(CollectiveError):
    """A replica ended without a collective, or was cancelled out of it, while others wait in it.

    Let every replica make the same number of calls, or let those that run out of data await ``ctx.join()``. Put
    timeouts around the whole run, not around one replica's collective.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """``timeout_seconds`` passed before every replica arrived. The report says where each missing replica is."""


class WorkerLostError(CollectiveError):
    """A worker's process has died, has stopped, has ended, or cannot be reached. This ends the strategy.

    Raised at the await of every replica that waits, and by every later use of the strategy.
    """


class DeadlockError(CollectiveError):
    """Replicas wait for each other, and nothing else can wake them. The report says who waits for what.

    Raised at once if each waits in another group's collective (reason "cycle"), and after a second without progress if
    locks or child tasks are involved (reason "deadlock"). The event loop of ``aiodist check`` and `aiodist.testing`
    also proves deadlocks in which replicas wait for an event, a queue or a future that nobody can complete.
    """


class ReplicaContextError(RuntimeError):
    """A call was made in the wrong context: outside a replica, in another replica, or under another strategy.

    Also raised after the run has ended, and where a replica awaits another replica's handle.
    """


class DeviceNotFoundError(ValueError):
    """This machine does not have the device. The text lists the devices that it has."""


class StallWarning(RuntimeWarning):
    """No replica of a run has made progress for 10 s, and one of them waits in a collective.

    The text says who waits for what. It is not an error, because what they wait for, such as a slow download, may still
    come. The environment variable ``AIODIST_STALL_SECONDS`` sets the time in seconds; 0 turns the warning off.
    """


for _error in [each for each in vars().values() if isinstance(each, type)]:
    _error.__module__ = "aiodist"  # a traceback shows the name that a user imports
