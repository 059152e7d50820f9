"""NCCL, through its maker's own binding for Python, nccl4py: this room alone calls it.

**Why nccl4py**: NVIDIA keeps it beside NCCL; it needs cuda.core, which is there already, and no framework; it loads
the library of whichever NCCL is installed, at the first call, so that it imports anywhere. The bindings of CuPy and
PyTorch come with their frameworks. Buffers are given to its lower layer, as addresses: the upper one looks for PyTorch
and CuPy at each of them, and would load them.

**Nothing here blocks.** Links are of NCCL's nonblocking kind: what would wait for other workers goes on in threads of
NCCL's, and until `Link.is_ready` says that it has been enqueued, nothing else may be, on that link or on its stream.
What is enqueued occupies its stream until all workers have enqueued the same. `Link.abort` ends it, whatever the others
do; there is no other end, since a plain one waits for the other workers of the machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

from aiodist_kernels import ReduceOp

INSTALL: Final = "pip install 'aiodist[nccl]'"
ID_BYTES: Final = 128

_OPS: Final = {ReduceOp.SUM: "SUM", ReduceOp.PRODUCT: "PROD", ReduceOp.MIN: "MIN", ReduceOp.MAX: "MAX"}


class Buffer(NamedTuple):
    """Numbers in a GPU's memory.

    Attributes:
        address: of the first.
        length: how many there are.
        kind: what they are, as NumPy names it: "float32", "int8".
    """

    address: int
    length: int
    kind: str


class Link(Protocol):
    """One worker's part of what NCCL calls a communicator."""

    def is_ready(self) -> bool:
        """Return whether what was asked for has been enqueued, or made.

        Raises:
            RuntimeError: something has gone wrong, here or with another worker.
        """
        ...

    def all_reduce(self, op: ReduceOp, buffers: Sequence[Buffer], stream: int) -> None:
        """Reduce buffers in place over the workers, all in one step, in the order of a stream.

        Raises:
            RuntimeError: NCCL refuses.
        """

    def broadcast(self, root: int, buffers: Sequence[Buffer], stream: int) -> None:
        """Give all workers what one has in its buffers, all in one step, in the order of a stream.

        Raises:
            RuntimeError: NCCL refuses.
        """

    def abort(self) -> None:
        """End it, and all that it has enqueued."""


class Library(Protocol):
    """The library.

    Attributes:
        version: e.g. "2.32.3".
    """

    version: str

    def new_id(self) -> bytes:
        """Return what the workers of a new link know it by.

        Raises:
            RuntimeError: NCCL fails.
        """
        ...

    def link(self, size: int, rank: int, known_by: bytes) -> Link:
        """Begin to make a link on the current device.

        Raises:
            RuntimeError: NCCL refuses.
        """
        ...


@cache
def library() -> Library:
    """Return NCCL.

    Raises:
        ImportError: it, or its binding, is not installed.
    """
    return Nccl()


class Nccl:
    """NCCL through nccl4py; see `Library`.

    Raises:
        ImportError: it, or its binding, is not installed.
    """

    def __init__(self) -> None:
        try:
            self._core: Any = importlib.import_module("nccl.core")
            self._low: Any = importlib.import_module("nccl.bindings.nccl")
        except ImportError as error:
            raise ImportError(f"NCCL's binding, nccl4py, is not installed: {INSTALL} ({error})") from error
        found = self._core.get_version().libnccl
        if found is None:
            raise ImportError(f"NCCL's library, libnccl.so.2, was not found: {INSTALL}")
        self.version = str(found.version)

    def new_id(self) -> bytes:
        """Return what the workers of a new link know it by."""
        try:
            return bytes(self._core.get_unique_id())
        except self._low.NCCLError as error:
            raise _failure("cannot name a link", error) from error

    def link(self, size: int, rank: int, known_by: bytes) -> Link:
        """Begin to make a link."""
        return _Link(self, size, rank, known_by)


class _Link:
    def __init__(self, nccl: Nccl, size: int, rank: int, known_by: bytes) -> None:
        core, self._low = nccl._core, nccl._low
        self._types: Any = core.NcclDataType
        self._ops: Any = core.NcclRedOp
        try:
            unique_id = core.UniqueId.from_bytes(known_by)
            self._communicator: Any = core.Communicator.init(size, rank, unique_id, core.NCCLConfig(blocking=False))
        except self._low.NCCLError as error:
            raise _failure("cannot link the workers", error) from error

    def is_ready(self) -> bool:
        """Return whether what was asked for has been enqueued, or made."""
        result = self._low.Result
        state = self._communicator.get_async_error()
        if state not in {result.Success, result.InProgress}:
            raise RuntimeError(f"NCCL has failed: {self._core_error(state)}")
        return bool(state == result.Success)

    def _core_error(self, state: Any) -> str:
        last = self._communicator.get_last_error()
        return f"{self._low.get_error_string(int(state))}{f' ({last})' if last else ''}"

    def all_reduce(self, op: ReduceOp, buffers: Sequence[Buffer], stream: int) -> None:
        """Reduce buffers in place over the workers."""
        self._in_place("reduce", self._low.all_reduce, int(self._ops[_OPS[op]]), buffers, stream)

    def broadcast(self, root: int, buffers: Sequence[Buffer], stream: int) -> None:
        """Give all workers what one has in its buffers."""
        self._in_place("broadcast", self._low.broadcast, root, buffers, stream)

    def _in_place(self, what: str, call: Any, how: int, buffers: Sequence[Buffer], stream: int) -> None:
        low, communicator = self._low, self._low.Comm(self._communicator.ptr)
        try:
            low.group_start()
            try:
                for address, length, kind in buffers:
                    call(address, address, length, int(self._types[kind.upper()]), how, communicator, stream)
            finally:
                low.group_end()
        except low.NCCLError as error:
            raise _failure(f"cannot {what}", error) from error

    def abort(self) -> None:
        """End it, and all that it has enqueued."""
        if self._communicator.is_valid:
            self._communicator.abort()


def _failure(what: str, error: Exception) -> RuntimeError:
    return RuntimeError(f"NCCL {what}: {error}")
