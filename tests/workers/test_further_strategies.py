"""Workers that make more strategies than others: who waits hears why, and nobody is accused who is slow."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodist import (
    DeadlockError,
    IncompleteCollectiveError,
    MultiWorkerMirroredStrategy,
    Reason,
    StallWarning,
    WorkerLostError,
    get_replica_context,
)
from aiodist.replica import idleness
from aiodist.workers import inquiries, makings
from aiodist.workers.inquiries import Inquiries
from aiodist.workers.makings import Makings, Whereabouts
from aiodist.workers.peer import LENGTH
from aiodist.workers.pulse import Pulse
from aiodist.workers.stillness import Progress, Step, Still
from tests.workers.further import LAST, WORKERS, Workers, reduces, runs
from tests.workers.launched import job


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Yield workers; neither that they are threads of one process counts, nor the signal handlers of this one."""
    monkeypatch.setattr(makings, "ASK_SECONDS", 0.02)
    monkeypatch.setattr(inquiries, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(idleness, "_from_outside", lambda: False)
    monkeypatch.setattr(makings, "busy_threads", lambda **_: [])
    found = Workers()
    yield found
    found.close()


@pytest.mark.parametrize("operation", [reduces, runs])
def test_one_that_waits_for_the_maker_never_comes(workers: Workers, operation: Any, backend: str) -> None:
    others = [workers.start(rank, operation, backend) for rank in range(LAST)]

    async def makes(strategy: MultiWorkerMirroredStrategy) -> Any:
        with pytest.raises(DeadlockError) as raised:
            workers.make(LAST)
        found = await operation(strategy)
        return found, raised.value

    found, error = workers.start(LAST, makes, backend).result(20)
    assert [np.sum(other.result(20)) for other in others] == [np.sum(found)] * LAST  # who has caught it goes on
    name = "strategy.reduce" if operation is reduces else "strategy.run"
    told = (
        rf"worker 1 makes a strategy at \S+further.py:\d+, and worker 0 never comes to that, for it "
        rf"waits for worker 1: it waits in {name} at \S+further.py:\d+\n"
        r"Every worker must make the same strategies in the same order\."
    )
    assert re.fullmatch(told, str(error)), str(error)
    assert error.report.reason is Reason.DEADLOCK
    assert error.report.suspects == (0, 1)


def test_one_whose_replica_waits_for_the_maker_never_comes(workers: Workers, backend: str) -> None:
    async def program() -> Any:
        ctx = get_replica_context()
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == LAST:
            with pytest.raises(DeadlockError, match=r"waits for worker 1: replica 0 waits in all_reduce #1 \("):
                workers.make(LAST)
        return await ctx.all_reduce("SUM", 1)

    async def run(strategy: MultiWorkerMirroredStrategy) -> Any:
        return await strategy.run(program)

    assert [one.result(20) for one in [workers.start(rank, run, backend) for rank in range(WORKERS)]] == [
        WORKERS
    ] * WORKERS


def test_one_that_waits_for_the_maker_never_comes_though_another_strategy_is_unused(
    workers: Workers, backend: str
) -> None:
    workers.make_further()
    others = [workers.start(rank, runs, backend) for rank in range(LAST)]

    async def makes(strategy: MultiWorkerMirroredStrategy) -> None:
        with pytest.raises(DeadlockError, match=r"it waits in strategy\.run at \S+, with strategy 1\n"):
            workers.make(LAST)
        await runs(strategy)

    workers.start(LAST, makes, backend).result(20)
    for other in others:
        other.result(20)


def test_one_that_waits_for_the_maker_to_open_a_run_never_comes(workers: Workers, backend: str) -> None:
    begun = threading.Event()

    async def opens(strategy: MultiWorkerMirroredStrategy) -> Any:
        await anyio.to_thread.run_sync(begun.wait)
        return await runs(strategy)

    async def makes(strategy: MultiWorkerMirroredStrategy) -> None:
        lane = strategy._team._lanes[0]
        posted = lane.posted
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runs, strategy)
            while lane.posted == posted:
                await anyio.lowlevel.checkpoint()
            begun.set()
            with pytest.raises(DeadlockError, match=r"waits for worker 1: it waits in strategy\.run at "):
                workers.make(LAST)

    others = [workers.start(rank, opens, backend) for rank in range(LAST)]
    workers.start(LAST, makes, backend).result(20)
    assert [other.result(20) for other in others] == [WORKERS] * LAST


def _waits_for_an_event(go_on: threading.Event) -> Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]:
    async def wait(_: MultiWorkerMirroredStrategy) -> None:
        await anyio.to_thread.run_sync(go_on.wait)

    return wait


def _sleeps(go_on: threading.Event) -> Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]:
    async def wait(_: MultiWorkerMirroredStrategy) -> None:
        while not go_on.is_set():  # noqa: ASYNC110  (timers are what this is about)
            await anyio.sleep(0.005)

    return wait


def _blocks(go_on: threading.Event) -> Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]:
    async def wait(_: MultiWorkerMirroredStrategy) -> None:
        go_on.wait()

    return wait


def _leaves_by_a_timeout(go_on: threading.Event) -> Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]:
    async def wait(strategy: MultiWorkerMirroredStrategy) -> None:
        with anyio.move_on_after(0.3):
            await strategy.run(anyio.sleep_forever)
        go_on.wait()

    return wait


def test_one_that_is_about_to_hear_that_the_maker_has_left_a_run_is_waited_for(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told over one strategy's connections is no news of what goes over another one's."""
    both, hear, told = workers.make_further(), Makings.hear, threading.Semaphore(0)
    control: Any = both[0][1]._team._control
    held, begun = [], threading.Event()

    def noted_hear(*what: Any) -> None:
        hear(*what)
        told.release()

    monkeypatch.setattr(Makings, "hear", noted_hear)
    monkeypatch.setattr(control, "_on_ask", lambda *what: held.append(what))

    async def program() -> None:
        ctx = get_replica_context()
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == LAST:
            begun.set()
            await anyio.sleep_forever()
        await ctx.barrier()

    async def use(rank: int) -> None:
        await both[rank][1].run(program)

    async def waits(_: MultiWorkerMirroredStrategy) -> None:
        with pytest.raises(IncompleteCollectiveError):
            await use(0)

    async def leaves(_: MultiWorkerMirroredStrategy) -> Any:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use, LAST)
            await anyio.to_thread.run_sync(begun.wait)
            tasks.cancel_scope.cancel()
        return workers.make(LAST)

    waiting, making = workers.start(0, waits, "asyncio"), workers.start(LAST, leaves, "asyncio")
    for _ in range(10):
        assert told.acquire(timeout=20)
    assert not making.done()
    monkeypatch.undo()
    for what in held:
        control._request("ask", *what)
    waiting.result(20)
    for made in [making, workers.pool.submit(workers.make, 0)]:
        made.result(20).close()


def _waits_beside_a_timer(go_on: threading.Event) -> Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]:
    async def wait(strategy: MultiWorkerMirroredStrategy) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reduces, strategy)
            await _sleeps(go_on)(strategy)
            tasks.cancel_scope.cancel()

    return wait


@pytest.mark.parametrize("slow", [_waits_for_an_event, _sleeps, _blocks, _leaves_by_a_timeout, _waits_beside_a_timer])
def test_one_that_takes_its_time_is_waited_for(
    workers: Workers, slow: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, asked = threading.Event(), threading.Semaphore(0)
    hear = Makings.hear

    def noted_hear(*told: Any) -> None:
        hear(*told)
        asked.release()

    monkeypatch.setattr(Makings, "hear", noted_hear)
    others = [workers.start(rank, slow(go_on), backend) for rank in range(LAST)]
    waiting = workers.start_making(LAST, backend)
    for _ in range(10):
        assert asked.acquire(timeout=20)
    assert not waiting.done()
    go_on.set()
    for other in others:
        other.result(20)
    made = [workers.pool.submit(workers.make, rank) for rank in range(LAST)]
    for strategy in [waiting, *made]:
        strategy.result(20).close()


def test_a_warning_tells_what_the_others_are_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0.001")
    told: list[tuple[str, str]] = []
    mine = Makings()

    class _Request:
        def test(self) -> bool:
            if mine.place is not None and not told:
                mine.hear(1, 1, Whereabouts(0, "it is at load.py:3 in load"))
                mine.hear(2, 1, Whereabouts(1, "it makes one at train.py:7"))
            return bool(told)

    monkeypatch.setattr(makings, "warn", lambda text, place: told.append((text, place.file)))
    mine.wait(_Request(), 0, 3)
    ((text, file),) = told
    assert file == __file__
    assert re.fullmatch(
        r"worker 0 of 3 has waited \S+ s to make its strategy number 1, which every worker is to make "
        r"\(AIODIST_STALL_SECONDS sets the time, 0 turns this off\)\n  worker 1: it is at load\.py:3 in load",
        text,
    )


def test_a_warning_that_is_an_error_ends_nothing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    del monkeypatch
    place = makings.place_of_constructor()
    assert place is not None
    makings.warn("told", place)  # the suite makes errors of warnings
    assert caplog.messages == ["told"]
    with pytest.warns(StallWarning, match="told"):
        makings.warn("told", place)


def test_one_whose_process_ends_never_comes(workers: Workers) -> None:
    made = workers.pool.submit(workers.make, LAST)
    workers.strategies[0]._team._control._close_at_exit()  # type: ignore[attr-defined]
    told = r"worker 0 of 2 has ended, and worker 1 waits for it to make a strategy at \S+; it had replica 0$"
    with pytest.raises(WorkerLostError, match=told):
        made.result(20)


def test_what_workers_other_than_the_first_tell_each_other_goes_by_way_of_it() -> None:
    class _Control(Inquiries):
        def __init__(self, rank: int, everyone: list[_Control]) -> None:
            super().__init__()
            self._rank, self._size, self.makings, self._pulse = rank, 3, Makings(), Pulse()
            others = everyone if rank == 0 else everyone[:1]
            self._peers = {other._rank: other for other in others}  # type: ignore[misc]
            for other in others:
                other._peers[rank] = self  # type: ignore[assignment]

        @property
        def _listener(self) -> None:
            return None

        def _request(self, *request: Any) -> None:
            getattr(self, f"_on_{request[0]}")(*request[1:])

        def _put(self, peer: Any, message: bytes) -> None:
            peer._request(*pickle.loads(message[LENGTH.size :]))

    everyone: list[_Control] = []
    for rank in range(3):
        everyone.append(_Control(rank, everyone))
    everyone[0]._peers.pop(0, None)
    everyone[1].makings.made = 4  # type: ignore[union-attr]
    everyone[2]._on_inquire(0, 1)
    heard = everyone[2].makings._heard  # type: ignore[union-attr]
    assert {rank: told.number for rank, told in heard.items()} == {0: 0, 1: 4}
    everyone[1]._on_end()
    assert [control.gone for control in everyone] == [{1: "has ended"}, {}, {1: "has ended"}]


def test_one_that_has_only_closed_a_strategy_is_waited_for(workers: Workers) -> None:
    made = [workers.pool.submit(workers.make, LAST)]
    workers.strategies[0].close()
    made += [workers.pool.submit(workers.make, rank) for rank in range(LAST)]
    for one in made:
        one.result(20).close()


def test_one_that_has_given_up_a_strategy_may_make_the_next() -> None:
    control = Inquiries()
    control._gone = {1: "has ended", 2: "has given up, for want of one", 3: "has died", 4: "has given up"}
    control.ending = {0, 4}
    assert control.gone == {0: "has ended", 3: "has died", 4: "has given up"}


def test_a_step_for_which_this_worker_has_brought_its_record_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class _Elder:
        thread = threading.get_ident()
        verdicts = 0
        is_in_question = False

        def progress(self) -> dict[int, Progress]:
            return {lane: Progress(5 + lane, moving=True) for lane in range(2)}

    def is_stuck(*steps: tuple[int, int, int]) -> bool:
        needs = [Step(number, lane, Progress(posted, moving=False), (0, 0), "") for number, lane, posted in steps]
        mine.hear(1, 0, Whereabouts(1, "", True, Still(1, 1, tuple(needs), {}, {1: 0})))
        return bool(mine._never_coming(0, {1: elder}))  # type: ignore[dict-item]

    mine, elder = Makings(), _Elder()
    mine.made = 1
    monkeypatch.setattr(makings, "busy_threads", lambda **_: [])
    assert is_stuck()
    assert is_stuck((1, 0, 6))
    assert not is_stuck((1, 0, 6), (1, 1, 6))
    assert not is_stuck((2, 0, 6))
    elder.verdicts = 1  # it has heard one that may be on its way to the other
    assert not is_stuck((1, 0, 6))
    elder.verdicts = 0
    elder.is_in_question = True
    assert not is_stuck((1, 0, 6))
    elder.is_in_question = False
    elder.thread += 1
    assert not is_stuck((1, 0, 6))
    elder.thread -= 1
    monkeypatch.setattr(makings, "busy_threads", lambda **_: [threading.Thread(name="it loads what that step needs")])
    assert not is_stuck((1, 0, 6))


def test_an_answer_to_an_earlier_question_is_left_alone() -> None:
    mine = Makings()
    mine.hear(1, 7, Whereabouts(0, "it was there then"))
    assert mine._others() == ""


def test_workers_of_mpi_that_make_another_number_of_strategies() -> None:
    code, output, seconds = job(2, program=Path(__file__).with_name("further_job.py"))
    assert code == 0, output
    assert re.search(r"worker 1 caught: worker 1 makes a strategy at \S+, and worker 0 never comes to that", output)
    assert output.count("goes on with both") == 2
    assert seconds < 20
