"""Every planted fault is found and named, every correct twin passes: on each event loop and under many schedules."""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
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
    """Check that an error has the class, reason, suspects, lines and texts that a case demands."""
    assert type(error) is (case.error or type(None)), error
    if not isinstance(error, CollectiveError):
        return
    report, text = error.report, str(error.report)
    assert report.reason is case.reason, text
    assert case.suspects is None or report.suspects == case.suspects_of(replicas), text
    assert [place for place in case.named_lines() if place not in text] == [], text
    assert case.says in text
    assert not case.never or case.never not in text
    lines = text.splitlines()
    assert len(lines) <= 40
    sentences = [line for line in lines if len(line.split()) > 1]  # not a single last word
    assert len(set(sentences)) == len(sentences), text
    assert all(len(line) <= 100 for line in lines), text


def loops(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
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
    with ThreadPoolExecutor(len(each)) as pool:  # at the same time, since the proof of a cycle takes a second
        assert len(list(pool.map(run_on, *zip(*each, strict=True)))) == len(each)


def run_on(case: Case, loop: tuple[str, dict[str, Any]]) -> None:
    """Run a case on an event loop; check its error, and that the strategy serves another run."""
    replicas = case.sizes[-1]

    async def main() -> Exception | None:
        strategy, found = mirrored(replicas), None
        try:
            with anyio.fail_after(60):
                await run(strategy, case.bound())
        except Exception as error:  # noqa: BLE001  (it is checked below)
            found = error
        await still_works(strategy)
        return found

    check_error(case, anyio.run(main, backend=loop[0], backend_options=loop[1]), replicas)


@pytest.mark.leaves_tasks  # asyncio.gather leaves its other tasks running when one fails
@pytest.mark.parametrize(("case", "replicas"), [(case, n) for case in CASES for n in case.sizes], ids=name)
def test_case_under_many_schedules(case: Case, replicas: int) -> None:
    program = program_of(case, replicas)
    if case.scheduled:
        for seed in range(3):
            found = explore(program, schedules=MOST_SCHEDULES, seed=seed, seconds=60)
            check_error(case, found.error, replicas)
    elif case.error is not None:
        texts = set()
        for seed, order in enumerate(orders()):
            with executed_lines(replicas) if seed == 0 else nullcontext() as executed:
                error = run_under(program, order, seed=seed, seconds=60).error
            check_error(case, error, replicas)
            if isinstance(error, CollectiveError):
                texts.add(str(error))
                if executed is not None:
                    check_places(str(error), executed)
        assert len(texts) <= 1
    else:
        found = explore(program, schedules=SCHEDULES, seed=0, seconds=60)
        assert found.error is None, f"a false alarm under {found.schedule}:\n{found.error}"


def program_of(case: Case, replicas: int = REPLICAS) -> Program:
    """Return a case as a program for the controlled loop."""

    async def main() -> None:
        await run(mirrored(replicas), case.bound())

    return main


def orders(schedules: int = SCHEDULES) -> list[Order]:
    """Return the orders in which a fault must be found: the default one, its reverse, random ones."""
    return [default_order, last_first, *(at_random(random.Random(seed), 100) for seed in range(schedules - 2))]


@contextmanager
def executed_lines(replicas: int) -> Iterator[dict[int, set[str]]]:
    """Record the lines of the programs that each replica executes, and under -1 those that anything does."""
    executed: dict[int, set[str]] = {i: set() for i in range(-1, replicas)}

    def note(frame: FrameType, event: str, arg: object) -> Any:
        if "faults" not in frame.f_code.co_filename:
            return None
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        executed[-1].add(place)
        context: ReplicaContext | None = get_replica_context()
        if context is not None and context.strategy.num_replicas_in_sync == replicas:  # not the default strategy's
            executed[context._me.member.replica_id].add(place)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield executed
    finally:
        sys.settrace(before)


def check_places(text: str, executed: dict[int, set[str]]) -> None:
    """Check that every line that a report names was executed by the replicas that it attributes it to."""
    named = set(re.findall(r"faults/(\w+\.py:\d+)", text))
    assert named
    assert named <= executed[-1], text
    for replica_ids, place in attributions(text):
        assert all(place in executed[replica_id] for replica_id in replica_ids), f"{place} of {replica_ids} in\n{text}"


_ATTRIBUTION = re.compile(
    r"(skipped|differ|on the way to)|"  # the replicas named before have not executed the line after it
    r"(?<!of )(?<!on )[Rr]eplicas? (\d+(?:(?:-|, | and )\d+)*+)(?! …| do(?:es)? not)|"
    r"faults/(\w+\.py:\d+)"
)


def attributions(text: str) -> Iterator[tuple[set[int], str]]:
    """Yield each place in a report with the replicas that are named last before it in the same sentence or row."""
    without_code = re.sub(r"^[> ] {3}\S+:\d+  .*$", "", text, flags=re.MULTILINE)
    for sentence in re.split(r"\n(?! {2,6}\S)|\n(?=[> ] (?:replica|the |[-+ ] #))|[.;] |,\s+which ", without_code):
        named: set[int] = set()
        for negation, ids, place in _ATTRIBUTION.findall(sentence):
            if negation:
                named = set()
            elif ids:
                runs = [run.split("-") for run in re.split(", | and ", ids)]
                named = {i for first, *last in runs for i in range(int(first), int(last[0] if last else first) + 1)}
            else:
                yield named, place


def test_every_report_is_checked_for_lines_and_there_are_enough_programs() -> None:
    assert all(case.scheduled or case.named_lines() or case.says for case in FAULTS if case.reason)
    assert len(FAULTS) >= 90
    assert len(TWINS) >= 36
