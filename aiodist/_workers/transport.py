"""The protocol of engines: what moves bytes between workers, and reduces them.

Operations of one communicator match in the order in which each worker begins them, as MPI has it; nobody blocks. A
request tells when it is complete, and holds the buffers until then. What is not complete when the strategy is given up
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np

from aiodist_kernels import ReduceOp

Array = np.ndarray[Any, Any]
T = TypeVar("T")


class Request(Protocol):
    """Something that is under way.

    One that says when it is complete need not be tested again and again: it has a method ``add_done_callback(fn)``,
    which calls the function then, in any thread; at once where it is.
    """

    def test(self) -> bool:
        """Return whether it is complete; help it on.

        Raises:
            Exception: what went wrong in the engine.
        """
        ...


class Making(Request, Protocol):
    """A communicator that is being made."""

    def result(self) -> Communicator:
        """Return it; the request is complete."""
        ...


Steps: TypeAlias = Generator[Request, None, T]
"""Something that goes on when the request it has yielded is complete."""


class Communicator(Protocol):
    """Some workers, and an order of operations of their own.

    Attributes:
        engine: the engine's name.
        rank: this worker, among those of the communicator.
        size: how many they are.
        depth: how many operations are well begun before the first is complete.
        library: what the engine stands on, with its version.
    """

    engine: str
    library: str
    rank: int
    size: int
    depth: int

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        """Return whether `iallreduce` takes an op and a dtype with the meaning that they have here."""
        ...

    def iallreduce(self, op: ReduceOp, send: Array, receive: Array) -> Request:
        """Reduce buffers over the workers. ``send`` may be ``receive`` itself, and else is left as it is."""
        ...

    def iallgather(self, send: Array, receive: Array) -> Request:
        """Put buffers of bytes, all of one size, together by rank."""
        ...

    def iallgatherv(
        self, send: Array, receive: Array, counts: Sequence[int], places: Sequence[int] | None = None
    ) -> Request:
        """Put buffers of bytes together by rank.

        Args:
            send: this worker's.
            receive: where they are put.
            counts: by rank, how many bytes a worker sends.
            places: by rank, where in ``receive`` they begin; None: each behind the one before it.
        """
        ...

    def ibcast(self, buffer: Array, root: int) -> Request:
        """Overwrite a buffer of bytes with that of one worker."""
        ...

    def ialltoallv(
        self,
        send: Array,
        send_counts: Sequence[int],
        receive: Array,
        receive_counts: Sequence[int],
        send_places: Sequence[int] | None = None,
        receive_places: Sequence[int] | None = None,
    ) -> Request:
        """Send the k-th part of a buffer of bytes to worker k; receive its part for this one.

        Args:
            send: the parts that are sent.
            send_counts: by rank, how many bytes they have.
            receive: where those of the others are put.
            receive_counts: by rank, how many bytes those have.
            send_places: by rank, where in ``send`` they begin; None: each behind the one before it.
            receive_places: likewise in ``receive``.
        """
        ...

    def idup(self) -> Making:
        """Make another communicator of the same workers."""
        ...

    def icreate_group(self, ranks: Sequence[int], tag: int) -> Making:
        """Make a communicator of some of the workers, which these alone call.

        All of them call it, for several groups in the same order. It does not block; an engine that can only block
        makes it in a thread.

        Args:
            ranks: those workers, ascending; a worker's place here is its rank in the new communicator.
            tag: tells it from others that are being made at the same time.
        """
        ...

    def abort(self) -> None:
        """Give up what is under way: another worker is gone, or the workers have diverged."""


class Done:
    """A request that is complete."""

    def test(self) -> bool:
        """Return that it is."""
        return True

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Call a function at once."""
        fn()


DONE: Final = Done()

OF_VALUES: Final = (TypeError, ValueError, OverflowError)
"""Errors of values, which every worker has alike; any other is the engine's, and may be one worker's alone."""


def as_bytes(array: Array) -> Array:
    """Return the bytes of an array that lies in one piece."""
    return array.reshape(-1).view(np.uint8)


def parts_of(whole: Array, counts: Sequence[int], places: Sequence[int] | None = None) -> list[Array]:
    """Return the parts of a buffer that begin at these places; None: each behind the one before it."""
    begins = accumulate(counts, initial=0) if places is None else places
    return [whole[begin : begin + count] for begin, count in zip(begins, counts, strict=False)]
