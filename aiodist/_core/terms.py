"""The terms of reports: places in the program, reasons, and states of replicas.

This module is separate from `report` because that one is loaded only when there is a report.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from aiodist._core.wire import File


class Location(NamedTuple):
    """A place in a program.

    Attributes:
        file: the file's name as Python knows it.
        line: the line, counted from 1.
        function: the name of the function that contains the line.
    """

    file: File
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class ReplicaState(enum.StrEnum):
    """What a replica was doing at the time of a report. Members compare equal to their lower-case names.

    Attributes:
        WAITING: it waits in a collective.
        RUNNING: it has not reached the collective.
        EXITED: its function has returned.
        FAILED: its function has raised an error.
        CANCELLED: it was cancelled.
    """

    WAITING = "waiting"
    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the replica's function has ended."""
        return self not in (ReplicaState.WAITING, ReplicaState.RUNNING)


class Reason(enum.StrEnum):
    """Why a report was made. Members compare equal to their lower-case names.

    KIND to CALL_SITE are differences between calls, in the order in which they are compared.

    Attributes:
        EXITED: a replica ended without a collective that others wait in.
        ABANDONED: a replica was cancelled out of a collective.
        TIMEOUT: ``timeout_seconds`` passed.
        CYCLE: replicas wait for each other, each in a collective of another group.
        DEADLOCK: replicas wait for each other, and nothing else can wake them.
        WORKER_LOST: a worker is gone.
    """

    KIND = "kind"
    NAME = "name"
    REDUCE_OP = "reduce_op"
    AXIS = "axis"
    SOURCE = "source"
    MERGE_FN = "merge_fn"
    STRUCTURE = "structure"
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    CALL_SITE = "call_site"
    EXITED = "exited"
    ABANDONED = "abandoned"
    TIMEOUT = "timeout"
    CYCLE = "cycle"
    DEADLOCK = "deadlock"
    LIVELOCK = "livelock"
    GROUP = "group"
    UNMATCHED = "unmatched"
    WORKER_LOST = "worker_lost"
