"""What this worker tells `aiodist run`: it waits to meet the others, they have met, it ends, its error is an echo.

An engine that waits for a worker that has ended already does so in its own code, and tells nobody; MPI lets no worker
end before all do, who may wait to meet it. The launcher sees it by what the workers tell: on its own machine by notes
in its folder, on several machines through the agents.

A worker that ends while it is needed makes the others fail, and they may be gone before it is. So each tells when its
error is an echo, and the job ends with the exit code of a worker whose own it was.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Final

from aiodist._arrays import environment
from aiodist._core.errors import IncompleteCollectiveError, WorkerLostError

ENDED: Final = "has ended"
_AGENT_SECONDS: Final = 2.0


class Stage(Enum):
    """How far a worker has come: the name of the note, and the letter that an agent is told."""

    MEETING = "meeting", "e"
    MET = "met", "t"
    APART = "apart", "a"
    LEAVING = "leaving", "l"
    ECHO = "echo", "o"

    def __init__(self, note: str, letter: str) -> None:
        self.note = note
        self.letter = letter


@contextmanager
def told_to_the_launcher() -> Iterator[None]:
    """Tell of a meeting, and of its end."""
    tell(Stage.MEETING)
    try:
        yield
    except BaseException:
        tell(Stage.APART)
        raise
    tell(Stage.MET)


def tell(stage: Stage) -> None:
    """Tell of a stage, where somebody looks for that."""
    with suppress(OSError):
        if agent := environment.agent():
            _tell_agent(agent, stage)
        elif folder := environment.notes():
            _note(folder, stage)


def _tell_agent(agent: str, stage: Stage) -> None:
    port, _, token = agent.partition(":")
    with socket.create_connection(("localhost", int(port)), timeout=_AGENT_SECONDS) as connection:
        connection.sendall(f"{token}{stage.letter}".encode())


def _note(folder: str, stage: Stage) -> None:
    """Leave a note; that of a meeting goes when it is over, and only then another says how often they have met."""
    from pathlib import Path  # only a launcher's workers need it

    note = Path(folder, f"{stage.note}.{os.getpid()}")
    if stage in (Stage.MET, Stage.APART):
        note.with_name(f"{Stage.MEETING.note}.{os.getpid()}").unlink()
    if stage is Stage.MET:
        note.write_text(str(int(note.read_text()) + 1 if note.exists() else 1))
    elif stage is not Stage.APART:
        note.touch()


def has_a_launcher() -> bool:
    """Return whether the launcher keeps notes on this machine."""
    return os.path.isdir(environment.notes() or "")  # noqa: PTH112  (without pathlib, which takes time to import)


def another_has_failed() -> bool:
    """Return whether an agent of this machine has noted that its worker has failed."""
    from pathlib import Path

    folder = environment.notes() or "."

    with suppress(OSError):
        return any(note.read_text() not in {"", "0"} for note in Path(folder).glob("ended.*"))
    return False


def last_error() -> BaseException | None:
    """Return the error that ends the program; None where none has been shown, as of one that calls `sys.exit`."""
    return getattr(sys, "last_value", None)


def farewell_of(error: BaseException | None) -> str:
    """Return what the others are told of this worker, whose program ends with that error."""
    return ENDED if error is None else f"{ENDED}: {type(error).__name__}: {error}".partition("\n")[0]


def is_echo(error: BaseException | None, own: Collection[int]) -> bool:
    """Return whether an error says that replicas of other workers have ended, and none of this one's."""
    if not isinstance(error, (WorkerLostError, IncompleteCollectiveError)):
        return False
    ended = [replica.replica_id for replica in error.report.replicas if replica.state.ended]
    return bool(ended) and not any(replica_id in own for replica_id in ended)
