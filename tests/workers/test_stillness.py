"""Workers that can only wait: whoever is found to do so for ever does, in a model of workers that go any way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.workers.stillness import Progress, Step, Still, Stillness, made_at, stuck, text_of

Program: TypeAlias = Sequence[Sequence[int]]
"""A worker's tasks: the strategies in which each takes a step after the other; 0 makes a strategy, and blocks."""

MAKE = 0


@dataclass
class _Task:
    left: list[int]
    step: int | None = None
    moving: bool = False


@dataclass
class _Worker:
    """A worker of the model: a step is a record, and one exchange behind it."""

    tasks: list[_Task]
    posted: dict[int, int] = field(default_factory=dict)
    moving: dict[int, int] = field(default_factory=dict)
    made: int = 0
    makes: bool = False

    @property
    def history(self) -> object:
        """What changes when it goes on."""
        return [(len(task.left), task.step, task.moving) for task in self.tasks], self.makes

    def at(self, strategy: int) -> Progress:
        return Progress(self.posted.get(strategy, 0), self.moving.get(strategy, 0) == self.posted.get(strategy, 0))


class _World:
    def __init__(self, programs: Sequence[Program]) -> None:
        self.workers = [_Worker([_Task(list(task)) for task in program]) for program in programs]

    def can_go_on(self, worker: _Worker, task: _Task) -> bool:
        if worker.makes:
            return task.step == MAKE and all(other.made >= worker.made for other in self.workers)
        if task.step is None:
            used = {other.step for other in worker.tasks}
            return bool(task.left) and task.left[0] not in used
        number, counts = worker.posted[task.step], [other.posted.get(task.step, 0) for other in self.workers]
        if task.moving:
            counts = [other.moving.get(task.step, 0) for other in self.workers]
        return min(counts) >= number

    def go_on(self, worker: _Worker, task: _Task) -> None:
        if task.step is None:
            task.step = task.left.pop(0)
            if task.step == MAKE:
                worker.makes = True
                worker.made += 1
            else:
                worker.posted[task.step] = worker.posted.get(task.step, 0) + 1
        elif task.step == MAKE:
            worker.makes, task.step = False, None
        elif not task.moving:
            task.moving, worker.moving[task.step] = True, worker.posted[task.step]
        else:
            task.moving, task.step = False, None

    def still(self, rank: int) -> Still | None:
        """Return what a worker tells: nothing, unless all of its tasks wait for other workers."""
        worker = self.workers[rank]
        begun = [task for task in worker.tasks if task.step is not None or task.left]
        if not worker.makes and (not begun or any(self._may_begin(worker, task) for task in begun)):
            return None
        steps = [(task.step, task.moving) for task in begun if task.step is not None]
        told = [Step(s, 0, Progress(worker.posted[s], moving), (0, 0), "") for s, moving in steps if s != MAKE]
        if worker.makes:
            told = [Step(worker.made, None, Progress(1, moving=False), None, "")]
        progress = {strategy: {0: worker.at(strategy)} for strategy in range(1, 4)}
        return Still(rank, worker.made, tuple(told), progress, {})

    def _may_begin(self, worker: _Worker, task: _Task) -> bool:
        return task.step is None and self.can_go_on(worker, task)


_programs = st.lists(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=2), min_size=2, max_size=3)


@given(_programs, st.data())
def test_whoever_is_found_never_goes_on(programs: list[Program], data: st.DataObject) -> None:
    world, stillness = _World(programs), Stillness()
    found: dict[int, object] = {}
    while True:
        ready = [(w, t) for w in world.workers for t in w.tasks if world.can_go_on(w, t)]
        if not ready:
            break
        teller = data.draw(st.integers(-1, len(world.workers) - 1))
        still = None if teller < 0 else world.still(teller)
        if still is not None and stillness.hear(still):
            found |= {rank: world.workers[rank].history for rank in stillness.take()}
        world.go_on(*data.draw(st.sampled_from(ready)))
    assert {rank: world.workers[rank].history for rank in found} == found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(2, 3), st.data())
def test_all_are_found_who_take_the_same_steps_in_another_order(
    steps: list[int], workers: int, data: st.DataObject
) -> None:
    world = _World([[data.draw(st.permutations(steps))] for _ in range(workers)])
    while ready := [(w, t) for w in world.workers for t in w.tasks if world.can_go_on(w, t)]:
        world.go_on(*data.draw(st.sampled_from(ready)))
    waits = any(task.step is not None for worker in world.workers for task in worker.tasks)
    told = [still for rank in range(workers) if (still := world.still(rank)) is not None]
    assert set(stuck(told)) == (set(range(workers)) if waits else set())


def _still(rank: int, strategy: int, text: str, verdicts: int = 0) -> Still:
    step = Step(strategy, 0, Progress(1, moving=False), (0, 0), text)
    progress = {number: {0: Progress(int(number == strategy), moving=True)} for number in (1, 2)}
    return Still(rank, 2, (step,), progress, {1: verdicts, 2: 0})


def test_one_to_whom_a_verdict_may_be_on_its_way_may_go_on() -> None:
    assert set(stuck([_still(0, 1, ""), _still(1, 2, "")])) == {0, 1}
    assert not stuck([_still(0, 1, ""), _still(1, 2, "", verdicts=1)])
    assert set(stuck([_still(0, 1, "", verdicts=1), _still(1, 2, "", verdicts=1)])) == {0, 1}


def test_a_strategy_of_which_nothing_is_told_may_go_on() -> None:
    silent = _still(1, 2, "")._replace(progress={})
    assert not stuck([_still(0, 1, ""), silent])


def test_workers_that_are_found_are_told_of_once() -> None:
    stillness = Stillness()
    assert stillness.hear(_still(0, 1, "")) == 0
    assert stillness.hear(_still(1, 2, "")) == 2
    assert stillness.hear(_still(2, 2, "")) == 3
    assert set(stillness.take()) == {0, 1, 2}
    assert stillness.hear(_still(1, 2, "")) == 0


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (["a.py:1"] * 3, ["Strategy 2 was made at a.py:1."]),
        (
            ["a.py:1", "a.py:2", "a.py:1"],
            ["Strategy 2 was made by workers 0 and 2 at a.py:1 and by worker 1 at a.py:2."],
        ),
        ([], []),
    ],
)
def test_where_a_strategy_was_made(places: list[str], told: list[str]) -> None:
    assert made_at(2, places) == told


def test_what_is_told() -> None:
    found = {rank: _still(rank, 1 + rank % 2, f"strategy.run(step) at train.py:{7 + rank % 2}") for rank in range(4)}
    places = {1: ["train.py:3", "train.py:4"] * 2, 2: ["train.py:4", "train.py:3"] * 2}
    assert text_of(found, places).splitlines() == [
        "workers wait for each other, and nothing can let them go on:",
        "  workers 0 and 2 wait in strategy.run(step) at train.py:7, with strategy 1",
        "  workers 1 and 3 wait in strategy.run(step) at train.py:8, with strategy 2",
        "Strategy 1 was made by workers 0 and 2 at train.py:3 and by workers 1 and 3 at train.py:4.",
        "Strategy 2 was made by workers 0 and 2 at train.py:4 and by workers 1 and 3 at train.py:3.",
        "Strategies pair up in the order in which workers make them: make them, and use them, in the same order on",
        "every worker. What is to go on side by side takes a task for each strategy.",
    ]
