"""Links between workers that are being made while their worker leaves: none is left open."""

from __future__ import annotations

import gc
import platform
import queue
import socket
from collections.abc import Iterator
from selectors import DefaultSelector

import pytest

from aiodist.workers.addresses import Listening
from aiodist.workers.joining import Hello
from aiodist.workers.links import Links
from tests.workers.over_tcp import strategies


class Worker:
    """A worker's links, without a thread that serves them."""

    def __init__(self, rank: int, hellos: list[Hello], listening: Listening) -> None:
        self.selector = DefaultSelector()
        self.made: queue.Queue[tuple[int, socket.socket]] = queue.Queue()
        self.links = Links(
            rank, hellos, listening.socket, self.selector, lambda *made: self.made.put(made), lambda _: None
        )

    def accept(self) -> None:
        assert self.selector.select(20)
        self.links.accept()


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    """Return the links of workers 1 and 2 of 3: the second dials the first."""
    sockets = [Listening() for _ in range(3)]
    hellos = [Hello(("CPU:0",), platform.node(), 0, each.address) for each in sockets]
    workers = Worker(1, hellos, sockets[1]), Worker(2, hellos, sockets[2])
    yield workers
    sockets[0].socket.close()
    for worker in workers:
        worker.links.close()
        worker.selector.close()


def test_link_that_is_made_and_never_added_is_closed_with_the_others(pair: tuple[Worker, Worker]) -> None:
    pair[0].accept()
    made = [worker.made.get(timeout=20) for worker in pair]
    assert [rank for rank, _ in made] == [2, 1]
    for worker in pair:
        worker.links.close()
    assert [connection.fileno() for _, connection in made] == [-1, -1]


def test_link_that_is_made_after_the_others_are_closed_is_closed_at_once(pair: tuple[Worker, Worker]) -> None:
    dialled, dials = pair
    dials.links.close()
    dialled.accept()
    _, connection = dialled.made.get(timeout=20)
    assert connection.recv(1) == b""
    assert dials.made.empty()


def test_link_that_the_other_end_does_not_answer_is_closed(pair: tuple[Worker, Worker]) -> None:
    dialled, _ = pair
    assert dialled.selector.select(20)
    ((key, _),) = dialled.selector.select(0)
    listening = key.fileobj
    assert isinstance(listening, socket.socket)
    connection, _ = listening.accept()
    with connection:
        connection.settimeout(20)
        while connection.recv(1 << 10):
            connection.shutdown(socket.SHUT_WR)


def test_strategies_that_are_closed_while_links_are_made_leave_no_socket() -> None:
    for _ in range(3):
        for strategy in strategies(4):
            strategy.close()
    gc.collect()
