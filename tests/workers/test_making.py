"""Communicators of some of the workers: made without blocking, one after the other, apart from each other."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from aiodist.workers.local import LocalCommunicator
from aiodist.workers.making import Maker
from aiodist.workers.simulated import SimulatedCluster


def test_a_split_is_complete_when_all_its_members_have_called_it() -> None:
    world = SimulatedCluster(3).communicators
    first = world[0].isplit([0, 2], 1)
    other = world[0].isplit([0, 1], 2)
    assert not first.test()
    last = world[2].isplit([0, 2], 1)
    assert first.test()
    assert last.test()
    assert not other.test()
    made = [first.result(), last.result()]
    assert [(one.rank, one.size) for one in made] == [(0, 2), (1, 2)]
    received = [np.zeros(2, np.uint8), np.zeros(2, np.uint8)]
    for one, buffer in zip(made, received, strict=True):
        one.iallgather(np.array([one.rank + 1], np.uint8), buffer)
    assert [buffer.tolist() for buffer in received] == [[1, 2], [1, 2]]


def test_what_can_only_block_is_made_in_a_thread_in_the_order_of_the_calls() -> None:
    let_go, done = threading.Event(), threading.Event()
    order: list[int] = []

    def make(number: int) -> LocalCommunicator:
        let_go.wait()
        order.append(number)
        return LocalCommunicator()

    maker = Maker()
    made = [maker.begin(lambda number=number: make(number)) for number in range(3)]  # type: ignore[misc]
    assert not any(one.test() for one in made)
    made[-1].add_done_callback(done.set)
    let_go.set()
    assert done.wait(10)
    assert order == [0, 1, 2]
    for thread in threading.enumerate():
        if thread.name == "aiodist communicators":
            thread.join()
    assert all(one.test() and one.result().size == 1 for one in made)


def test_what_two_strategies_make_waits_for_no_other() -> None:
    let_go, done = threading.Event(), threading.Event()

    def make_when_let_go() -> LocalCommunicator:
        let_go.wait()
        return LocalCommunicator()

    first = Maker().begin(make_when_let_go)
    Maker().begin(LocalCommunicator).add_done_callback(done.set)
    assert done.wait(10)
    assert not first.test()
    let_go.set()


def test_an_engines_error_is_for_who_asks() -> None:
    def make() -> LocalCommunicator:
        raise OSError("no more communicators")

    done = threading.Event()
    made = Maker().begin(make)
    made.add_done_callback(done.set)
    assert done.wait(10)
    for thread in threading.enumerate():
        if thread.name == "aiodist communicators":
            thread.join()
    with pytest.raises(OSError, match="no more communicators"):
        made.test()
