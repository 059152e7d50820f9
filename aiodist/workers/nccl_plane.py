"""The data plane of NCCL, as one worker sees it: the link between the workers' GPUs, who uses it, and its failures.

**The link is made between runs.** When a run opens, all workers have said in one record whether their GPU is free for
it (`DataPlane.hold`). Where all are, they compare which link they have, and make one where they do not have the same:
so no step of a run ever makes one, and a worker that has lost its own gets a new one together with all others.

**Every failure ends it.** NCCL leaves nothing to go on with: what was enqueued stays on the GPU until it is aborted. It
is, where NCCL tells of an error, where a worker is lost, and two seconds after a run has failed elsewhere. The next run
makes another one. That nobody waits for ever is the record's affair, and the verdict's, as with any engine.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Final

import numpy as np

from aiodist.gpu import nccl, process
from aiodist.gpu.execute import Completion
from aiodist.gpu.nccl import ID_BYTES, Link
from aiodist.vocabulary import gpus
from aiodist.workers.communicator import Communicator
from aiodist.workers.layout import Layout
from aiodist.workers.nccl_choice import Offer, why_not
from aiodist.workers.transfers import Hands, Steps, as_bytes, by_hand

LINK_SECONDS: Final = 30.0
PATIENCE_SECONDS: Final = 2.0
_TEXT_BYTES: Final = 512
_OTHERS: Final = "some worker did not link itself in time"

_users: Final[dict[int, Use]] = {}  # by GPU: who uses NCCL on it, in this process


class DataPlane:
    """What a strategy has of NCCL.

    Args:
        rank: this worker.
        size: how many there are.
        ordinal: the GPU of its first replica.
        demanded: to go without it is an error.

    Attributes:
        broken: why it is not used any more; empty while it may be.
        refusal: the same, as an error's text, where NCCL is demanded.
    """

    def __init__(self, rank: int, size: int, ordinal: int, *, demanded: bool) -> None:
        self.rank, self.size, self.ordinal = rank, size, ordinal
        self.broken = self.refusal = ""
        self._demanded = demanded
        self._links: list[Link] = []  # one, or none
        self._generation = 0
        weakref.finalize(self, _abort, self._links)

    def hold(self) -> Use | None:
        """Return a use of the GPU, for a run; None where another one has it, or NCCL has proved to be of no use."""
        use = Use(self)
        if self.broken or _users.setdefault(self.ordinal, use) is not use:
            return None
        return use

    @property
    def link(self) -> Link:
        """The link.

        Raises:
            RuntimeError: there is none any more.
        """
        if not self._links:
            raise RuntimeError("NCCL's link between the workers has been ended")
        return self._links[0]

    def abort(self) -> None:
        """End the link, and what it has enqueued; in the thread of the event loop."""
        self._generation = 0
        _abort(self._links)

    # Making it.

    def meet(self, communicator: Communicator) -> Steps[bool]:
        """Link the workers, where they are not; return whether they are."""
        found = np.empty(self.size, np.int64)
        yield communicator.iallgather(as_bytes(np.array([self._generation], np.int64)), found.view(np.uint8))
        if found[0] and (found == found[0]).all():
            return True
        self.abort()
        texts = np.zeros((self.size, _TEXT_BYTES), np.uint8)
        mine = (yield from self._link(communicator)).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        yield communicator.iallgather(np.frombuffer(mine, np.uint8), texts.reshape(-1))
        failed = [rank for rank in range(self.size) if texts[rank].any()]
        if not failed:
            self._generation = int(found.max()) + 1
            return True
        self.abort()
        told = {rank: texts[rank].tobytes().rstrip(b"\0").decode(errors="ignore") for rank in failed}
        cause = next((rank for rank in failed if told[rank] != _OTHERS), failed[0])
        self._give_up(f"worker {cause} of {self.size}: {told[cause]}")
        return False

    def _link(self, communicator: Communicator) -> Steps[str]:
        """Make this worker's part; return what went wrong, if anything has."""
        known_by, text = yield from self._name(communicator)
        if known_by is None:
            return text
        driver = process.executor().driver
        try:
            with process.enqueuing, driver.using():
                driver.handle(self.ordinal)
                self._links.append(nccl.library().link(self.size, self.rank, known_by))
        except RuntimeError as error:
            return str(error)
        linking = _Linking(self._links[0])
        yield linking
        return linking.text

    def _name(self, communicator: Communicator) -> Steps[tuple[bytes | None, str]]:
        """Return what the first worker has named the link; None where it could not, and there why."""
        buffer, text = np.zeros(1 + ID_BYTES, np.uint8), ""
        if self.rank == 0:
            try:
                buffer[:] = np.frombuffer(b"\1" + nccl.library().new_id(), np.uint8)
            except RuntimeError as error:
                text = str(error)
        yield communicator.ibcast(buffer, 0)
        return (buffer[1:].tobytes() if buffer[0] else None), text

    def _give_up(self, why: str) -> None:
        self.broken = why
        if self._demanded:
            self.refusal = f"implementation='nccl', and NCCL cannot link the workers: {why}"
            return
        text = f"NCCL cannot link the workers, and values on GPUs go through the host: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def plane_for(offers: Sequence[Offer | None], layout: Layout) -> DataPlane | None:
    """Return what a strategy has of NCCL; None where its workers do not use it.

    Raises:
        RuntimeError: one of them demands it, and it cannot be used.
    """
    if why_not(offers, layout) is not None:
        return None
    ordinal = gpus.logical.ordinal(layout.devices[layout.rank][0])
    demanded = any(offer is not None and offer.implementation == "nccl" for offer in offers)
    return DataPlane(layout.rank, layout.workers, ordinal, demanded=demanded)


class Use:
    """The use that one run makes of it.

    Attributes:
        ordinal: the GPU.
    """

    def __init__(self, plane: DataPlane) -> None:
        self.ordinal = plane.ordinal
        self._plane = plane
        self._ended = False
        self._until: float | None = None

    def release(self) -> None:
        """Leave the GPU to others."""
        self._ended = True
        if _users.get(self.ordinal) is self:
            del _users[self.ordinal]

    def hurry(self) -> None:
        """Wait for other workers no longer than some seconds: the run has failed."""
        self._until = perf_counter() + PATIENCE_SECONDS

    def take(self, step: Callable[[Link, int], None], hands: Hands) -> Steps[None]:
        """Enqueue a step on the GPU's own stream, behind what that was given before.

        Args:
            step: is called with the link, and with the stream.
            hands: wait for devices where that fails.

        Raises:
            RuntimeError: NCCL has failed, or the run is over.
        """
        if self._ended:
            raise RuntimeError("the run that used NCCL is over")
        driver = process.executor().driver
        try:
            with process.enqueuing, driver.using():
                step(self._plane.link, driver.handle(self.ordinal))
            yield _InTheAir(self)
        except BaseException as error:
            yield from self._end(error, hands)
            raise

    def finish(self, completion: Completion, hands: Hands) -> Steps[None]:
        """Wait until a step, and what was enqueued behind it, is done.

        Raises:
            RuntimeError: NCCL has failed.
        """
        try:
            yield _InTheAir(self, completion)
        except BaseException as error:
            yield from self._end(error, hands)
            raise

    def _end(self, error: BaseException, hands: Hands) -> Steps[None]:
        """End the link; return when nothing of it uses memory any more. A later run's is none of ours."""
        if self._ended:
            return
        self._plane.abort()
        if isinstance(error, GeneratorExit):
            self._settle()
        else:
            yield from by_hand(hands, self._settle)

    def _settle(self) -> None:
        driver = process.executor().driver
        with process.enqueuing, driver.using():
            event = driver.record(driver.stream(self.ordinal))
        driver.wait_for(event)

    def is_ready(self) -> bool:
        """Return whether all has been enqueued.

        Raises:
            RuntimeError: NCCL has failed, or the time is over.
        """
        if self._until is not None and perf_counter() > self._until:
            self._plane.abort()
            raise RuntimeError(f"NCCL was not done {PATIENCE_SECONDS:g} s after the run had failed")
        try:
            return self._plane.link.is_ready()
        except RuntimeError:
            self._plane.abort()  # at once: who waits here may let go of the reduction much later
            raise


class _InTheAir:
    """A request that is complete when all is enqueued, or when the GPU has done it."""

    by_itself = True

    def __init__(self, use: Use, completion: Completion | None = None) -> None:
        self._use = use
        self._completion = completion

    def test(self) -> bool:
        """Return whether it is."""
        if self._completion is not None and self._completion.is_done():
            return True
        return self._use.is_ready() and self._completion is None


class _Linking:
    """A request that is complete when a link is made, or when it is known that it cannot be."""

    by_itself = True

    def __init__(self, link: Link) -> None:
        self._link = link
        self._until = perf_counter() + LINK_SECONDS
        self.text = ""

    def test(self) -> bool:
        """Return whether it is."""
        try:
            if self._link.is_ready():
                return True
        except RuntimeError as error:
            self.text = str(error)
            return True
        if perf_counter() > self._until:
            self.text = _OTHERS
        return bool(self.text)


def _abort(links: list[Link]) -> None:
    while links:
        with suppress(Exception):  # of a library that has failed; there is nothing left to do about it
            links.pop().abort()
