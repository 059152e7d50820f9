"""Exploring: running a program under schedule after schedule until one fails, and reducing that one.

The first schedule is the plain one, the second the reverse; then come random ones and directed ones in turn. Each is a
function of the seed and of its number, so an exploration can be repeated. A program that leaves no choice has one
schedule only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from aiodist.checking.describe_changes import Narrator
from aiodist.checking.minimise import minimise
from aiodist.checking.orders import LastFirst, Random, Watch, directed
from aiodist.checking.runs import Ended, Program, run
from aiodist.checking.schedule import Change, Order, Replayed, Schedule

_MOST_REDUCING_RUNS = 500
_REDUCING_SECONDS = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Exploration:
    """What came of an exploration.

    Attributes:
        schedules: how many schedules were run, without those that reduced a failing one.
        plain: how the run in plain order ended; None when a schedule was replayed.
        failure: how the failing run ended, with the fewest changes; None when none failed.
        story: what its changes do, a line each.
    """

    schedules: int
    plain: Ended | None
    failure: Ended | None
    story: tuple[str, ...] = ()


def explore(
    program: Program,
    *,
    schedules: int,
    seed: int,
    seconds: float | None,
    before: Callable[[int], None] = lambda _: None,
) -> Exploration:
    """Run a program under up to that many schedules, and stop at the first that fails.

    Args:
        program: the program.
        schedules: how many schedules to run at most.
        seed: what they, and the program's own random numbers, are drawn from.
        seconds: how long a run may take, in real time; None: as long as it likes.
        before: called with the number of each schedule before it is run.
    """
    watch = Watch() if schedules > 1 else None
    before(0)
    plain = run(program, Order(), seed=seed, seconds=seconds, on_point=watch)
    if plain.error is not None or watch is None or not plain.points:
        return Exploration(1, plain, plain if plain.error is not None else None)
    done = 1
    for number, order in enumerate(_orders(seed, watch, schedules), start=1):
        before(number)
        ended = run(program, order, seed=seed, seconds=seconds)
        done += 1
        if ended.error is not None:
            return Exploration(done, plain, *reduce(program, ended, seconds=seconds))
    return Exploration(done, plain, None)


def replay(program: Program, schedule: Schedule, *, seconds: float | None) -> Exploration:
    """Run a program under one schedule."""
    narrator = Narrator()
    order = Replayed(schedule.changes)
    ended = run(program, order, seed=schedule.seed, seconds=seconds, on_point=narrator)
    failed = ended.error is not None
    return Exploration(1, None if failed else ended, ended if failed else None, narrator.story())


def _orders(seed: int, watch: Watch, schedules: int) -> Iterator[Order]:
    yield LastFirst()
    for number in range(2, schedules):
        rng = random.Random(f"{seed}.{number}")  # noqa: S311
        yield Random(rng) if number % 2 == 0 else directed(rng, watch.places)


def reduce(program: Program, failed: Ended, *, seconds: float | None) -> tuple[Ended, tuple[str, ...]]:
    """Return the failure with the fewest changes that fail in the same way, and the story of its changes."""
    seed = failed.schedule.seed
    best = failed
    until, left = time.monotonic() + _REDUCING_SECONDS, _MOST_REDUCING_RUNS

    def fails(changes: Sequence[Change]) -> bool:
        nonlocal best, left
        left -= 1
        if left < 0 or time.monotonic() > until:
            raise StopIteration
        ended = run(program, Replayed(changes), seed=seed, seconds=seconds)
        same = ended.error is not None and ended.kind == failed.kind
        if same:
            best = ended
        return same

    minimise(failed.schedule.changes, fails)
    told = replay(program, best.schedule, seconds=seconds)
    if told.failure is None or told.failure.kind != failed.kind:
        return best, ()  # the program is not the same each time: threads, sockets, a clock
    return told.failure, told.story
