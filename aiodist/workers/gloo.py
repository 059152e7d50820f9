"""The gloo engine, through PyTorch: for machines that have PyTorch and no MPI.

Every communicator is a process group of its own, beside whatever groups the program has: PyTorch's default group is
neither used nor made. Workers meet in a store that `aiodist run` names, where groups have names that count up on
every worker alike.

gloo has no sums of 16 bits, or of unsigned numbers, and leaves open what MIN makes of NaN: unsigned numbers are reduced
as signed ones, to which they are mapped and from which they are mapped back; everything else travels as bytes
(`transfers`), and is folded by our own kernels.

gloo's threads carry operations on by themselves. They could call back when one is complete, but an operation may stay
incomplete for ever, and one that ends while the interpreter does would call what is no more: the process then crashes.
So it is asked after naps.

A group's threads wait for workers that may never come, and its end would wait for them in turn. So a group is never
ended: the end of the process closes its connections.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Final

import numpy as np

from aiodist.workers.addresses import own_numbers
from aiodist.workers.communicator import Array, Request, parts_of
from aiodist.workers.joining import FIRST_MEETING_SECONDS, wait
from aiodist.workers.separate import SeparateProcess, in_the_air
from aiodist_kernels import ReduceOp

INSTALL: Final = "the gloo engine needs PyTorch: pip install 'aiodist[torch]'"
_THREADS: Final = 2
_NEVER: Final = timedelta(days=3650)  # how long workers are waited for is the control plane's to say
_AS_IT_IS: Final = {np.dtype(name) for name in ("int8", "uint8", "int32", "int64", "float32", "float64")}
_AS_SIGNED: Final = {np.dtype(np.uint32): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.int64)}
_LAST_PORT: Final = 65535
_strategies: Final = count()  # the k-th one of every worker is the same
_served: Final[list[Any]] = []  # the store of this process, which the others connect to
_COMPLEX: Final = {np.dtype(np.complex64), np.dtype(np.complex128)}


def load_gloo() -> Any:
    """Return PyTorch's module of process groups.

    Raises:
        ImportError: PyTorch is not installed, or has been built without gloo.
    """
    try:
        found = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise ImportError(f"{INSTALL} ({error})") from error
    if not found.is_available() or not found.is_gloo_available():
        raise ImportError(f"this PyTorch has been built without gloo; {INSTALL}")
    return found


class GlooRequest:
    """Operations of gloo's that are one of ours, and the buffers that they use.

    Args:
        works: as gloo returns them.
        buffers: those.
        finish: called once, when all are complete.
    """

    by_itself = True

    def __init__(
        self,
        works: Sequence[Any],
        *buffers: object,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._works = list(works)
        self._buffers = buffers
        self._finish = finish
        self._done = False

    def test(self) -> bool:
        """Return whether it is complete.

        Raises:
            RuntimeError: the connection to another worker has ended.
        """
        if self._done:
            return True
        while self._works:
            if not self._works[-1].is_completed():
                return False
            self._works[-1].wait()  # which raises what went wrong
            self._works.pop()
        self._done = True
        if self._finish is not None:
            self._finish()
        return True

    def __del__(self) -> None:
        """Stay, where nobody waits for it any more, until it is complete."""
        if not self._done:
            in_the_air.append(self)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Where workers meet to make groups.

    Attributes:
        open: returns a connection of its own to the store that all write to and read from.
        hostname: the number of this machine at which the others reach it.
        rank: this worker.
        size: how many there are.
    """

    open: Callable[[], Any]
    hostname: str
    rank: int
    size: int

    def make(self, name: str) -> GlooCommunicator:
        """Make a communicator, together with all workers; it blocks until all are there."""
        found = load_gloo()
        gloo = found.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.hostname)]
        options._threads = _THREADS
        options._timeout = timedelta(seconds=FIRST_MEETING_SECONDS)
        group = gloo(found.PrefixStore(f"aiodist/{name}", self.open()), self.rank, self.size, options)
        group._set_default_timeout(_NEVER)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # so that nothing ends it
        return GlooCommunicator(self, name, group)

    def make_strategys(self) -> GlooCommunicator:
        """Make the communicator of the next strategy; one that the others did not make in time is gone on with."""
        made = _unmet.pop() if _unmet else GlooDuplication(self, str(next(_strategies)))
        try:
            wait(made, self.rank, self.size)
        except BaseException:
            if not made.failed:
                _unmet.append(made)
            raise
        return made.result()


class GlooDuplication:
    """A communicator of gloo's in the making, in a thread of its own: gloo can only block in that.

    Args:
        meeting: of its workers.
        name: its own, the same on all of them.
    """

    def __init__(self, meeting: _Meeting, name: str) -> None:
        self._made: GlooCommunicator | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._make, args=(meeting, name), name="aiodist gloo", daemon=True).start()

    def _make(self, meeting: _Meeting, name: str) -> None:
        try:
            self._made = meeting.make(name)
        except Exception as error:  # noqa: BLE001  (it is for who waits)
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether it will never be complete."""
        return self._error is not None

    def test(self) -> bool:
        """Return whether it is complete.

        Raises:
            RuntimeError: another worker has gone meanwhile.
        """
        if self._error is not None:
            raise self._error
        return self._made is not None

    def result(self) -> GlooCommunicator:
        """Return it."""
        assert self._made is not None
        return self._made


_unmet: Final[list[GlooDuplication]] = []
"""What was begun for a strategy that the others did not make in time."""


class GlooCommunicator(SeparateProcess):
    """Workers that gloo connects.

    Args:
        meeting: where they make further groups.
        name: this one's.
        group: of gloo's.
    """

    engine = "gloo"
    segment_depth = _THREADS

    def __init__(self, meeting: _Meeting, name: str, group: Any) -> None:
        self._found = load_gloo()
        self._meeting = meeting
        self._handle = group
        self._children = 0
        self.name = name
        self.rank = meeting.rank
        self.size = meeting.size

    @classmethod
    def of_job(cls, rank: int, size: int, rendezvous: str) -> GlooCommunicator:
        """Return a communicator of all workers that the launcher has started.

        Args:
            rank: this worker.
            size: how many there are.
            rendezvous: where they meet: the path of a file, or ``host:port`` of the first worker's machine.

        Raises:
            ImportError: PyTorch is not installed, or has been built without gloo.
            RuntimeError: the others do not come.
            ValueError: ``rendezvous`` is neither.
        """
        found = load_gloo()
        if os.sep in rendezvous:
            return _Meeting(lambda: found.FileStore(rendezvous), "127.0.0.1", rank, size).make_strategys()
        host, _, port = rendezvous.rpartition(":")
        if not (host and port.isdigit() and 0 < int(port) <= _LAST_PORT):
            raise ValueError(
                "workers of gloo are started by `aiodist run --engine gloo`, which tells them where they meet, got "
                f"{rendezvous!r} in AIODIST_RENDEZVOUS"
            )
        number = _number_toward(host, int(port))
        connect = partial(found.TCPStore, host, int(port), timeout=timedelta(seconds=FIRST_MEETING_SECONDS))
        if rank == 0 and not _served:
            try:
                _served.append(connect(is_master=True, wait_for_workers=False))
            except RuntimeError as error:
                raise RuntimeError(
                    f"worker 0 of {size} cannot listen at port {port} of its machine, where the others are to find it "
                    f"({str(error).splitlines()[0]}); start the job again, for `aiodist run` chooses another port"
                ) from error
        return _Meeting(connect, number, rank, size).make_strategys()

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        """Return whether gloo takes an op and dtype with our meaning: its MIN and MAX leave NaN open."""
        if dtype.kind in "iu":
            return dtype in _AS_IT_IS or dtype in _AS_SIGNED
        if dtype in _COMPLEX:
            return op is ReduceOp.SUM
        return dtype in _AS_IT_IS and op in (ReduceOp.SUM, ReduceOp.PRODUCT)

    def iallreduce(self, op: ReduceOp, send: Array, receive: Array) -> Request:
        """Reduce buffers over the workers; gloo does it in place."""
        if send is not receive:
            receive[...] = send
        signed = _AS_SIGNED.get(receive.dtype)
        if signed is None:
            return GlooRequest([self._allreduce(op, receive)], receive)
        if op in (ReduceOp.SUM, ReduceOp.PRODUCT):  # the same bits
            return GlooRequest([self._allreduce(op, receive.view(signed))], receive)
        half = receive.dtype.type(1) << receive.dtype.type(8 * receive.itemsize - 1)
        np.bitwise_xor(receive, half, out=receive)  # keeps the order: 0 becomes the least signed number
        work = self._allreduce(op, receive.view(signed))
        return GlooRequest([work], receive, finish=lambda: np.bitwise_xor(receive, half, out=receive))

    def _allreduce(self, op: ReduceOp, buffer: Array) -> Any:
        options = self._found.AllreduceOptions()
        options.reduceOp = getattr(self._found.ReduceOp, op.name)
        return self._handle.allreduce([_tensor(buffer)], options)

    def iallgather(self, send: Array, receive: Array) -> Request:
        """Put buffers together by rank."""
        return GlooRequest([self._handle._allgather_base(_tensor(receive), _tensor(send))], send, receive)

    def iallgatherv(
        self, send: Array, receive: Array, counts: Sequence[int], places: Sequence[int] | None = None
    ) -> Request:
        """Put buffers of several sizes together by rank: each worker broadcasts its own to where it belongs."""
        if places is None and len(set(counts)) == 1:
            return self.iallgather(send, receive)
        parts = parts_of(receive, counts, places)
        parts[self.rank][...] = send
        works = [self._broadcast(part, root) for root, part in enumerate(parts) if part.size]
        return GlooRequest(works, receive)

    def ibcast(self, buffer: Array, root: int) -> Request:
        """Overwrite a buffer with that of one worker."""
        return GlooRequest([self._broadcast(buffer, root)], buffer)

    def _broadcast(self, buffer: Array, root: int) -> Any:
        options = self._found.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._handle.broadcast([_tensor(buffer)], options)

    def ialltoallv(
        self,
        send: Array,
        send_counts: Sequence[int],
        receive: Array,
        receive_counts: Sequence[int],
        send_places: Sequence[int] | None = None,
        receive_places: Sequence[int] | None = None,
    ) -> Request:
        """Send every worker its part; gloo knows of no places."""
        if send_places is not None:
            send = np.concatenate(parts_of(send, send_counts, send_places))
        room = receive if receive_places is None else np.empty(sum(receive_counts), np.uint8)
        counts = list(receive_counts), list(send_counts)
        work = self._handle.alltoall_base(_tensor(room), _tensor(send), *counts)

        def put() -> None:
            for part, came in zip(
                parts_of(receive, receive_counts, receive_places), parts_of(room, receive_counts, None), strict=True
            ):
                part[...] = came

        return GlooRequest([work], send, room, finish=None if room is receive else put)

    def idup(self) -> GlooDuplication:
        """Make another communicator of the same workers."""
        self._children += 1
        return GlooDuplication(self._meeting, f"{self.name}.{self._children}")

    def isplit(self, workers: Sequence[int], number: int) -> GlooDuplication:
        """Make a communicator of some of the workers."""
        meeting = replace(self._meeting, rank=list(workers).index(self.rank), size=len(workers))
        return GlooDuplication(meeting, f"{self.name}/{number} of {list(workers)}")


def _tensor(buffer: Array) -> Any:
    """Return a tensor with a buffer's memory; of one that is read-only, which is only sent, with a copy of it."""
    return importlib.import_module("torch").from_numpy(buffer if buffer.flags.writeable else buffer.copy())


def _number_toward(host: str, port: int) -> str:
    """Return the number of this machine on the network by which it reaches another, or others reach it.

    Raises:
        RuntimeError: the other has no number.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise RuntimeError(
            f"the first worker's machine {host!r} cannot be reached ({error}); name it in --hosts, or in "
            "AIODIST_CONTROL_ADDRESS, as the others know it"
        ) from error
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # which sends nothing
        number = str(probe.getsockname()[0])
    if number.startswith(
        ("127.", "::1")
    ):  # many machines know themselves by such a number, which the others do not reach
        return next(iter(own_numbers()), number)
    return number
