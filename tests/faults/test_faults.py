"""Every planted fault is found and named, every correct twin passes: on each event loop, and under many schedules."""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest

from aiodist import CollectiveError, Reason, get_replica_context
from aiodist._checking.explore import Program, coroutine_program, explore
from aiodist._checking.explore import run as run_under
from aiodist._checking.schedule import LastFirst, Order, Random
from tests.faults.case import CASES, REPLICAS, Case
from tests.runtime.programs import mirrored, run, still_works

for _file in sorted(Path(__file__).parent.glob("*.py")):
    if not _file.stem.startswith("test_") and _file.stem != "case":
        importlib.import_module(f"tests.faults.{_file.stem}")

FAULTS = [case for case in CASES if case.error is not None]
TWINS = [case for case in CASES if case.error is None]
SCHEDULES = 12
MOST_SCHEDULES = 100


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def check_error(case: Case, error: BaseException | None) -> None:
    """Check that an error says what the case asks: class, reason, replicas, lines; or that there is none."""
    assert type(error) is (case.error or type(None)), error
    if isinstance(error, CollectiveError):
        assert error.report.reason is case.reason, error
        assert case.suspects is None or error.report.suspects == case.suspects, error
        lines = str(error.report).splitlines()
        assert len(lines) <= 40
        if case.reason is not Reason.DEADLOCK:  # a controlled loop lists the tasks that stand still
            assert all(len(line) <= 100 for line in lines), error
        missing = [place for place in case.named_lines() if place not in str(error.report)]
        assert not missing, f"{missing} not named in\n{error.report}"


def loops(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the event loops that a case runs on."""
    yield "asyncio", {}
    if importlib.util.find_spec("uvloop"):
        yield "asyncio", {"use_uvloop": True}
    if case.anyio:
        yield "trio", {}


@each([case for case in CASES if not case.scheduled and case.reason is not Reason.DEADLOCK])
def test_case_on_every_event_loop(case: Case) -> None:
    async def main() -> Exception | None:
        strategy, found = mirrored(REPLICAS), None
        try:
            with anyio.fail_after(20):
                await run(strategy, case.bound())
        except Exception as error:  # noqa: BLE001  (whatever it is, the case says)
            found = error
        await still_works(strategy)
        return found

    for backend, options in loops(case):
        check_error(case, anyio.run(main, backend=backend, backend_options=options))


@each([case for case in FAULTS if case.reason not in (None, Reason.DEADLOCK) and not case.scheduled])
def test_lines_that_a_report_names_were_executed(case: Case) -> None:
    executed: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> Any:
        if "faults" in frame.f_code.co_filename:
            executed.add(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            return note
        return None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        found = run_under(program_of(case), Order(), seed=0, seconds=20).error
    finally:
        sys.settrace(before)
    assert isinstance(found, CollectiveError)
    named = set(re.findall(r"faults/(\w+\.py:\d+)", str(found.report)))
    assert named
    assert named <= executed, f"{named - executed} in\n{found.report}"


def program_of(case: Case) -> Program:
    """Return a case as what a controlled loop runs again and again."""

    async def main() -> None:
        program = case.bound()

        async def replica() -> object:
            return await program(get_replica_context())

        await mirrored(REPLICAS).run(replica)

    return coroutine_program(main)


def orders(schedules: int = SCHEDULES) -> list[Order]:
    """Return the orders that a fault must show in: the default one, its reverse, random ones."""
    return [Order(), LastFirst(), *(Random(random.Random(seed)) for seed in range(schedules - 2))]


@pytest.mark.leaves_tasks  # asyncio.gather leaves its other tasks alone when one fails
@each(CASES)
def test_case_under_many_schedules(case: Case) -> None:
    program = program_of(case)
    if case.scheduled:
        for seed in range(3):
            found = explore(program, schedules=MOST_SCHEDULES, seed=seed, seconds=20)
            assert found.failure is not None
            check_error(case, found.failure.error)
    elif case.error is not None:
        for seed, order in enumerate(orders()):
            check_error(case, run_under(program, order, seed=seed, seconds=20).error)
    else:
        found = explore(program, schedules=SCHEDULES, seed=0, seconds=20)
        assert found.failure is None, f"a false alarm under {found.failure.schedule}:\n{found.failure.error}"


def test_faults_name_lines_wherever_there_is_a_report_and_there_are_enough_of_both() -> None:
    assert all(case.reason is None or case.scheduled or case.named_lines() for case in FAULTS)
    assert len(FAULTS) >= 40
    assert len(TWINS) >= 20
