"""How a worker ends: what it tells the others, and whether its error is an echo of what another one has done.

A worker that ends while it is needed makes the others fail, and they may be gone before it is. So each tells `aiodist
run` when its error is an echo, and the job ends with the exit code of a worker whose own it was.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Final

from aiodist._core.errors import IncompleteCollectiveError, WorkerLostError
from aiodist.workers.meeting import Stage, tell

ENDED: Final = "has ended"
GAVE_UP: Final = "has given up"


def last_error() -> BaseException | None:
    """Return the error that ends the program; None where none has been shown, as of a program that calls `sys.exit`."""
    return getattr(sys, "last_value", None)


def farewell_of(error: BaseException | None) -> str:
    """Return what the others are told of this worker."""
    return ENDED if error is None else f"{ENDED}: {type(error).__name__}: {error}".partition("\n")[0]


def tell_of_echo(error: BaseException | None, own: Collection[int]) -> None:
    """Tell the launcher where an error is an echo of what others have done, by the ids of this worker's replicas."""
    if is_echo(error, own):
        tell(Stage.ECHO)


def is_echo(error: BaseException | None, own: Collection[int]) -> bool:
    """Return whether an error says that replicas of other workers have ended, and none of this one's."""
    if not isinstance(error, (WorkerLostError, IncompleteCollectiveError)):
        return False
    ended = [replica.replica_id for replica in error.report.replicas if replica.state.ended]
    return bool(ended) and not any(replica_id in own for replica_id in ended)
