"""Programs with a planted fault, and correct twins of them: what each must raise, and how they are registered.

A program takes a replica's context, and where its replicas share something, that as well. Every line that the report
must name ends in the comment ``# named``. A correct twin looks like a fault and is none: nothing may be raised.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from aiodist import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    IncompleteCollectiveError,
    Reason,
    ReduceOp,
    ReplicaContext,
)

Program = Callable[..., Awaitable[Any]]

REPLICAS = 4
EVERYONE = tuple(range(REPLICAS))
SIZES = (2, 5)

# What the programs are made of.

SUM, MAX, MEAN = ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MEAN
LOSS, GRADIENT = np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)


def me(ctx: ReplicaContext) -> int:
    return ctx.replica_id_in_sync_group


def odd(ctx: ReplicaContext) -> bool:
    return me(ctx) == 1


def everyone(ctx: ReplicaContext) -> range:
    return range(ctx.num_replicas_in_sync)


async def fail() -> None:
    raise ValueError("broken batch")


@dataclass(frozen=True, slots=True)
class Case:
    """One program.

    Attributes:
        program: ``async def program(ctx)``, or ``program(ctx, shared)``.
        family: the kind of fault, for the table of results.
        error: what comes out of the run; None from a correct program.
        reason: the report's reason, where there is a report.
        suspects: the odd replicas; None where that depends on the schedule.
        shared: makes what the replicas of one run share.
        scheduled: it shows only under some schedules; exploring finds them.
        anyio: it runs on trio, too.
        peers: it makes sense where replicas are processes or threads of another framework.
        sizes: the numbers of replicas that it is run with.
        says: what the report says of it.
        never: what it must not say.
    """

    program: Program
    family: str
    error: type[BaseException] | None = None
    reason: Reason | None = None
    suspects: tuple[int, ...] | None = ()
    shared: Callable[[], Any] | None = None
    scheduled: bool = False
    anyio: bool = True
    peers: bool = False
    sizes: tuple[int, ...] = (REPLICAS,)
    says: str = ""
    never: str = ""

    @property
    def name(self) -> str:
        return self.program.__name__

    def named_lines(self) -> list[str]:
        """Return the places that the report must name, as ``file.py:line``."""
        return _named_lines(self.program)

    def suspects_of(self, replicas: int) -> tuple[int, ...] | None:
        """Return whom a report blames among that many replicas: all, where the odd ones are no minority."""
        if self.suspects is None or self.reason in (Reason.TIMEOUT, Reason.DEADLOCK) or replicas > 2:
            return self.suspects
        return 0, 1

    def bound(self) -> Callable[[Any], Awaitable[Any]]:
        """Return the program of one run, which takes a context alone."""
        if self.shared is None:
            return self.program
        shared = self.shared()
        return lambda ctx: self.program(ctx, shared)


@cache
def _named_lines(program: Program) -> list[str]:
    lines, first = inspect.getsourcelines(program)
    file = Path(program.__code__.co_filename).name
    return [f"{file}:{number}" for number, line in enumerate(lines, first) if line.rstrip().endswith("# named")]


CASES: list[Case] = []
_families: list[str] = []
Register = Callable[[Program], Program]


def family(name: str) -> None:
    """Begin a kind of programs, as the table of results calls it."""
    _families.append(name)


def fault(error: type[BaseException] | None, reason: Reason | None, *suspects: int, **more: Any) -> Register:
    """Register a program out of which an error comes, or none."""

    def register(program: Program) -> Program:
        CASES.append(Case(program, _families[-1], error, reason, **{"suspects": suspects, **more}))
        return program

    return register


mismatch = partial(fault, CollectiveMismatchError)
"""Register a program whose replicas are at different collectives, for a reason, by some replicas."""
raises = partial(fault, reason=None)
"""Register a program out of which an exception of its own comes, as itself."""
correct = partial(fault, None, None)
"""Register a program that has no fault."""
deadlock = partial(fault, DeadlockError, Reason.DEADLOCK, anyio=False)
"""Register a program in which nothing can run any more, which a controlled event loop proves."""
cycle = partial(fault, DeadlockError, Reason.CYCLE)
"""Register a program whose replicas wait for each other, each in a collective of another group."""
race = partial(fault, CollectiveMismatchError, suspects=None, scheduled=True, anyio=False)
"""Register a program whose replicas are at different collectives under some schedules."""


def incomplete(reason: Reason, *suspects: int, **more: Any) -> Register:
    """Register a program in which some replicas never come to a collective that others wait in."""
    error = CollectiveTimeoutError if reason is Reason.TIMEOUT else IncompleteCollectiveError
    return fault(error, reason, *suspects, **more)
