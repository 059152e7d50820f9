"""Telling `aiodist run` that this worker waits to meet the others, and then that they have met.

An engine that waits for a worker that has ended already does so in its own code, and tells nobody. The launcher sees it
by what the workers tell: on its own machine by notes in its folder, on several machines through the agents.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Final

from aiodist.vocabulary import environment

_AGENT_SECONDS: Final = 2.0


class Stage(Enum):
    """How far a worker has come: the name of the note, and the letter that an agent is told."""

    MEETING = "meeting", "e"
    MET = "met", "t"
    APART = "apart", "a"

    def __init__(self, note: str, letter: str) -> None:
        self.note = note
        self.letter = letter


@contextmanager
def told_to_the_launcher() -> Iterator[None]:
    """Tell of a meeting, and of its end."""
    _tell(Stage.MEETING)
    try:
        yield
    except BaseException:
        _tell(Stage.APART)
        raise
    _tell(Stage.MET)


def _tell(stage: Stage) -> None:
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
    """Leave a note, or take it back; that they have met is noted only then, with how often."""
    from pathlib import Path  # only a launcher's workers need it

    note = Path(folder, f"{Stage.MEETING.note}.{os.getpid()}")
    if stage is Stage.MEETING:
        note.touch()
        return
    note.unlink()
    if stage is Stage.MET:
        met = note.with_name(f"{stage.note}.{os.getpid()}")
        met.write_text(str(int(met.read_text()) + 1 if met.exists() else 1))
