"""A network between simulated workers that delivers late, in any order that a real one might, and watches buffers.

What workers begin on a communicator is complete on each of them at a moment of its own; until then what is received
holds nonsense, and what is sent must stay as it is. What goes to the coordinator and comes from it is late, too, in
order for each worker.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodist._workers.engines.simulated import SimulatedRequest, _Operation, _World
from aiodist._workers.simulated_control import SimulatedSwitchboard

_RECEIVED = {"allreduce": 1, "allgather": 1, "allgatherv": 1, "bcast": 0, "alltoallv": 1}
_SENT = {"allreduce": 0, "allgather": 0, "allgatherv": 0, "alltoallv": 0}
_NONSENSE = 0xA5


class AskedRequest:
    """A request that is to be asked again and again, as MPI's are."""

    def __init__(self) -> None:
        self._done = False

    def test(self) -> bool:
        return self._done

    def finish(self, result: Any) -> None:
        self._done = True


class IndependentRequest(AskedRequest):
    """Likewise, and it goes on in threads of the engine's."""

    by_itself = True


class Network:
    """What is on its way.

    Args:
        rng: decides what is delivered when.
        rate: how probable it is that something more is delivered in a turn of the loop.

    Attributes:
        held: channels in which nothing is delivered for the time being.
        misuses: what was done to buffers that may not be.
    """

    def __init__(self, rng: random.Random, rate: float) -> None:
        self._rng = rng
        self._rate = rate
        self._in_order = rng.random() < 0.5
        self._request: Any = rng.choice([SimulatedRequest] * 4 + [AskedRequest, IndependentRequest])
        self._near = rng.random() < 0.5  # the coordinator's own worker hears of it at once
        self._channels: dict[Hashable, deque[Callable[[], object]]] = {}
        self._posted = anyio.Event()
        self.held: set[Hashable] = set()
        self.misuses: list[str] = []

    def post(self, channel: Hashable, delivery: Callable[[], object]) -> None:
        self._channels.setdefault(channel, deque()).append(delivery)
        self._posted.set()

    async def deliver(self) -> None:
        """Deliver, until cancelled."""
        while True:
            ready = [channel for channel in self._channels if channel not in self.held]
            if not ready:
                self._posted = anyio.Event()
                await self._posted.wait()
            elif self._rng.random() < self._rate:
                channel = self._rng.choice(ready)
                delivery = self._channels[channel].popleft()
                if not self._channels[channel]:
                    del self._channels[channel]
                delivery()
                continue
            await anyio.lowlevel.checkpoint()

    def release(self, *channels: Hashable) -> None:
        """Deliver in these channels again."""
        self.held.difference_update(channels)
        self._posted.set()

    # The engine.

    def begin(self, world: _World, rank: int, kind: Any, part: Any, carry_out: Callable[[list[Any]], Any]) -> Any:
        number = world.begun[rank]
        world.begun[rank] += 1
        operation: Any = world.operations.setdefault(number, _Operation(kind, world.size))
        if operation.kind != kind:
            raise RuntimeError(f"worker {rank} begins {kind} where others have begun {operation.kind}")
        request = self._request() if kind[0] in _RECEIVED else SimulatedRequest()
        operation.parts[rank] = part
        operation.requests.append((rank, request, self._sent(kind, part)))
        if len(operation.requests) == world.size:
            del world.operations[number]
            self._complete(world, number, operation, carry_out)
        return request

    def _sent(self, kind: Any, part: Any) -> Any:
        place = _SENT.get(kind[0])
        if place is None or part[0] is part[1]:
            return None
        return part[place], _bytes_in(part[place])

    def _complete(self, world: _World, number: int, operation: Any, carry_out: Callable[[list[Any]], Any]) -> None:
        result = carry_out(operation.parts)
        for rank, request, sent in operation.requests:
            if operation.kind[0] not in _RECEIVED:
                request.finish(result)
                continue
            gives = operation.kind[:2] == ("bcast", rank)
            target = [] if gives else operation.parts[rank][_RECEIVED[operation.kind[0]]]
            found = _bytes_in(target)
            for piece in _pieces(target):
                piece[...] = _NONSENSE
            land = partial(self._land, f"{operation.kind} of worker {rank}", request, target, found, sent)
            self.post(("data", id(world), rank, None if self._in_order else number), land)

    def _land(self, what: str, request: Any, target: Any, found: bytes, sent: Any) -> None:
        if not all((piece == _NONSENSE).all() for piece in _pieces(target)):
            self.misuses.append(f"written to before it was complete: {what}")
        if sent is not None and _bytes_in(sent[0]) != sent[1]:
            self.misuses.append(f"sent, and changed before it was complete: {what}")
        at = 0
        for piece in _pieces(target):
            piece[...] = np.frombuffer(found, np.uint8, piece.size, at)
            at += piece.size
        request.finish(None)

    # The control plane.

    def report(self, late: Any, switchboard: SimulatedSwitchboard, rank: int, *arguments: Any) -> None:
        self._control(("to the coordinator", rank), rank, partial(late, switchboard, rank, *arguments))

    def call(self, late: Any, switchboard: SimulatedSwitchboard, rank: int, *arguments: Any) -> None:
        self._control(("from the coordinator", rank), rank, partial(late, switchboard, rank, *arguments))

    def book(self, switchboard: SimulatedSwitchboard, rank: int, request: Any) -> None:
        def take() -> None:
            for to, reply in switchboard._coordinator.take(rank, request):
                if to not in switchboard._lost:
                    hear = partial(switchboard._listeners[to].booked, reply)
                    self._control(("from the coordinator", to), to, hear)

        if rank not in switchboard._lost:
            self._control(("to the coordinator", rank), rank, take)

    def _control(self, channel: Hashable, rank: int, delivery: Callable[[], object]) -> None:
        if rank == 0 and self._near:
            delivery()
        else:
            self.post(channel, delivery)


def _pieces(buffer: Any) -> list[Any]:
    """Return the bytes of what an operation reads or writes: an array, or several."""
    return [array.reshape(-1).view(np.uint8) for array in (buffer if isinstance(buffer, list) else [buffer])]


def _bytes_in(buffer: Any) -> bytes:
    return b"".join(piece.tobytes() for piece in _pieces(buffer))


@asynccontextmanager
async def network(seed: int, rate: float = 0.5) -> AsyncIterator[Network]:
    """Let everything between the workers be late, in an order that the seed decides."""
    net = Network(random.Random(seed), rate)
    begin = _World.begin
    shared = {"share"}  # the first meeting, in which nobody can wait

    def begin_late(world: _World, rank: int, kind: Any, *rest: Any) -> Any:
        return (begin if kind[0] in shared else net.begin)(world, rank, kind, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_World, "begin", begin_late)
        patch.setattr(SimulatedSwitchboard, "book", lambda *arguments: net.book(*arguments))  # noqa: PLW0108  (a method)
        for name, way in (("report", net.report), ("_ask", net.call), ("_tell", net.call)):
            late = partial(way, getattr(SimulatedSwitchboard, name))
            patch.setattr(SimulatedSwitchboard, name, lambda *arguments, late=late: late(*arguments))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(net.deliver)
            yield net
            tasks.cancel_scope.cancel()
    assert not net.misuses, net.misuses
