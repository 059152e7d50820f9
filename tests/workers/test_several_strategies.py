"""Several strategies over workers: a warning names the places of who waits, and `timeout_seconds` ends the wait."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from aiodist import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationOptions,
    MultiWorkerMirroredStrategy,
    StallWarning,
)
from aiodist._core.report import Location
from aiodist._workers.engines.simulated import SimulatedCluster
from aiodist.replica import team
from aiodist.workers import joining, pulse
from tests.workers.over_tcp import OverTcp

WORKERS = 2
PLACE = r"\S*test_several_strategies\.py:\d+"


async def reduces(strategy: MultiWorkerMirroredStrategy) -> Any:
    return await strategy.reduce("SUM", np.ones(2), None)


async def runs(strategy: MultiWorkerMirroredStrategy) -> Any:
    return await strategy.run(lambda: None)


def here(communicator: Any, **options: Any) -> MultiWorkerMirroredStrategy:
    return MultiWorkerMirroredStrategy(communicator, ["CPU:0"], communication_options=CommunicationOptions(**options))


def there(communicator: Any, **options: Any) -> MultiWorkerMirroredStrategy:
    return MultiWorkerMirroredStrategy(communicator, ["CPU:0"], communication_options=CommunicationOptions(**options))


def everywhere(worker: Callable[[int, list[Any]], Any], strategies: int) -> list[Any]:
    """Return what each worker returns, given its rank and a communicator for each strategy that it is to make."""
    worlds = [SimulatedCluster(WORKERS).communicators for _ in range(strategies)]
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(lambda rank: worker(rank, [OverTcp(world[rank]) for world in worlds]), range(WORKERS)))


def test_strategies_used_in_another_order_warn_and_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0.01")
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.01)
    told: list[str] = []
    warned = threading.Event()

    def warn(text: str, _: Location) -> None:
        told.append(text)
        if len(told) == WORKERS:
            warned.set()

    monkeypatch.setattr(team, "warn", warn)

    def worker(rank: int, communicators: list[Any]) -> str:
        both = [here(communicators[0]), there(communicators[1])]
        used = both[rank]

        async def main() -> str:
            waiting = asyncio.ensure_future(reduces(used))
            await asyncio.to_thread(warned.wait)
            waiting.cancel()
            return str(await asyncio.gather(waiting, return_exceptions=True))

        with closing(both[0]), closing(both[1]):
            return asyncio.run(main())

    everywhere(worker, 2)
    for rank in range(WORKERS):
        text = next(text for text in told if text.startswith(f"worker {rank} "))
        assert re.fullmatch(
            rf"worker {rank} has waited \S+ s in strategy\.reduce\(SUM, \[float64\[2\]\]\) at {PLACE}, of the strategy "
            rf"that it made at {PLACE} \(AIODIST_STALL_SECONDS sets the time, 0 turns this off\)",
            text,
        ), text


def test_timeout_ends_what_waits_in_strategies_used_in_another_order() -> None:
    all_told = threading.Barrier(WORKERS)

    def worker(rank: int, communicators: list[Any]) -> type[BaseException]:
        both = [here(one, timeout_seconds=0.3) for one in communicators]
        with closing(both[0]), closing(both[1]):
            with pytest.raises(CollectiveTimeoutError) as raised:
                asyncio.run(reduces(both[rank]))
            all_told.wait(20)
        return raised.type

    assert everywhere(worker, 2) == [CollectiveTimeoutError] * WORKERS


def test_report_on_a_strategy_that_was_made_at_different_places_says_so() -> None:
    def worker(rank: int, communicators: list[Any]) -> str:
        make, use = (here, there)[rank], (reduces, runs)[rank]
        with closing(make(communicators[0])) as strategy, pytest.raises(CollectiveMismatchError) as raised:
            asyncio.run(use(strategy))
        return str(raised.value).splitlines()[-1]

    told = everywhere(worker, 1)
    assert told[0] == told[1]
    assert re.fullmatch(
        rf"The strategy was made by worker 0 at {PLACE} and by worker 1 at {PLACE}: strategies pair up in the order in "
        r"which each worker makes them\.",
        told[0],
    ), told[0]


class Late:
    """A request that is complete once somebody has warned of it, or never."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def test(self) -> bool:
        return bool(self._told)


def test_constructor_that_waits_for_others_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0.001")
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(joining, "warn", lambda text, at: told.append((text, at.file)))
    joining.wait(Late(told), 0, 3)
    ((text, file),) = told
    assert file == __file__
    assert re.fullmatch(
        rf"worker 0 of 3 has waited \S+ s to make a strategy at {PLACE}, which every worker is to make "
        r"\(AIODIST_STALL_SECONDS sets the time, 0 turns this off\)",
        text,
    ), text


def test_constructor_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "FIRST_MEETING_SECONDS", 0.01)
    told = rf"^worker 0 of 3 has waited 0 s for the others to make their MultiWorkerMirroredStrategy at {PLACE}; every"
    with pytest.raises(TimeoutError, match=told):
        joining.wait(Late([]), 0, 3)


def test_warning_that_is_an_error_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    at = Location(__file__, 1, "main")
    joining.warn("told", at)  # the suite makes errors of warnings
    assert caplog.messages == ["told"]
    with pytest.warns(StallWarning, match="told"):
        joining.warn("told", at)
