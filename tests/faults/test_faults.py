"""Every planted fault is found and named, every correct twin passes: on each event loop, and under many schedules."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import anyio
import pytest

import aiodist
from aiodist import CollectiveError
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
SEEDS = 20
MOST_SCHEDULES = 100


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def program_of(case: Case) -> Program:
    """Return a case as what a controlled loop runs again and again."""

    async def main() -> None:
        program = case.bound()

        async def replica() -> object:
            return await program(aiodist.get_replica_context())

        await mirrored(REPLICAS).run(replica)

    return coroutine_program(main)


def check_verdict(case: Case, error: BaseException | None) -> None:
    """Check that an error says what the case asks: class, reason, replicas, lines."""
    assert case.error is not None
    assert type(error) is case.error, error
    if isinstance(error, CollectiveError):
        assert error.report.reason is case.reason, error
        assert case.suspects is None or error.report.suspects == case.suspects, error
        missing = [place for place in case.named_lines() if place not in str(error.report)]
        assert not missing, f"{missing} not named in\n{error.report}"


@pytest.mark.anyio
@each([case for case in FAULTS if case.on_any_loop])
async def test_fault_is_named(case: Case, anyio_backend_name: str) -> None:
    if anyio_backend_name == "trio" and not case.anyio:
        pytest.skip("the program is written for asyncio")
    strategy = mirrored(REPLICAS)
    with anyio.fail_after(20), pytest.raises(BaseException) as caught:  # noqa: PT011  (check_verdict looks at the type)
        await run(strategy, case.bound())
    check_verdict(case, caught.value)
    await still_works(strategy)


@pytest.mark.anyio
@each(TWINS)
async def test_correct_twin_passes(case: Case, anyio_backend_name: str) -> None:
    if anyio_backend_name == "trio" and not case.anyio:
        pytest.skip("the program is written for asyncio")
    await run(mirrored(REPLICAS), case.bound())


def orders() -> list[Order]:
    """Return the orders that a fault must show in: the plain one, its reverse, random ones."""
    return [Order(), LastFirst(), *(Random(random.Random(seed)) for seed in range(SEEDS))]


@each([case for case in FAULTS if not case.scheduled])
def test_fault_is_named_alike_under_every_schedule(case: Case) -> None:
    for seed, order in enumerate(orders()):
        check_verdict(case, run_under(program_of(case), order, seed=seed, seconds=20).error)


@pytest.mark.leaves_tasks  # asyncio.gather leaves its other tasks alone when one fails
@each([case for case in FAULTS if case.scheduled])
@pytest.mark.parametrize("seed", range(3))
def test_race_is_found_by_exploring(case: Case, seed: int) -> None:
    found = explore(program_of(case), schedules=MOST_SCHEDULES, seed=seed, seconds=20)
    assert found.failure is not None
    check_verdict(case, found.failure.error)


@each(TWINS)
def test_correct_twin_passes_under_every_schedule(case: Case) -> None:
    found = explore(program_of(case), schedules=SEEDS, seed=0, seconds=20)
    assert found.failure is None, f"a false alarm under {found.failure.schedule}:\n{found.failure.error}"


def test_faults_name_a_line_wherever_a_report_is_made() -> None:
    for case in FAULTS:
        assert case.reason is None or case.scheduled or case.named_lines(), case.name


def test_there_are_enough_of_both() -> None:
    assert len(FAULTS) >= 40
    assert len(TWINS) >= 20
