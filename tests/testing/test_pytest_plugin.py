"""The pytest plugin, in a pytest of its own: with fixtures and classes, beside other plugins, and its failures."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

import numpy  # noqa: F401, ICN001  (pytester forgets what its tests import, and NumPy cannot be imported twice)
import pytest

pytest_plugins = ["pytester"]

PASSING = """
import asyncio
import functools
import numpy as np
import pytest
from aiodist import get_replica_context

@pytest.fixture
def four():
    return 4

@pytest.mark.replicas(4)
async def test_on_replicas(four):
    assert get_replica_context().num_replicas_in_sync == four
    await asyncio.sleep(1000)

@pytest.mark.replicas(n=3, schedules=20)
class TestClass:
    async def test_method(self):
        ctx = get_replica_context()
        assert (await ctx.all_reduce("SUM", np.ones(2))).tolist() == [3, 3]

@pytest.mark.replicas(2)
@pytest.mark.parametrize("value", [1, 2])
async def test_parametrized(value):
    assert await get_replica_context().all_reduce("SUM", value) == 2 * value

calls = []

def noting(fn):
    @functools.wraps(fn)
    def call():
        calls.append(fn)
        return fn()
    return call

@pytest.mark.replicas(2)
@noting
async def test_decorated():
    assert calls

def test_without_marker():
    assert get_replica_context().num_replicas_in_sync == 1
"""
FAILING = """
import asyncio
import pytest
from aiodist import get_replica_context

@pytest.mark.replicas(2, schedules=100)
async def test_race():
    ctx = get_replica_context()
    await ctx.barrier()
    async with asyncio.TaskGroup() as tasks:
        for op in ("SUM", "MAX"):
            tasks.create_task(reduce(ctx, op))

async def reduce(ctx, op):
    await ctx.all_reduce(op, 1.0)

@pytest.mark.replicas(2)
async def test_deadlock():
    await asyncio.Event().wait()

@pytest.mark.replicas(2)
async def test_assertion():
    assert get_replica_context().replica_id_in_sync_group == 0

@pytest.mark.replicas(2, shedules=100)
async def test_misspelt():
    pass
"""


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run_pytest(pytester: pytest.Pytester, text: str, *arguments: str) -> tuple[dict[str, int], str]:
    """Run a file of tests; return the numbers that passed and failed, and the output."""
    pytester.makepyfile(test_it=text)
    found = pytester.runpytest_inprocess("--strict-markers", "-p", "no:cacheprovider", *arguments)
    return found.parseoutcomes(), found.stdout.str()


ASYNCIO = "-p pytest_asyncio.plugin -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function"


@pytest.mark.parametrize(
    ("beside", "passed"),
    [
        ("", 6),
        (ASYNCIO, 6),
        ("-p anyio.pytest_plugin -o anyio_mode=auto", 10),  # four of them on both of its event loops
    ],
)
def test_marked_functions_run_on_replicas(pytester: pytest.Pytester, beside: str, passed: int) -> None:
    outcomes, output = run_pytest(pytester, PASSING, "-p", "aiodist.testing.pytest_plugin", *beside.split())
    assert outcomes.pop("passed") == passed, output
    assert not {"failed", "errors"} & outcomes.keys(), output


def test_failure_shows_the_report_and_how_to_repeat_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["aiodist.testing.pytest_plugin"]')
    outcomes, output = run_pytest(pytester, FAILING)
    assert outcomes["failed"] == 4
    assert "replicas disagree at collective #1" in output
    assert "nothing can run any more" in output
    assert "assert 1 == 0" in output
    assert "TypeError: pytest.mark.replicas() got an unexpected keyword argument 'shedules'" in output
    assert "explore.py" not in output

    replay = re.search(r"to run it again: replay='([^']*)'", output)
    assert replay
    _, output = run_pytest(pytester, FAILING.replace("schedules=100", f"replay={replay[1]!r}", 1), "-k", "race")
    assert "in the schedule given, with 1 change" in output


def test_plugin_is_not_enabled_automatically() -> None:
    assert not [each for each in entry_points(group="pytest11") if each.value.startswith("aiodist")]
