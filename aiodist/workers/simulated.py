"""The simulated engine: many workers in one process, which a test can let die, be cut off, or come late.

Communicators of one rank after the other are made by a `SimulatedCluster`. An operation is complete when every worker
has begun it. Operations of one communicator match by their number, as an engine's do that knows no tags: so a test
would see values mixed up if aiodist ever let different operations meet; the cluster raises where even their kinds
differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

import aiodist_kernels as kernels
from aiodist._core.call import OrderCheck
from aiodist.workers.communicator import Array, Request, Sharing, parts_of
from aiodist.workers.joining import Hello
from aiodist.workers.layout import Layout
from aiodist.workers.simulated_control import SimulatedControl, SimulatedSwitchboard
from aiodist_kernels import ReduceOp

_Part = tuple[Any, ...]
_Kind = tuple[Any, ...]
T = TypeVar("T")
V = TypeVar("V")


class SimulatedRequest:
    """An operation of one worker."""

    def __init__(self) -> None:
        self._done = False
        self._result: Any = None
        self._callbacks: list[Callable[[], object]] = []

    def test(self) -> bool:
        """Return whether every worker has begun it."""
        return self._done

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Call a function when it is complete."""
        if self._done:
            fn()
        else:
            self._callbacks.append(fn)

    def result(self) -> Any:
        """Return what was made for all workers."""
        return self._result

    def finish(self, result: Any) -> None:
        """Complete it."""
        self._done, self._result = True, result
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class _Operation:
    """One collective operation: what each worker brought."""

    def __init__(self, kind: _Kind, size: int) -> None:
        self.kind = kind
        self.parts: list[_Part | None] = [None] * size
        self.requests: list[SimulatedRequest] = []


class _World:
    """A communicator as all workers share it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.operations: dict[int, _Operation] = {}
        self.begun = [0] * size
        self.children: dict[object, _World] = {}

    def begin(self, rank: int, kind: _Kind, part: _Part, carry_out: Callable[[list[Any]], Any]) -> SimulatedRequest:
        with self.lock:
            number = self.begun[rank]
            self.begun[rank] += 1
            operation = self.operations.get(number)
            if operation is None:
                operation = self.operations[number] = _Operation(kind, self.size)
            if operation.kind != kind:
                raise RuntimeError(f"worker {rank} begins {kind} where others have begun {operation.kind}")
            operation.parts[rank] = part
            request = SimulatedRequest()
            operation.requests.append(request)
            if len(operation.requests) == self.size:
                del self.operations[number]
                result = carry_out(operation.parts)
                for finished in operation.requests:
                    finished.finish(result)
            return request

    def child(self, key: object, size: int) -> _World:
        with self.lock:
            if key not in self.children:
                self.children[key] = _World(size)
            return self.children[key]


class SimulatedCommunicator:
    """One worker's view of a simulated cluster."""

    engine = "simulated"
    segment_depth = 2

    def __init__(self, world: _World, rank: int, cluster: SimulatedCluster) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self.cluster = cluster
        self._duplicates = 0

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        """Return whether it takes an op and dtype: what MPI takes, so that both ways are tried."""
        return dtype.kind in "iu" or (dtype.kind in "fc" and op in (ReduceOp.SUM, ReduceOp.PRODUCT))

    def iallreduce(self, op: ReduceOp, send: Array, receive: Array) -> Request:
        """Reduce buffers over the workers, in the order of their ranks.

        Raises:
            ValueError: a buffer is one that engines do not take.
        """
        if not all(buffer.flags.c_contiguous and buffer.flags.aligned for buffer in (send, receive)):
            raise ValueError("expected buffers in one piece whose numbers lie where the machine wants them")

        def carry_out(parts: list[Any]) -> None:
            total = kernels.reduce(op, [mine for mine, _ in parts])
            for _, target in parts:
                target[...] = total

        return self._begin(("allreduce", op, send.dtype, send.size), (send, receive), carry_out)

    def iallgather(self, send: Array, receive: Array) -> Request:
        """Put buffers together by rank."""

        def carry_out(parts: list[Any]) -> None:
            whole = np.concatenate([mine for mine, _ in parts])
            for _, target in parts:
                target[...] = whole

        return self._begin(("allgather", send.size), (send, receive), carry_out)

    def iallgatherv(
        self, send: Array, receive: Array, counts: Sequence[int], places: Sequence[int] | None = None
    ) -> Request:
        """Put buffers of several sizes together by rank."""

        def carry_out(parts: list[Any]) -> None:
            sent = [mine for mine, _ in parts]
            if places is None:
                sent = [np.concatenate(sent)]
            for _, targets in parts:
                for target, mine in zip(targets, sent, strict=True):
                    target[...] = mine

        targets = [receive] if places is None else parts_of(receive, counts, places)
        return self._begin(("allgatherv", tuple(counts), places is None), (send, targets), carry_out)

    def ibcast(self, buffer: Array, root: int) -> Request:
        """Overwrite every buffer with that of one worker."""

        def carry_out(parts: list[Any]) -> None:
            for rank, (target,) in enumerate(parts):
                if rank != root:
                    target[...] = parts[root][0]

        return self._begin(("bcast", root, buffer.size), (buffer,), carry_out)

    def ialltoallv(
        self,
        send: Array,
        send_counts: Sequence[int],
        receive: Array,
        receive_counts: Sequence[int],
        send_places: Sequence[int] | None = None,
        receive_places: Sequence[int] | None = None,
    ) -> Request:
        """Send every worker its part."""

        def carry_out(parts: list[Any]) -> None:
            for sender, (sent, _) in enumerate(parts):
                for receiver in np.flatnonzero([part.size for part in sent]).tolist():
                    parts[receiver][1][sender][...] = sent[receiver]

        parts = parts_of(send, send_counts, send_places), parts_of(receive, receive_counts, receive_places)
        return self._begin(("alltoallv",), parts, carry_out)

    def ishare(self, value: V, make: Callable[[Sequence[V]], T]) -> Sharing[T]:
        """Make one object of what all workers bring."""
        return self._begin(("share",), (value,), lambda parts: make([value for (value,) in parts]))

    def _begin(self, kind: _Kind, part: _Part, carry_out: Callable[[list[Any]], Any]) -> SimulatedRequest:
        return self._world.begin(self.rank, kind, part, carry_out)

    def idup(self) -> SimulatedDuplication:
        """Make another communicator of the same workers."""
        number = self._duplicates
        self._duplicates += 1
        request = self._begin(("dup",), (), lambda _: None)
        world = self._world.child(number, self.size)
        return SimulatedDuplication(request, SimulatedCommunicator(world, self.rank, self.cluster))

    def isplit(self, workers: Sequence[int], number: int) -> SimulatedDuplication:
        """Make a communicator of some of the workers: it is complete when all of them have called this."""
        rank = list(workers).index(self.rank)
        world = self._world.child((number, *workers), len(workers))
        request = world.begin(rank, ("split",), (), lambda _: None)
        return SimulatedDuplication(request, SimulatedCommunicator(world, rank, self.cluster))

    def wait(self, request: Request) -> None:
        """Check that a request is complete: nobody else can act while this worker blocks.

        Raises:
            RuntimeError: it is not.
        """
        if not request.test():
            raise RuntimeError(
                f"worker {self.rank} of {self.size} simulated ones waits for others that have not got this far: make "
                "the strategies of all of them first"
            )

    def listening(self) -> None:
        """Return that there is no address."""

    def control(self, layout: Layout, order_check: OrderCheck, hellos: Sequence[Hello]) -> SimulatedControl:  # noqa: ARG002
        """Return this worker's control plane."""
        return SimulatedControl(self.cluster.switchboard(layout, order_check), self.rank)


class SimulatedDuplication:
    """A simulated communicator in the making."""

    def __init__(self, request: SimulatedRequest, made: SimulatedCommunicator) -> None:
        self._made = made
        self.test = request.test
        self.add_done_callback = request.add_done_callback

    def result(self) -> SimulatedCommunicator:
        """Return it."""
        return self._made


class SimulatedCluster:
    """Workers in one process.

    Args:
        size: how many.

    Attributes:
        communicators: one each, for their strategies.
    """

    def __init__(self, size: int) -> None:
        world = _World(size)
        self.communicators = [SimulatedCommunicator(world, rank, self) for rank in range(size)]
        self._switchboard: SimulatedSwitchboard | None = None

    def switchboard(self, layout: Layout, order_check: OrderCheck) -> SimulatedSwitchboard:
        """Return what the workers' control planes share."""
        if self._switchboard is None:
            self._switchboard = SimulatedSwitchboard(layout, order_check)
        return self._switchboard

    def lose(self, rank: int, why: str) -> None:
        """Let a worker be lost, and say how: it has died, or is cut off, say.

        Raises:
            RuntimeError: the workers have not met yet.
        """
        if self._switchboard is None:
            raise RuntimeError("a worker can be lost once the workers have met")
        self._switchboard.lose(rank, why)
