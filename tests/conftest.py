"""For every test: event loops, hypothesis profiles, processes, and a check that nothing outlives the test."""

from __future__ import annotations

import asyncio
import asyncio.runners
import gc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest

local = hypothesis.settings(deadline=None, max_examples=30)
hypothesis.settings.register_profile("local", local)
hypothesis.settings.register_profile("ci", local, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def anyio_backend() -> Any:
    """Run a test marked `anyio` on asyncio, unless `every_loop` names more event loops."""
    return ("asyncio", {})


def _loops() -> Iterator[Any]:
    """Yield every event loop that replicas must run on: asyncio, uvloop if it is installed, and trio."""
    yield pytest.param(("asyncio", {}), id="asyncio")
    if importlib.util.find_spec("uvloop"):
        yield pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")
    yield pytest.param(("trio", {}), id="trio")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked `every_loop` on each event loop, or on those that the marker names."""
    marker = metafunc.definition.get_closest_marker("every_loop")
    if marker is not None:
        loops = [loop for loop in _loops() if not marker.args or loop.id in marker.args]
        metafunc.parametrize("anyio_backend", loops)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option that writes golden files instead of comparing them: pytest tests/runtime --update-golden."""
    parser.addoption("--update-golden", action="store_true", help="write the files under golden/ anew")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written."""
    return bool(request.config.getoption("--update-golden"))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run tests that the command line names in this process, where -s and a debugger work; `-n` says otherwise.

    The whole suite runs in four processes, even on two cores: half of its time it waits for deadlines and for the
    programs that it starts. The tests of a file stay together, because they share fixtures.
    """
    return 0 if config.args_source is pytest.Config.ArgsSource.ARGS else 4


@pytest.fixture(scope="module", autouse=True)
def freeze_earlier_objects() -> None:
    """Hide from the garbage collector what existed before this file's tests: a million objects.

    Many tests ask for a collection, which would take a quarter of a second.
    """
    gc.collect()
    gc.freeze()


# Nothing outlives a test. Both checks are in the hooks around set-up and tear-down, which run outside of all fixtures.
#
# Threads are compared before and after. A thread that is ending gets GRACE seconds: workers are asked to stop when
# their loop closes, and are not always joined. Threads of the process do not count: trio keeps idle ones for ten
# seconds (a busy one has the name of its job), and the one that looks for blocked loops ends a quarter of a second
# after a run.
#
# Tasks are gone after the test, because the runner cancels those that are left before it closes the loop. So the
# runner's clean-up is watched, which asyncio.run, asyncio.Runner, anyio and pytest-asyncio share, on uvloop too. No
# task of trio can outlive its nursery.

GRACE = 5.0
NOT_OF_A_TEST = ("Trio thread ", "aiodist idle")

_cancel_all_tasks: Callable[[asyncio.AbstractEventLoop], None] = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
_threads_before = pytest.StashKey[set[threading.Thread]]()
_left_tasks: list[str] = []


def _watch_then_cancel(loop: asyncio.AbstractEventLoop) -> None:
    """Record the tasks that are pending when a runner closes its loop, then let it cancel them."""
    names = {task: getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks(loop)}
    of_anyios_plugin = "TestRunner."
    _left_tasks.extend(repr(task) for task, name in names.items() if not name.startswith(of_anyios_plugin))
    _cancel_all_tasks(loop)


def _busy_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(NOT_OF_A_TEST)}


def _threads_left(before: set[threading.Thread]) -> set[threading.Thread]:
    """Return the busy threads that were not there before and do not end within the grace period."""
    deadline = time.monotonic() + GRACE
    while (left := _busy_threads() - before) and time.monotonic() < deadline:
        gc.collect()  # an owner in a reference cycle, which a timer may have kept, releases its threads only now
        next(iter(left)).join(0.1)
    return left


def pytest_configure(config: pytest.Config) -> None:
    """Watch the runners' clean-up, and let Ctrl-C reach the programs that tests start.

    A shell makes its background jobs ignore Ctrl-C, and children inherit that. Bytecode is written, whatever the
    environment says: otherwise hundreds of programs would compile all of aiodist.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.runners._cancel_all_tasks = _watch_then_cancel  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the runners' clean-up."""
    asyncio.runners._cancel_all_tasks = _cancel_all_tasks  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Record the threads that run before the test."""
    item.stash[_threads_before] = _busy_threads()
    _left_tasks.clear()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Fail a test that leaves a thread or a task behind."""
    result = yield
    threads = _threads_left(item.stash[_threads_before])
    if threads:
        pytest.fail(f"threads outlive the test: {threads}", pytrace=False)
    if _left_tasks and not item.get_closest_marker("leaves_tasks"):
        pytest.fail("tasks outlive the test:\n  " + "\n  ".join(_left_tasks), pytrace=False)
    return result
