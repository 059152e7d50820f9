"""The pytest plugin, in a pytest of its own: enabled by name, with fixtures, classes, and beside other plugins."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.paths import environment

TESTS = """
import asyncio
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
def test_plain_function():
    assert get_replica_context().num_replicas_in_sync == 2

@pytest.mark.replicas(2)
@pytest.mark.parametrize("value", [1, 2])
async def test_parametrized(value):
    assert await get_replica_context().all_reduce("SUM", value) == 2 * value

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
"""


# Plugins that have nothing to do with it, and take as long to import as all the rest.
WITHOUT = [word for name in ("benchmark", "hypothesispytest", "sybil") for word in ("-p", f"no:{name}")]


def run_pytest(folder: Path, text: str, *arguments: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WITHOUT, *arguments],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("beside", [[], ["-o", "asyncio_mode=auto"], ["-o", "anyio_mode=auto"]])
def test_marked_functions_run_on_replicas(tmp_path: Path, beside: list[str]) -> None:
    code, output = run_pytest(tmp_path, TESTS, "-p", "aiodist.testing.pytest_plugin", "--strict-markers", *beside)
    assert code == 0, output
    assert re.search(r"(6|10) passed", output)  # anyio runs each of four twice, once for each of its event loops


def test_failure_shows_the_report_and_the_way_to_repeat_it(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, FAILING, "-p", "aiodist.testing.pytest_plugin")
    assert code == 1
    assert "3 failed" in output
    assert "replicas disagree at collective #1" in output
    replay = re.search(r"to run it again: replay='([^']*)'", output)
    assert replay
    assert "nothing can run any more" in output
    assert "assert 1 == 0" in output
    assert "explore.py" not in output

    again = FAILING.replace("schedules=100", f"replay={replay[1]!r}")
    code, output = run_pytest(tmp_path, again, "-p", "aiodist.testing.pytest_plugin", "-k", "race")
    assert code == 1
    assert "in the schedule given, with 1 change" in output


def test_marker_with_other_arguments_is_told_as_such(tmp_path: Path) -> None:
    text = FAILING.replace("schedules=100", "shedules=100")
    code, output = run_pytest(tmp_path, text, "-p", "aiodist.testing.pytest_plugin", "-k", "race")
    assert code == 1
    assert "TypeError: pytest.mark.replicas() got an unexpected keyword argument 'shedules'" in output


def test_plugin_is_not_enabled_by_itself(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, TESTS, "--strict-markers")
    assert code != 0
    assert "'replicas' not found in `markers`" in output


def test_plugin_can_be_named_in_a_conftest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["aiodist.testing.pytest_plugin"]\n')
    assert run_pytest(tmp_path, TESTS, "-k", "on_replicas")[0] == 0
