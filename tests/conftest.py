"""What every test gets: event loops, hypothesis profiles, a process, and a check that it leaves nothing running."""

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
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

hypothesis.settings.register_profile("local", deadline=None, max_examples=30)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=30, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def anyio_backend() -> Any:
    """Run a test marked `anyio` on asyncio; one marked `every_loop`, too, on each event loop in turn."""
    return ("asyncio", {})


def _loops() -> Iterator[Any]:
    """Yield every event loop that replicas must run on: asyncio, uvloop where it is installed, and trio."""
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
    """Add the option that writes the texts under golden/ anew: pytest tests/runtime --update-golden."""
    parser.addoption("--update-golden", action="store_true", help="write the texts under golden/ anew")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether texts are to be written rather than compared."""
    return bool(request.config.getoption("--update-golden"))


# The whole suite runs in four processes, also on two cores, for half of its time it waits: for deadlines, and for the
# programs that it starts. What is named on the command line runs in this process, where it starts sooner, -s and a
# debugger work, and benchmarks measure. `-n` says otherwise.
#
# A file's tests stay together, for they share fixtures.


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run what is named in this process, and the whole suite in four."""
    return 0 if config.args_source is pytest.Config.ArgsSource.ARGS else 4


@pytest.fixture(scope="module", autouse=True)
def only_what_the_file_makes() -> None:
    """Let the garbage collector look at what this file's tests make, and at nothing that was there before.

    Collected tests, imported modules and compiled kernels come to a million objects: a collection, which many tests ask
    for, would take a quarter of a second.
    """
    gc.collect()
    gc.freeze()


# Nothing outlives a test.
#
# Both checks stand in the hooks around set-up and tear-down, not in a fixture: there they see the test after all its
# fixtures have gone, whatever the order in which those were asked for.
#
# Threads are compared before and after. One that is on its way out gets GRACE seconds to go: a worker is asked to stop
# when its loop closes, and is not always joined. Not counted are those that belong to the process: trio keeps idle
# threads for ten seconds to use them again (an idle one bears trio's own name, a busy one that of its job), and the
# thread that looks after blocked loops ends a quarter of a second after the last run, for which no test should wait.
#
# Tasks cannot be seen after the test: the runner has cancelled what was left and closed the loop, without a word. So
# the runner's own clean-up is watched: what it finds to cancel is what the program left behind. It serves asyncio.run,
# asyncio.Runner, anyio and pytest-asyncio, on uvloop too. Trio needs no such check: a task there cannot outlive its
# nursery.

GRACE = 5.0
NOT_OF_A_TEST = ("Trio thread ", "aiodist idle")

_cancel_all_tasks: Callable[[asyncio.AbstractEventLoop], None] = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
_threads_before = pytest.StashKey[set[threading.Thread]]()
_left_tasks: list[str] = []


def _watch_then_cancel(loop: asyncio.AbstractEventLoop) -> None:
    """Note the tasks that are still pending when a runner closes its loop, then let it cancel them."""
    _left_tasks.extend(repr(task) for task in asyncio.all_tasks(loop) if not _belongs_to_anyios_plugin(task))
    _cancel_all_tasks(loop)


def _belongs_to_anyios_plugin(task: asyncio.Task[Any]) -> bool:
    """Tell the task in which anyio's pytest plugin runs tests and fixtures from the tests' own."""
    return getattr(task.get_coro(), "__qualname__", "").startswith("TestRunner.")


def _busy_threads() -> set[threading.Thread]:
    """List the running threads, without those that trio and aiodist keep for the process."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith(NOT_OF_A_TEST)}


def _threads_left(before: set[threading.Thread]) -> set[threading.Thread]:
    """List the threads that are busy now, were not before, and do not end within the grace."""
    deadline = time.monotonic() + GRACE
    while (left := _busy_threads() - before) and time.monotonic() < deadline:
        gc.collect()  # an owner in a reference cycle releases its threads only now; a timer may have kept it until now
        next(iter(left)).join(0.1)
    return left


def pytest_configure(config: pytest.Config) -> None:
    """Watch what runners clean up; let Ctrl-C reach the programs that tests start, also where it does not reach these.

    A shell lets what it starts in the background ignore it, and children inherit that.

    Bytecode is kept, whatever the environment says: hundreds of programs would each compile all of aiodist.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.runners._cancel_all_tasks = _watch_then_cancel  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Put the runners back as they were."""
    asyncio.runners._cancel_all_tasks = _cancel_all_tasks  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Remember what runs before the test."""
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
