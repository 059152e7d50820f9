"""What all workers do together outside of replicas, and reductions over the replicas of all of them."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from sys import _getframe
from types import CodeType, FrameType
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel

from aiodist._core.call import LEAF, Call, OrderCheck
from aiodist._core.errors import ReplicaContextError
from aiodist._core.ledger import Path
from aiodist._runtime.requests import array_text, dtype_text
from aiodist._runtime.stacks import all_callers
from aiodist._strategy.extended import StrategyExtended
from aiodist._strategy.operands import Operand, Operation, values_of
from aiodist._strategy.reductions import Combination, OnHost, combine_parts, parts_along
from aiodist._strategy.scope import require_all_workers
from aiodist._workers.bootstrap import WorkerRendezvous
from aiodist._workers.channel import Channel
from aiodist._workers.exchange import accumulate_of, gather_objects, moved
from aiodist._workers.record import Found
from aiodist._workers.team import Move, Pending, Settings, Team
from aiodist._workers.transport import Steps


class CallSite(NamedTuple):
    """Where a call outside of replicas stands, as it was when it was made: its frame goes on while it is awaited.

    Attributes:
        code: the caller's code.
        offset: that of the call in it.
        path: its callers, where calls are compared by them.
    """

    code: CodeType
    offset: int
    path: Path


class Workers:
    """The workers of a strategy, as its calls outside of replicas use them.

    Args:
        communicator: as in `MultiWorkerMirroredStrategy`.
        extended: the strategy's devices and settings.
        ordered: reductions give the same bits for every layout.

    Attributes:
        rendezvous: where the workers find each other.
        run_numbers: by ledger, the number of each run's opening.
    """

    def __init__(self, communicator: Any, extended: StrategyExtended, *, ordered: bool) -> None:
        self._extended = extended
        settings = Settings(extended.order_check, ordered)
        self.rendezvous = WorkerRendezvous(communicator, extended.devices, settings)
        self.run_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._joined: Team | None = None
        self._lock: tuple[Any, anyio.Lock] | None = None
        if not self.rendezvous.is_in_one_thread:
            self._joined = self.team  # so that the order in which strategies are first used does not matter

    @property
    def team(self) -> Team:
        """The workers; the first use waits for them."""
        if self._joined is None:
            self._joined = self.rendezvous.team
            let_go = getattr(self._joined.control, "let_go", None)
            if let_go is not None:
                self._dropped = weakref.finalize(self, let_go)
                self._dropped.atexit = False  # the control connection sees to that
        return self._joined

    def close(self) -> None:
        """Leave the others."""
        if self._joined is not None:
            self._dropped.detach()
            self._joined.close()

    def caller(self) -> CallSite:
        """Return where the innermost frame is now that is not the strategy's own."""
        frame: FrameType | None = _getframe(1)
        while frame is not None and frame.f_back is not None:
            if not frame.f_globals.get("__name__", "").startswith(_OWN):
                break
            frame = frame.f_back
        assert frame is not None
        return self.site_of(frame)

    def site_of(self, frame: FrameType) -> CallSite:
        """Return where a frame is now."""
        path = all_callers(frame) if self._extended.order_check is OrderCheck.CALL_PATH else ()
        return CallSite(frame.f_code, frame.f_lasti, path)

    def begin(self, call: Call, site: CallSite, move: Move) -> Pending:
        """Post a call that all workers make, and return it; nobody need await it.

        Args:
            call: what the workers compare.
            site: where it was made.
            move: moves the values.

        Raises:
            ReplicaContextError: this is the merge function of a group, which only some workers run.
        """
        require_all_workers()
        float64 = self._extended.communication_options.accumulate == "float64"
        return self.team.outside.begin(call, site.code, site.offset, site.path, move, float64=float64)

    @property
    def _in_order(self) -> anyio.Lock:
        """Held while a call is posted; a lock belongs to the event loop in which it is first used."""
        loop = anyio.lowlevel.current_token()
        if self._lock is None or self._lock[0] != loop:
            self._lock = loop, anyio.Lock()
        return self._lock[1]

    async def begin_in_order(
        self, call: Call, site: CallSite, move: Move, before: Callable[[], Awaitable[object]] | None = None
    ) -> Pending:
        """Post a call behind those that this worker's tasks made before; see `begin`.

        Args:
            call: what the workers compare.
            site: where it was made.
            move: moves the values.
            before: awaited before the call is posted; the other workers are told if it fails.

        Raises:
            ReplicaContextError: as `begin`.
        """
        with self.telling_refusal(call.kind, site):
            async with self._in_order:
                if before is not None:
                    await before()
        return self.begin(call, site, move)

    async def perform(
        self, call: Call, site: CallSite, move: Move, before: Callable[[], Awaitable[object]] | None = None
    ) -> Any:
        """Carry out a call that all workers make; see `begin_in_order`.

        Raises:
            CollectiveError: the workers disagree, or one is gone.
        """
        pending = await self.begin_in_order(call, site, move, before)
        return await self.team.awaited(pending, self._extended.communication_options.timeout_seconds)

    @contextmanager
    def telling_refusal(self, kind: str, site: CallSite) -> Iterator[None]:
        """Tell the other workers, which wait for this call, if its arguments are wrong."""
        try:
            yield
        except ReplicaContextError:  # it does not belong here, and is none of what all workers call
            raise
        except BaseException as error:
            if self.team.layout.workers > 1 and self.team.error is None:
                told = error if isinstance(error, Exception) else None
                self.team.outside.refuse(Call(kind), site.code, site.offset, told)
            raise

    def combine(
        self,
        kind: str,
        site: CallSite,
        operation: Operation,
        values: Sequence[Any],
        replicas: Sequence[int],
        destinations: Sequence[Sequence[str]] | None = None,
    ) -> Coroutine[Any, Any, list[Any]]:
        """Check an operation over the replicas of all workers, and return what carries it out; see `Combination`.

        With several local replicas a plain value is that of each, and what is the same everywhere each worker makes by
        itself; unless some worker has a single replica, whose component nothing tells from such a value.

        Args:
            kind: what the workers call it.
            site: where it was made.
            operation: what is made of each leaf.
            values: the nests.
            replicas: the ids of its replicas, over all workers.
            destinations: for each nest, the devices that get a result.

        Raises:
            TypeError, ValueError: a leaf cannot take part.
        """
        devices, local = self._extended.devices, len(replicas)
        combination = Combination(operation, values, devices, destinations)
        operands = combination.operands
        bare = 1 in self.team.layout.counts
        shared = [place for place, each in operands.items() if len(each.arrays) < local and not bare]
        moved_places = [place for place in operands if place not in shared]
        described = [operands[place] for place in moved_places]
        through = OnHost([_of_each(each, local) for each in described], devices)
        move: Move = partial(_move, operation, through.operands, self.team)
        call = _call(kind, operation, described)

        async def carry_out() -> list[Any]:
            totals = await self.perform(call, site, move, through.down)  # values on GPUs are copied down first
            results = await combination.lifted(moved_places, totals)
            if shared:
                results |= await combination.results(shared)
            return combination.rebuilt(results)

        return carry_out()


_OWN = ("aiodist._strategy", "aiodist._runtime", "aiodist._data")


def _of_each(operand: Operand, count: int) -> Operand:
    """Return an operand with an array for each local replica, where one may stand for all."""
    return operand if len(operand.arrays) == count else operand._replace(arrays=[operand.arrays[0]] * count)


def _call(kind: str, operation: Operation, operands: Sequence[Operand]) -> Call:
    """Return what the workers compare."""
    axes: list[Any] = [operand.axes for operand in operands if operand.axes is not None]
    if operation.op is None:
        axes = [axis for (axis,) in axes]
    return Call(
        kind,
        op=None if operation.op is None else operation.op.name,
        axis=tuple(axes) or None,
        structure=f"[{', '.join([LEAF] * len(operands))}]",
        paths=tuple(f"[{place}]" for place in range(len(operands))),
        shapes=tuple(operand.shape for operand in operands),
        dtypes=tuple(dtype_text(operand.dtype) for operand in operands),
        arrays=tuple(array_text(operand.mark) for operand in operands),
    )


def _move(
    operation: Operation, operands: Sequence[Operand], team: Team, channel: Channel, found: Found
) -> Steps[Sequence[Any]]:
    """Return the results of operands, once all workers have agreed on them."""
    if not operands:
        return []
    op = operation.op
    if op is not None and operands[0].axes is not None:  # an axis holds for every leaf
        # Each component is reduced along its axes here; what comes of them is folded in the order of all replicas.
        own = [parts_along(op, operand, accumulate_of(found)) for operand in operands]
        told = yield from gather_objects(channel.communicator, own)
        columns = [[part for worker in told for part in worker[i]] for i in range(len(operands))]
        return [combine_parts(op, operand, column) for operand, column in zip(operands, columns, strict=True)]
    collective = operation.collective(operands)
    result = yield from moved(channel, team.plans, collective, values_of(operands), found, team.threads)
    return [result] if len(operands) == 1 else result
