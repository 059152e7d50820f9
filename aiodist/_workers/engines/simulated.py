"""Workers in one process: an engine, and their connections to the coordinator.

An operation is complete when every worker has begun it. Operations of one communicator match by number, as in an engine
without tags, so a test sees wrong values if different operations ever match; the cluster raises an error if their kinds
differ. A test can make a worker die.

Each worker learns of a complete operation by its own delivery. Deliveries are made at once or, if the cluster holds
them, when the test says so and in any order: one worker may be steps ahead of another, as in a real job.

A process that is its only worker is a cluster of one (`alone`): the same code, with nobody to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

import aiodist_kernels as kernels
from aiodist._workers.coordinator import Coordinator, Sent
from aiodist._workers.layout import Hello, layout_of
from aiodist._workers.messages import Ask, Message, decode, encode
from aiodist._workers.team import Team
from aiodist._workers.transport import Array, Communicator, Parts, Steps
from aiodist_kernels import ReduceOp

_Kind = tuple[Any, ...]


class SimulatedRequest:
    """An operation of one worker."""

    def __init__(self) -> None:
        self._done = False
        self._callbacks: list[Callable[[], object]] = []

    def test(self) -> bool:
        return self._done

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        if self._done:
            fn()
        else:
            self._callbacks.append(fn)

    def complete(self) -> None:
        self._done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class _Operation(NamedTuple):
    """A collective operation that some workers have begun."""

    kind: _Kind
    contributions: list[Any]  # by rank
    requests: list[SimulatedRequest]


class _World:
    """What the workers of a communicator share."""

    def __init__(self, size: int, cluster: SimulatedCluster) -> None:
        self.size = size
        self.cluster = cluster
        self.operations: dict[int, _Operation] = {}
        self.begun = [0] * size
        self.children: dict[object, _World] = {}

    def child(self, key: object, size: int) -> _World:
        with self.cluster.lock:
            return self.children.setdefault(key, _World(size, self.cluster))


class SimulatedCommunicator(Communicator):
    """One worker's view of a simulated cluster."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self.cluster = world.cluster
        self.engine = self.library = world.cluster.engine
        self._dups = count()

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        """Return whether it takes an op and dtype: for several workers as MPI does, so that tests cover both ways."""
        return self.size == 1 or dtype.kind in "iu" or (dtype.kind in "fc" and op in (ReduceOp.SUM, ReduceOp.PRODUCT))

    def _begin(self, kind: _Kind, contribution: Any, carry_out: Callable[[list[Any]], object]) -> SimulatedRequest:
        """Begin an operation; the last worker to do so carries it out, given all contributions by rank."""
        request, world, cluster = SimulatedRequest(), self._world, self.cluster
        if world.size == 1 and cluster.held is None:
            carry_out([contribution])
            request.complete()
            return request
        with cluster.lock:
            number = world.begun[self.rank]
            world.begun[self.rank] += 1
            operation = world.operations.get(number)
            if operation is None:
                operation = world.operations[number] = _Operation(kind, [None] * world.size, [])
            if operation.kind != kind:
                raise RuntimeError(f"worker {self.rank} begins {kind} where others have begun {operation.kind}")
            operation.contributions[self.rank] = contribution
            operation.requests.append(request)
            if len(operation.requests) == world.size:
                del world.operations[number]
                carry_out(operation.contributions)
                deliver = SimulatedRequest.complete if cluster.held is None else cluster.held.append
                for complete in operation.requests:
                    deliver(complete)
            return request

    def iallreduce(self, op: ReduceOp, send: Array, receive: Array) -> SimulatedRequest:
        """Reduce buffers over the workers in the order of their ranks."""
        if not (send.flags.c_contiguous and receive.flags.carray):
            raise ValueError("expected contiguous, aligned buffers")
        return self._begin(("allreduce", op, send.dtype, send.size), (send, receive), partial(_reduce, op))

    def iallgather(self, send: Array, receive: Array) -> SimulatedRequest:
        return self._begin(("allgather", send.size), (send, receive), _concatenate)

    def iallgatherv(self, send: Array, receive: Parts) -> SimulatedRequest:
        return self._begin(("allgatherv", tuple(receive.counts)), ([send] * self.size, receive.views()), _exchange)

    def ibcast(self, buffer: Array, root: int) -> SimulatedRequest:
        return self._begin(("bcast", root, buffer.size), buffer, partial(_broadcast, root))

    def ialltoallv(self, send: Parts, receive: Parts) -> SimulatedRequest:
        return self._begin(("alltoallv",), (send.views(), receive.views()), _exchange)

    def dup(self) -> Steps[Communicator]:
        return self._new(self._world.child(next(self._dups), self.size), self.rank)

    def create_group(self, ranks: Sequence[int], tag: int) -> Steps[Communicator]:
        return self._new(self._world.child((tag, *ranks), len(ranks)), list(ranks).index(self.rank))

    def _new(self, world: _World, rank: int) -> Steps[Communicator]:
        made = SimulatedCommunicator(world, rank)
        yield made._begin(("new",), None, lambda _: None)  # complete when all of them have called this
        return made


def _reduce(op: ReduceOp, buffers: list[Any]) -> None:
    total = kernels.reduce(op, [send for send, _ in buffers]) if len(buffers) > 1 else buffers[0][0]
    for _, receive in buffers:
        receive[...] = total


def _concatenate(buffers: list[Any]) -> None:
    whole = np.concatenate([send for send, _ in buffers])
    for _, receive in buffers:
        receive[...] = whole


def _exchange(parts: list[Any]) -> None:
    for sender, (sent, _) in enumerate(parts):
        for receiver in np.flatnonzero([part.size for part in sent]).tolist():
            parts[receiver][1][sender][...] = sent[receiver]


def _broadcast(root: int, buffers: list[Any]) -> None:
    for rank, buffer in enumerate(buffers):
        if rank != root:
            buffer[...] = buffers[root]


class SimulatedCluster:
    """Workers in one process, and what their control connections share.

    Args:
        size: the number of workers.
        answer_seconds: how long replicas have to settle once a run is in trouble.

    Attributes:
        communicators: by rank, for the workers' strategies.
        held: the deliveries that wait for `release`; None if all are made at once.
        introductions: by rank, how workers that have made a strategy introduce themselves, and what makes their `Team`.
        teams: by rank, once the first strategy is used.
    """

    def __init__(self, size: int, *, answer_seconds: float = 1.0) -> None:
        self.lock = threading.RLock()
        self.engine = "local" if size == 1 else "simulated"
        self.held: list[SimulatedRequest] | None = None
        self.introductions: dict[int, tuple[Hello, Callable[..., Team]]] = {}
        self.teams: list[Team] = []
        self._answer_seconds = answer_seconds
        self._lost: set[int] = set()
        self._timers: list[threading.Timer] = []
        world = _World(size, self)
        self.communicators = [SimulatedCommunicator(world, rank) for rank in range(size)]

    def release(self, index: int) -> None:
        """Make one of the deliveries that are held."""
        assert self.held is not None
        self.held.pop(index).complete()

    def connect(self) -> None:
        """Connect all workers, which have made their strategies, to a coordinator."""
        introductions = [self.introductions[rank] for rank in range(len(self.communicators))]
        layout = layout_of([hello for hello, _ in introductions])
        self._coordinator = Coordinator(layout)
        for communicator, (_, make) in zip(self.communicators, introductions, strict=True):
            seen = layout.seen_from(communicator.rank)
            self.teams.append(make(seen, communicator, partial(SimulatedControl, self)))

    def take(self, rank: int, message: Message) -> None:
        """Give the coordinator a worker's message."""
        with self.lock:
            if rank not in self._lost:
                self._send(self._coordinator.take(rank, decode(encode(message))))

    def lose(self, rank: int, why: str) -> None:
        """Lose a worker. It hears that it has lost the others."""
        with self.lock:
            if rank not in self._lost:
                self._send(self._coordinator.lose(rank, why))
                self._lost.add(rank)

    def _send(self, sent: Sent) -> None:
        for ranks, message in sent:
            received = decode(encode(message))
            for rank in ranks:
                self.teams[rank].post(received)
            if isinstance(message, Ask):
                timer = threading.Timer(self._answer_seconds, self._answer_for_all, (message.run,))
                timer.daemon = True
                timer.start()
                self._timers.append(timer)
        if self._coordinator.outcome is not None:
            for timer in self._timers:
                timer.cancel()

    def _answer_for_all(self, run: int) -> None:
        for team in self.teams:
            team.answer_for(run)


class SimulatedControl:
    """A worker's connection to the coordinator, by calls."""

    def __init__(self, cluster: SimulatedCluster, team: Team) -> None:
        self._cluster = cluster
        self._rank = team.layout.rank

    def send(self, message: Message) -> None:
        self._cluster.take(self._rank, message)

    def close(self) -> None:
        self._cluster.lose(self._rank, "has ended")


def alone() -> SimulatedCommunicator:
    """Return the communicator of a process that is its only worker."""
    return SimulatedCluster(1).communicators[0]
