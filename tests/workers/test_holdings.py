"""What is given back, and when: a model of workers that begin operations, and leave strategies, as they like."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.workers import holdings
from aiodist.workers.communicator import Request
from aiodist.workers.holdings import Holdings, Told
from aiodist.workers.separate import SeparateProcess


class Engine:
    """An engine's communicator, as one worker has it."""

    def __init__(self) -> None:
        self.freed = False

    def begin(self) -> None:
        assert not self.freed


class One(SeparateProcess):
    """A communicator of a model's."""

    def __init__(self, size: int, name: str, of: Holdings | None = None) -> None:
        super().__init__()
        self.size, self._handle = size, Engine()
        self.engine = self._handle
        self._belong_to(of, name)

    def begin(self, moved: int = 0) -> Pending:
        self.begun += 1
        self.moved += moved
        self._handle.begin()
        return Pending(self)

    def give_back(self) -> None:
        assert not self._kept.freed
        self._kept.freed = True


class Pending:
    """An operation in the air."""

    def __init__(self, of: One) -> None:
        self._of, self.landed, self._done = of, False, False

    def test(self) -> bool:
        if self.landed and not self._done:
            self._done = True
            self._of.done += 1
        return self.landed


class Worker:
    """A worker's process."""

    def __init__(self) -> None:
        self.known: list[Holdings] = []
        self.in_the_air: deque[Request] = deque()
        self.ones: dict[str, One] = {}

    @contextmanager
    def here(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holdings, "known", self.known)
            patch.setattr(holdings, "in_the_air", self.in_the_air)
            yield

    def make(self, number: bytes, size: int, name: str) -> One:
        with self.here():
            one = self.ones[name] = One(size, name)
        assert one.holdings is not None
        one.holdings.number = number
        return one

    def leave(self, name: str) -> None:
        left: Any = self.ones[name].holdings
        left.left = True

    def tell(self) -> Told:
        with self.here():
            return holdings.tell(2)

    def hear(self, told: list[Told]) -> None:
        with self.here():
            holdings.give_back(told)


def meet(workers: list[Worker]) -> None:
    told = [worker.tell() for worker in workers]
    for worker in workers:
        worker.hear(copy.deepcopy(told))


def freed(workers: list[Worker], name: str) -> list[bool]:
    return [worker.ones[name].engine.freed for worker in workers]


@pytest.fixture
def pair() -> list[Worker]:
    workers = [Worker(), Worker()]
    for worker in workers:
        worker.make(b"first", 2, "a")
    return workers


def test_what_all_workers_have_left_at_rest_is_given_back_by_all(pair: list[Worker]) -> None:
    for worker in pair:
        worker.ones["a"].begin()
        worker.ones["a"].done += 1
        assert worker.tell().put_away == frozenset()
        worker.leave("a")
    meet(pair)
    assert freed(pair, "a") == [True, True]
    assert [worker.known for worker in pair] == [[], []]
    meet(pair)


def test_worker_that_makes_a_strategy_alone_leaves_everything_as_it_is(pair: list[Worker]) -> None:
    pair[0].leave("a")
    with pair[0].here():
        assert holdings.tell(1).put_away == frozenset()
    pair[0].ones["a"].begin()


def test_what_one_worker_has_not_left_waits(pair: list[Worker]) -> None:
    pair[0].leave("a")
    meet(pair)
    assert freed(pair, "a") == [False, False]
    pair[1].ones["a"].begin()  # of which the other has no part
    pair[1].leave("a")
    meet(pair)
    assert freed(pair, "a") == [False, False]


def test_request_that_nobody_waits_for_counts_when_it_is_complete(pair: list[Worker]) -> None:
    requests = [worker.ones["a"].begin() for worker in pair]
    for worker, request in zip(pair, requests, strict=True):
        worker.in_the_air.append(request)
        worker.leave("a")
    requests[0].landed = True
    meet(pair)
    assert freed(pair, "a") == [False, False]
    requests[1].landed = True
    meet(pair)
    assert freed(pair, "a") == [True, True]
    assert not pair[1].in_the_air


def test_nothing_is_begun_in_what_is_put_away(pair: list[Worker]) -> None:
    pair[0].leave("a")
    pair[0].tell()
    with pytest.raises(RuntimeError, match="the strategy is closed"):
        pair[0].ones["a"].begin()
    pair[1].leave("a")
    meet(pair)
    assert freed(pair, "a") == [False, False], "for it does not know what has become of that"


def test_different_operations_stay_though_they_are_complete(pair: list[Worker]) -> None:
    for moved, worker in enumerate(pair):
        worker.ones["a"].begin(moved)
        worker.ones["a"].done += 1
        worker.leave("a")
    meet(pair)
    assert freed(pair, "a") == [False, False]


def test_meeting_without_one_of_its_workers_gives_nothing_back() -> None:
    workers = [Worker() for _ in range(3)]
    for worker in workers:
        worker.make(b"all", 3, "a")
        worker.leave("a")
    meet(workers[:2])
    assert freed(workers, "a") == [False] * 3
    meet(workers)
    assert freed(workers, "a") == [True] * 3


def test_many_strategies_that_nobody_has_closed_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(None))
    monkeypatch.setattr(holdings, "_many", [4])
    worker = Worker()
    for number in range(8):
        worker.make(b"%d" % number, 2, str(number))
        worker.tell()
    assert len(calls) == 1


STEPS = st.tuples(
    st.sampled_from(["begin", "land", "leave", "meet"]), st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 1)
)


class Model:
    """Three workers, with what they have begun."""

    def __init__(self) -> None:
        self.workers = [Worker() for _ in range(3)]
        for name in "abc":
            for worker in self.workers:
                worker.make(name.encode(), 3, name)
        self.air: list[tuple[str, Pending]] = []
        self.begun: defaultdict[str, list[list[int]]] = defaultdict(lambda: [[], [], []])

    def leave(self, rank: int, name: str, _: int) -> None:
        self.workers[rank].leave(name)

    def begin(self, rank: int, name: str, moved: int) -> None:
        with suppress(RuntimeError):  # it is put away
            self.air.append((name, self.workers[rank].ones[name].begin(moved)))
            self.begun[name][rank].append(moved)

    def land(self, *_: Any) -> None:
        if self.air:
            self.air[0][1].landed = True
            assert self.air.pop(0)[1].test()

    def meet(self, *_: Any) -> None:
        meet(self.workers)

    def check(self, name: str) -> None:
        gone = freed(self.workers, name)
        assert len(set(gone)) == 1
        if gone[0]:
            assert all(of != name for of, _ in self.air)
            assert len({(len(moved), sum(moved)) for moved in self.begun[name]}) == 1


STEPS = st.tuples(
    st.sampled_from([Model.begin, Model.land, Model.leave, Model.meet]),
    st.integers(0, 2),
    st.sampled_from("abc"),
    st.integers(0, 1),
)


@given(st.lists(STEPS, max_size=60))
def test_nothing_is_ever_given_back_by_some_or_with_anything_in_the_air(steps: list[Any]) -> None:
    model = Model()
    for step, *what in steps:
        step(model, *what)
        for name in "abc":
            model.check(name)


def test_communicators_of_one_strategy_are_known_by_their_names() -> None:
    workers = [Worker(), Worker()]
    for worker in workers:
        first = worker.make(b"one", 2, "a")
        with worker.here():
            worker.ones["b"] = One(2, "b", first.holdings)
        worker.leave("a")
    workers[1].ones["b"].begin()
    meet(workers)
    assert (freed(workers, "a"), freed(workers, "b")) == ([True, True], [False, False])
    assert [len(worker.known) for worker in workers] == [1, 1]
