"""Workers that make, or use, several strategies in another order: all hear why, and nobody who may go on is stopped."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aiodist import CollectiveMismatchError, DeadlockError, MultiWorkerMirroredStrategy, Reason, get_replica_context
from aiodist.replica import idleness, standing
from aiodist.replica.standing import Standing
from aiodist.vocabulary.reports import Location
from aiodist.workers import inquiries, makings, tcp_control
from aiodist.workers.simulated import SimulatedCluster
from aiodist.workers.stillness import Together
from aiodist.workers.tcp_control import TcpControl
from tests.workers.further import WORKERS, Workers, reduces, runs
from tests.workers.launched import job
from tests.workers.over_tcp import OverTcp

Strategies = tuple[MultiWorkerMirroredStrategy, ...]


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Yield workers; neither that they are threads of one process counts, nor the signal handlers of this one."""
    monkeypatch.setattr(inquiries, "STILL_SECONDS", 0.02)
    monkeypatch.setattr(tcp_control, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(idleness, "_from_outside", lambda: False)
    monkeypatch.setattr(makings, "busy_threads", lambda **_: [])
    found = Workers()
    yield found
    found.close()


def _swapped(rank: int, strategies: Strategies) -> Strategies:
    return strategies if rank == 0 else strategies[::-1]


@pytest.mark.parametrize("operation", [reduces, runs])
def test_all_who_use_strategies_in_another_order_raise_the_same(workers: Workers, operation: Any, backend: str) -> None:
    both = workers.make_further()

    async def main(rank: int) -> list[str]:
        told = []
        for strategy in _swapped(rank, both[rank]):
            with pytest.raises(DeadlockError) as raised:
                await operation(strategy)
            told.append(str(raised.value))
            assert raised.value.report.reason is Reason.DEADLOCK
            assert raised.value.report.suspects == ((rank,) if not told[1:] else (1 - rank,))
        for strategy in both[rank]:
            await operation(strategy)  # who has caught it goes on
        return told

    told = workers.everywhere(main, backend)
    assert len({text for texts in told for text in texts}) == 1, told
    call = r"strategy.reduce\(SUM, \[float64\[2\]\]\)" if operation is reduces else r"strategy.run\(program\)"
    place = r"\S*tests/workers/further.py:\d+"
    assert re.fullmatch(
        rf"workers wait for each other, and nothing can let them go on:\n"
        rf"  worker 0 waits in {call} at {place}, with strategy 1\n"
        rf"  worker 1 waits in {call} at {place}, with strategy 2\n"
        rf"Strategy 1 was made at {place}.\nStrategy 2 was made at {place}.\n"
        r"Strategies pair up in the order in which workers make them: make them, and use them, in the same order on\n"
        r"every worker. What is to go on side by side takes a task for each strategy.",
        told[0][0],
    ), told[0][0]


@pytest.mark.parametrize("operation", [reduces, runs])
def test_who_hears_of_one_strategy_first_cannot_let_another_worker_go_on(
    workers: Workers, operation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, held, late = workers.make_further(), list[Any](), threading.Event()
    slow, fast = (strategy._team.standing._control for strategy in both[1] if strategy._team.standing is not None)
    ask, judged, heard, lock = TcpControl._on_ask, TcpControl._judged, Together.heard, threading.Lock()

    def asked(self: TcpControl, *arguments: Any) -> None:
        """Have the second worker hear late that it is asked for its part in what the first waits in."""
        with lock:
            if self is slow and not late.is_set():
                held.append(arguments)
                return
        ask(self, *arguments)

    def let_go() -> None:
        with lock:
            late.set()
        while held:
            slow._request("ask", *held.pop())

    def hears(self: TcpControl, *arguments: Any) -> None:
        judged(self, *arguments)
        if self is fast:
            let_go()

    def all_told(self: Together, *arguments: Any) -> None:
        heard(self, *arguments)
        let_go()

    monkeypatch.setattr(TcpControl, "_on_ask", asked)
    monkeypatch.setattr(TcpControl, "_judged", hears)
    monkeypatch.setattr(Together, "heard", all_told)

    async def main(rank: int) -> None:
        for strategy in _swapped(rank, both[rank]):
            with pytest.raises(DeadlockError):
                await operation(strategy)

    workers.everywhere(main, "asyncio")


def test_runs_side_by_side_that_wait_for_each_other_raise_the_same(workers: Workers) -> None:
    both = workers.make_further()

    async def main(rank: int) -> list[str]:
        tasks: list[asyncio.Task[Any]] = []

        async def program(index: int) -> None:
            ctx = get_replica_context()
            await ctx.barrier()  # both runs are open
            if index == rank:
                await ctx.barrier()
            await asyncio.wait([tasks[1 - index]])
            await ctx.barrier()

        tasks += [asyncio.ensure_future(both[rank][index].run(program, (index,))) for index in range(2)]
        return [str(told) for told in await asyncio.gather(*tasks, return_exceptions=True)]

    told = workers.everywhere(main, "asyncio")
    assert len({text for texts in told for text in texts}) == 1, told
    assert "  worker 0 waits in barrier() at " in told[0][0]


def _counted_looks(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Return what counts the looks of strategies at what they wait in."""
    looks, look = threading.Semaphore(0), Standing._look

    def counted(self: Standing, tell: Any) -> None:
        look(self, tell)
        if self._waited_in:
            looks.release()

    monkeypatch.setattr(Standing, "_look", counted)
    return looks


@pytest.mark.parametrize("kind", ["timer", "thread"])
def test_tasks_side_by_side_go_on_in_any_order(
    workers: Workers, kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, looks = workers.make_further(), _counted_looks(monkeypatch)

    async def after_looks() -> None:
        """Take as long as some looks, which find both workers in a step of a strategy of its own."""
        seen = 0
        while seen < 8:
            if kind == "timer":
                await anyio.sleep(0.001)
                seen += looks.acquire(blocking=False)
            else:
                seen += await anyio.to_thread.run_sync(lambda: looks.acquire(timeout=20))

    async def main(rank: int) -> list[Any]:
        first, second = _swapped(rank, both[rank])
        found = []

        async def later() -> None:
            await after_looks()
            found.append(await runs(second))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            found.append(await runs(first))
        return found

    assert workers.everywhere(main, backend) == [[WORKERS, WORKERS]] * WORKERS


def test_a_report_on_a_strategy_that_was_made_at_different_places_says_so() -> None:
    communicators: list[Any] = [OverTcp(one) for one in SimulatedCluster(WORKERS).communicators]

    def here(rank: int) -> MultiWorkerMirroredStrategy:
        return MultiWorkerMirroredStrategy(communicators[rank], ["CPU:0"])

    def there(rank: int) -> MultiWorkerMirroredStrategy:
        return MultiWorkerMirroredStrategy(communicators[rank], ["CPU:0"])

    def use(rank: int) -> str:
        with closing((here, there)[rank](rank)) as strategy, pytest.raises(CollectiveMismatchError) as raised:
            asyncio.run(_in_one_go(strategy, (reduces, runs)[rank]))
        return str(raised.value).splitlines()[-1]

    with ThreadPoolExecutor(WORKERS) as pool:
        told = list(pool.map(use, range(WORKERS)))
    place = r"\S+test_swapped_strategies\.py:\d+"
    assert told[0] == told[1]
    assert re.fullmatch(
        rf"The strategy was made by worker 0 at {place} and by worker 1 at {place}: strategies pair up in the order in "
        r"which each worker makes them\.",
        told[0],
    ), told[0]


async def _in_one_go(strategy: MultiWorkerMirroredStrategy, operation: Any) -> Any:
    return await operation(strategy)


def test_an_operation_that_has_not_come_to_its_step_may_go_on(workers: Workers, backend: str) -> None:
    async def steps(told: Standing) -> Any:
        for _ in range(50):  # a call of the control plane's may be on its way, at any moment
            await anyio.lowlevel.checkpoint()
            if (found := told._steps(1)) is not None:
                return found
        return None

    async def main(rank: int) -> list[Any]:
        team = workers.strategies[rank]._team
        assert team.standing is not None
        await reduces(workers.strategies[rank])
        found = [await steps(team.standing)]
        async with team.turn():  # what it brings is copied from a GPU, say
            found.append(await steps(team.standing))
        return found

    assert workers.everywhere(main, backend) == [[[], None]] * WORKERS


def test_another_thread_that_may_call_in_is_no_proof() -> None:
    def runs_a_loop() -> None:
        asyncio.run(waits())

    async def waits() -> None:
        here.append(asyncio.get_running_loop())
        here.append(over := asyncio.Event())
        running.set()
        await over.wait()

    here: list[Any] = []
    running = threading.Event()
    thread = threading.Thread(target=runs_a_loop)
    thread.start()
    running.wait()
    assert idleness._from_outside()
    here[0].call_soon_threadsafe(here[1].set)
    thread.join()


def test_a_warning_tells_what_the_other_is_at(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0.01")
    told: list[str] = []
    both, warned = workers.make_further(), threading.Event()

    def warn(text: str, _: Location) -> None:
        told.append(text)
        if len(told) == WORKERS:
            warned.set()

    monkeypatch.setattr(standing, "warn", warn)
    for strategy in both[0]:
        strategy._team.standing.places = ["train.py:3", "train.py:4"]  # type: ignore[union-attr]

    async def main(rank: int) -> None:
        first, second = _swapped(rank, both[rank])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runs, first)
            await anyio.to_thread.run_sync(warned.wait)
            await runs(second)

    workers.everywhere(main, "asyncio")
    text = next(text for text in told if text.startswith("worker 0"))
    assert re.fullmatch(
        r"worker 0 has waited \S+ s in strategy\.run\(program\) at \S+further\.py:\d+, with strategy 1 "
        r"\(AIODIST_STALL_SECONDS sets the time, 0 turns this off\)\n"
        r"  worker 1: it waits in strategy\.run at \S+further\.py:\d+, with strategy 2; .*\n"
        r"  Strategy 1 was made by worker 0 at train\.py:3 and by worker 1 at train\.py:4\.",
        text,
    ), text


def test_workers_of_mpi_that_swap_their_strategies() -> None:
    code, output, seconds = job(2, program=Path(__file__).with_name("swapped_job.py"))
    assert code == 0, output
    reports = re.findall(r"caught: (.*?)every worker\. What is to go on", output, re.DOTALL)
    assert len(reports) == 4, output
    assert len(set(reports)) == 2, output
    assert len(re.findall(r"was made by worker 0 at \S+:\d+ and by worker 1 at \S+:\d+\.", reports[0])) == 2, output
    assert output.count("goes on with both") == 2, output
    assert seconds < 30
