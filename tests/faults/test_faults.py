"""Every planted fault is found and named, every correct twin passes: on each event loop, and under many schedules."""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest

from aiodist import CollectiveError, Reason, ReplicaContext, get_replica_context
from aiodist._checking.explore import Program, explore
from aiodist._checking.explore import run as run_under
from aiodist._checking.schedule import Order, at_random, default_order, last_first
from tests.faults.case import CASES, REPLICAS, Case
from tests.runtime.programs import mirrored, run, still_works

for _name in ("calls", "tasks"):
    importlib.import_module(f"tests.faults.{_name}")

FAULTS = [case for case in CASES if case.error is not None]
TWINS = [case for case in CASES if case.error is None]
SCHEDULES = 8
MOST_SCHEDULES = 100


def name(value: Case | int) -> str:
    return value.name if isinstance(value, Case) else str(value)


def check_error(case: Case, error: BaseException | None, replicas: int) -> None:
    """Check that an error says what the case asks: class, reason, replicas, lines; or that there is none."""
    assert type(error) is (case.error or type(None)), error
    if not isinstance(error, CollectiveError):
        return
    report, text = error.report, str(error.report)
    assert report.reason is case.reason, text
    assert case.suspects is None or report.suspects == case.suspects_of(replicas), text
    missing = [place for place in case.named_lines() if place not in text]
    assert not missing, f"{missing} not named in\n{text}"
    assert case.says in text
    assert not case.never or case.never not in text
    lines = text.splitlines()
    assert len(lines) <= 40
    told = [line for line in lines if len(line.split()) > 1]  # what is not the last word of a sentence
    assert len(set(told)) == len(told), text
    assert all(len(line) <= 100 for line in lines), text


def loops(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the event loops that a case runs on."""
    yield "asyncio", {}
    if importlib.util.find_spec("uvloop"):
        yield "asyncio", {"use_uvloop": True}
    if case.anyio:
        yield "trio", {}


ON_ANY_LOOP = [case for case in CASES if not case.scheduled and case.reason is not Reason.DEADLOCK]


@pytest.mark.parametrize("case", [case for case in ON_ANY_LOOP if case.reason is not Reason.CYCLE], ids=name)
def test_case_on_every_event_loop(case: Case) -> None:
    for loop in loops(case):
        run_on(case, loop)


def test_cycles_on_every_event_loop() -> None:
    each = [(case, loop) for case in ON_ANY_LOOP if case.reason is Reason.CYCLE for loop in loops(case)]
    with ThreadPoolExecutor(len(each)) as pool:  # at the same time, for a cycle is proved by a second without progress
        assert len(list(pool.map(run_on, *zip(*each, strict=True)))) == len(each)


def run_on(case: Case, loop: tuple[str, dict[str, Any]]) -> None:
    """Run a case on an event loop, and check what comes out, and that the strategy serves another run."""
    replicas = case.sizes[-1]

    async def main() -> Exception | None:
        strategy, found = mirrored(replicas), None
        try:
            with anyio.fail_after(60):
                await run(strategy, case.bound())
        except Exception as error:  # noqa: BLE001  (whatever it is, the case says)
            found = error
        await still_works(strategy)
        return found

    check_error(case, anyio.run(main, backend=loop[0], backend_options=loop[1]), replicas)


@pytest.mark.leaves_tasks  # asyncio.gather leaves its other tasks alone when one fails
@pytest.mark.parametrize(("case", "replicas"), [(case, n) for case in CASES for n in case.sizes], ids=name)
def test_case_under_many_schedules(case: Case, replicas: int) -> None:
    program = program_of(case, replicas)
    if case.scheduled:
        for seed in range(3):
            found = explore(program, schedules=MOST_SCHEDULES, seed=seed, seconds=60)
            check_error(case, found.error, replicas)
    elif case.error is not None:
        with executed_lines(replicas) as executed:
            first = run_under(program, default_order, seed=0, seconds=60).error
        check_error(case, first, replicas)
        if isinstance(first, CollectiveError):
            check_places(str(first), executed)
        for seed, order in enumerate(orders()[1:], 1):
            error = run_under(program, order, seed=seed, seconds=60).error
            check_error(case, error, replicas)
            assert not isinstance(first, CollectiveError) or str(error) == str(first)
    else:
        found = explore(program, schedules=SCHEDULES, seed=0, seconds=60)
        assert found.error is None, f"a false alarm under {found.schedule}:\n{found.error}"


def program_of(case: Case, replicas: int = REPLICAS) -> Program:
    """Return a case as what a controlled loop runs again and again."""

    async def main() -> None:
        await run(mirrored(replicas), case.bound())

    return main


def orders(schedules: int = SCHEDULES) -> list[Order]:
    """Return the orders that a fault must show in: the default one, its reverse, random ones."""
    return [default_order, last_first, *(at_random(random.Random(seed), 100) for seed in range(schedules - 2))]


# Every line that a report names was executed by the replicas of which it speaks.


@contextmanager
def executed_lines(replicas: int) -> Iterator[dict[int, set[str]]]:
    """Note the lines of these programs that each replica executes; under -1 those that anybody does."""
    executed: dict[int, set[str]] = {i: set() for i in range(-1, replicas)}

    def note(frame: FrameType, event: str, arg: object) -> Any:
        if "faults" not in frame.f_code.co_filename:
            return None
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        executed[-1].add(place)
        context: ReplicaContext | None = get_replica_context()
        if context is not None and context.strategy.num_replicas_in_sync == replicas:  # no default one
            executed[context._me.member.replica_id].add(place)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield executed
    finally:
        sys.settrace(before)


def check_places(text: str, executed: dict[int, set[str]]) -> None:
    named = set(re.findall(r"faults/(\w+\.py:\d+)", text))
    assert named
    assert named <= executed[-1], text
    for who, place in spoken_of(text):
        assert all(place in executed[replica_id] for replica_id in who), f"{place} of {who} in\n{text}"


_SPOKEN = re.compile(
    r"(skipped|differ|on the way to)|"  # what follows was not done by those who were named
    r"(?<!of )(?<!on )[Rr]eplicas? (\d+(?:(?:-|, | and )\d+)*+)(?! …| do(?:es)? not)|"
    r"faults/(\w+\.py:\d+)"
)


def spoken_of(text: str) -> Iterator[tuple[set[int], str]]:
    """Yield the places that a text names, each with the replicas that it has named last in the same sentence or row."""
    without_code = re.sub(r"^[> ] {3}\S+:\d+  .*$", "", text, flags=re.MULTILINE)
    for sentence in re.split(r"\n(?! {2,6}\S)|\n(?=[> ] (?:replica|the |[-+ ] #))|[.;] |,\s+which ", without_code):
        who: set[int] = set()
        for other, ids, place in _SPOKEN.findall(sentence):
            if other:
                who = set()
            elif ids:
                runs = [run.split("-") for run in re.split(", | and ", ids)]
                who = {i for first, *last in runs for i in range(int(first), int(last[0] if last else first) + 1)}
            else:
                yield who, place


def test_faults_name_lines_wherever_there_is_a_report_and_there_are_enough_of_both() -> None:
    unnamed = [case.name for case in FAULTS if case.reason and not (case.scheduled or case.named_lines() or case.says)]
    assert not unnamed
    assert len(FAULTS) >= 90
    assert len(TWINS) >= 36
