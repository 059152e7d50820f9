"""Every planted fault is found and named, every correct twin passes: on each event loop, in the plain order."""

from __future__ import annotations

import importlib
from pathlib import Path

import anyio
import pytest

from aiodist import CollectiveError
from tests.collective.runs import check_that_it_works, mirrored, run
from tests.faults.case import CASES, REPLICAS, Case

for _file in sorted(Path(__file__).parent.glob("*.py")):
    if not _file.stem.startswith("test_") and _file.stem != "case":
        importlib.import_module(f"tests.faults.{_file.stem}")

FAULTS = [case for case in CASES if case.error is not None]
TWINS = [case for case in CASES if case.error is None]


def ids(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def check_verdict(case: Case, error: BaseException) -> None:
    """Check that an error says what the case asks: class, reason, replicas, lines."""
    assert case.error is not None
    assert type(error) is case.error, error
    if isinstance(error, CollectiveError):
        assert error.report.reason is case.reason
        assert error.report.suspects == case.suspects
        missing = [place for place in case.named_lines() if place not in str(error.report)]
        assert not missing, f"{missing} not named in\n{error.report}"


@pytest.mark.anyio
@pytest.mark.parametrize("case", [c for c in FAULTS if c.plain], ids=ids([c for c in FAULTS if c.plain]))
async def test_fault_is_named(case: Case, anyio_backend_name: str) -> None:
    if anyio_backend_name == "trio" and not case.anyio:
        pytest.skip("the program is written for asyncio")
    strategy = mirrored(REPLICAS)
    with anyio.fail_after(20), pytest.raises(BaseException) as caught:  # noqa: PT011  (check_verdict looks at the type)
        await run(strategy, case.bound())
    check_verdict(case, caught.value)
    await check_that_it_works(strategy)


@pytest.mark.anyio
@pytest.mark.parametrize("case", TWINS, ids=ids(TWINS))
async def test_correct_twin_passes(case: Case, anyio_backend_name: str) -> None:
    if anyio_backend_name == "trio" and not case.anyio:
        pytest.skip("the program is written for asyncio")
    await run(mirrored(REPLICAS), case.bound())


def test_faults_name_a_line_wherever_a_report_is_made() -> None:
    for case in FAULTS:
        assert case.reason is None or case.named_lines(), case.name
