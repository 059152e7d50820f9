"""The communicator: what aiodist needs of an engine that moves data between workers. Nothing here knows of event loops.

An operation is begun by a call, in the same order on every worker, and is complete when its request says so; until then
nobody touches its buffers. Buffers are C-contiguous arrays of one axis. An engine knows nothing of order checks: what
is begun here has been agreed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from aiodist_kernels import ReduceOp

if TYPE_CHECKING:
    from aiodist._core.call import OrderCheck
    from aiodist.workers.joining import Hello
    from aiodist.workers.layout import Layout
    from aiodist.workers.tribunal import Control

Array: TypeAlias = np.ndarray[Any, Any]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
V = TypeVar("V")


class Request(Protocol):
    """An operation that has been begun."""

    def test(self) -> bool:
        """Return whether it is complete, and let it make progress.

        Raises:
            Exception: what went wrong in the engine.
        """
        ...


@runtime_checkable
class TellingRequest(Request, Protocol):
    """A request that tells when it is complete, so that nobody need ask again and again."""

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Call a function, in any thread, when it is complete; at once where it is."""


class IndependentRequest(Request, Protocol):
    """A request that goes on in threads of the engine's: to ask all the time would take the core that they need.

    Attributes:
        by_itself: that it does.
    """

    by_itself: bool


class Duplication(Request, Protocol):
    """A communicator in the making."""

    def result(self) -> Communicator:
        """Return the new communicator; the request is complete."""
        ...


class Intracomm(Protocol):
    """What a program that uses mpi4py has: ``mpi4py.MPI.Intracomm``."""

    def Get_rank(self) -> int:  # noqa: N802  (mpi4py's name)
        """Return this process's number."""
        ...

    def Idup(self) -> Any:  # noqa: N802
        """Begin another of the same processes."""
        ...


class Communicator(Protocol):
    """The workers of a job as one of them sees it, and the collectives between them.

    Attributes:
        engine: the engine's name, for reports.
        rank: this worker's number, from 0.
        size: how many workers there are.
        segment_depth: how many segments of a large reduction are best in flight at a time.
    """

    @property
    def engine(self) -> str:
        """The engine's name."""
        ...

    @property
    def rank(self) -> int:
        """This worker's number."""
        ...

    @property
    def size(self) -> int:
        """How many workers there are."""
        ...

    @property
    def segment_depth(self) -> int:
        """How many segments of a large reduction are best in flight."""
        ...

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        """Return whether `iallreduce` takes that op and dtype, with the meaning that aiodist gives them."""
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
        """Put buffers of bytes, of the sizes ``counts``, together by rank.

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

    def idup(self) -> Duplication:
        """Make another communicator of the same workers, whose operations are apart from this one's."""
        ...

    def isplit(self, workers: Sequence[int], number: int) -> Duplication:
        """Make a communicator of some of the workers, which these alone call, on the job's first communicator.

        It is called in the event loop and must not block; where an engine can only block, `Making` does it in a thread.
        Whoever calls it knows that all members do, with the same arguments, and in the same order as all others that
        they have in common. Other operations go on meanwhile. When a member dies before it is complete, it may stay
        incomplete for ever, and must not keep the process from ending.

        Args:
            workers: their ranks, ascending, two or more; a worker's place here is its rank in the new communicator.
            number: a new one for each communicator that is made in this way, from 1: good as a tag, or in a name.
        """
        ...

    def wait(self, request: Request) -> None:
        """Block until a request is complete; for the first meeting alone, before there is anything else to do."""

    def listening(self) -> Any:
        """Return the address at which this worker's control plane listens, for the others; None where it needs none."""
        ...

    def control(self, layout: Layout, order_check: OrderCheck, hellos: Sequence[Hello]) -> Control:
        """Return this worker's control plane, now that the workers know each other."""
        ...


class Sharing(Request, Protocol[T_co]):
    """Something that is made of what all workers have brought."""

    def result(self) -> T_co:
        """Return it, the same object to each; the request is complete."""
        ...


@runtime_checkable
class SharingCommunicator(Communicator, Protocol):
    """A communicator of workers that share memory: what each of them is to know need not be copied for each."""

    def ishare(self, value: V, make: Callable[[Sequence[V]], T]) -> Sharing[T]:
        """Make one object for all workers of what each brings, by rank."""
        ...


def parts_of(whole: Array, counts: Sequence[int], places: Sequence[int] | None = None) -> list[Array]:
    """Return the parts of a buffer that begin at these places; None: each behind the one before it."""
    begins = accumulate(counts, initial=0) if places is None else places
    return [whole[begin : begin + count] for begin, count in zip(begins, counts, strict=False)]
