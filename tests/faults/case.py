"""Programs with a planted fault, and their correct twins: what each must raise, and how it is registered.

A program takes a replica's context and, if its replicas share something, that as well. Every line that the report must
name ends in the comment ``# named``. A correct twin looks like a fault but is none: it must raise nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import aiodist
from aiodist import Reason, ReplicaContext

Program = Callable[..., Awaitable[Any]]

REPLICAS = 4
EVERYONE = tuple(range(REPLICAS))
SIZES = (2, 5)

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
        name: what the table of results calls it, with spaces for underscores.
        family: the kind of fault.
        error: the class of the error that the run raises; None for a correct program.
        reason: the report's reason, if there is a report.
        suspects: the odd replicas; None if they depend on the schedule.
        shared: makes the object that the replicas of one run share.
        scheduled: the fault shows only under some schedules, which exploring finds.
        anyio: the program runs on trio, too.
        peers: the program makes sense where replicas are processes or threads of another framework.
        sizes: the numbers of replicas that it is run with.
        says: text that the report must contain.
        never: text that it must not contain.
    """

    program: Program
    name: str
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

    def named_lines(self) -> list[str]:
        """Return the lines that the report must name, as ``file.py:line``."""
        function: Any = self.program.func if isinstance(self.program, partial) else self.program
        lines, first = inspect.getsourcelines(function)
        file = Path(function.__code__.co_filename).name
        return [f"{file}:{number}" for number, line in enumerate(lines, first) if line.rstrip().endswith("# named")]

    def suspects_of(self, replicas: int) -> tuple[int, ...] | None:
        """Return the suspects among that many replicas: both of two, neither of which is a minority."""
        if self.suspects is None or self.reason in (Reason.TIMEOUT, Reason.DEADLOCK) or replicas > 2:
            return self.suspects
        return 0, 1

    def bound(self) -> Callable[[ReplicaContext], Awaitable[Any]]:
        """Return the program for one run, with what its replicas share."""
        if self.shared is None:
            return self.program
        shared = self.shared()
        return lambda ctx: self.program(ctx, shared)


CASES: list[Case] = []
_families: list[str] = []
Register = Callable[[Program], Program]


def family(name: str) -> None:
    _families.append(name)


def fault(error: type[BaseException] | None, reason: Reason | None, *suspects: int, **more: Any) -> Register:
    """Register a program that raises an error, or none.

    A program with further arguments is registered under several names, each time with its arguments in `given`.
    """

    def register(program: Program) -> Program:
        name, given = more.pop("name", program.__name__), more.pop("given", {})
        case = partial(program, **given) if given else program
        CASES.append(Case(case, name, _families[-1], error, reason, **{"suspects": suspects, **more}))
        return program

    return register


mismatch = partial(fault, aiodist.CollectiveMismatchError)
"""Register a program whose replicas make different calls."""
raises = partial(fault, reason=None)
"""Register a program whose own exception the run raises."""
correct = partial(fault, None, None)
"""Register a program without a fault."""
deadlock = partial(fault, aiodist.DeadlockError, Reason.DEADLOCK, anyio=False)
"""Register a program in which nothing can ever run again, which a controlled event loop proves."""
cycle = partial(fault, aiodist.DeadlockError, Reason.CYCLE)
"""Register a program whose replicas wait for each other, each in a collective of another group."""
race = partial(fault, aiodist.CollectiveMismatchError, suspects=None, scheduled=True, anyio=False)
"""Register a program whose replicas make different calls under some schedules."""
incomplete = partial(fault, aiodist.IncompleteCollectiveError)
"""Register a program in which some replicas never come to a collective that others wait in."""
abandoned = partial(incomplete, Reason.ABANDONED, 1, sizes=SIZES)
"""Register a program in which replica 1 is cancelled out of a collective."""
