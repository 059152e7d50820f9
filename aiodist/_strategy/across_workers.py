"""What all workers do together outside of replicas, and reductions over the replicas of all of them.

Each worker contributes the components of its own replicas. With one local replica a plain value is its component, as
`run` returns it; with several it is the component of each, so that workers with other numbers of replicas mean the
same.
"""

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

from aiodist._arrays import nests
from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, Spec
from aiodist._arrays.values import DistributedValues, Mirrored
from aiodist._collectives.host import frozen, in_native_order
from aiodist._collectives.kinds import ALL_GATHER, ALL_REDUCE, Collective
from aiodist._core.call import LEAF, Call, OrderCheck
from aiodist._core.errors import ReplicaContextError
from aiodist._core.ledger import Path
from aiodist._runtime.requests import array_text, dtype_text
from aiodist._runtime.stacks import all_callers
from aiodist._strategy.extended import StrategyExtended
from aiodist._strategy.operands import (
    Operand,
    combine_parts,
    components,
    gathered_operand,
    given,
    parts_along,
    reduced_operand,
    total,
)
from aiodist._strategy.reductions import Targets, ThroughHost
from aiodist._strategy.scope import require_all_workers
from aiodist._strategy.variable import as_distributed
from aiodist._workers.bootstrap import WorkerRendezvous
from aiodist._workers.channel import Channel
from aiodist._workers.exchange import gather_objects
from aiodist._workers.moving import accumulate_of, moved
from aiodist._workers.record import Found
from aiodist._workers.team import Move, Pending, Settings, Team
from aiodist._workers.transport import Steps
from aiodist_kernels import ReduceOp


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

    async def perform(self, call: Call, site: CallSite, move: Move) -> Any:
        """Carry out a call that all workers make; see `begin`.

        Raises:
            CollectiveError: the workers disagree, or one is gone.
        """
        pending = await self.begin_in_order(call, site, move)
        return await self.team.awaited(pending, self._extended.communication_options.timeout_seconds)

    async def _perform_through_host(
        self, call: Call, site: CallSite, move: Move, through: ThroughHost, targets: Sequence[Targets] | None
    ) -> Any:
        pending = await self.begin_in_order(call, site, move, through.down)  # values on GPUs are copied down first
        result = await self.team.awaited(pending, self._extended.communication_options.timeout_seconds)
        return await through.up(result, targets)

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

    def reduce(
        self,
        kind: str,
        site: CallSite,
        op: ReduceOp,
        value: Any,
        axis: Any,
        replicas: Sequence[int],
        targets: Sequence[Targets] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Check a reduction on this worker, and return what carries it out.

        Args:
            kind: what the workers call it.
            site: where it was made.
            op: the reduce op.
            value: the nest.
            axis: None, or what to reduce along.
            replicas: the ids of its replicas, over all workers.
            targets: for each leaf on GPUs, those that get a result; None: that of its first component.

        Raises:
            TypeError: the op does not take a leaf's dtype.
            ValueError: a SUM of a plain value on several local replicas; shapes differ; an axis out of range.
        """
        through = ThroughHost(self._extended.devices, value, replicas)
        bare = 1 in self.team.layout.counts
        prepared = _prepared(through, partial(_reduced_leaf, op, axis, replicas, bare))
        axes = tuple(leaf.axes for leaf in prepared.leaves)
        along = [leaf for leaf in prepared.leaves if leaf.axes is not None]
        if along:  # an axis holds for every leaf but IndexedSlices, which take none
            move: Move = partial(_reduce_along, op, along, prepared)
        else:
            move = partial(_moved, Collective(ALL_REDUCE, op, None, _spec(prepared)), prepared, self.team)
        call = _call(kind, op, axes if along else None, prepared)
        return self._perform_through_host(call, site, move, through, targets)

    def gather(
        self, kind: str, site: CallSite, value: Any, axis: Any, replicas: Sequence[int]
    ) -> Coroutine[Any, Any, Any]:
        """Check a gathering on this worker, and return what carries it out; see `reduce` for the arguments.

        Raises:
            TypeError: a component is no array.
            ValueError: the axis is out of range, or the components differ in more than the size along it.
        """
        through = ThroughHost(self._extended.devices, value, replicas)
        prepared = _prepared(through, partial(_gathered_leaf, axis, replicas))
        axes = tuple(leaf.axes[0] for leaf in prepared.leaves if leaf.axes)
        move = partial(_moved, Collective(ALL_GATHER, None, axes, _spec(prepared)), prepared, self.team)
        return self._perform_through_host(_call(kind, None, axes or None, prepared), site, move, through, None)


_OWN = ("aiodist._strategy", "aiodist._runtime", "aiodist._data")


# What takes part.


class _Same(NamedTuple):
    """A leaf that is the same everywhere: each worker makes the result by itself."""

    make: Callable[[], Any]
    mark: LeafMark


class _Prepared(NamedTuple):
    """An operation, checked and described, before any worker is disturbed.

    Attributes:
        leaves: what takes part.
        rebuild: makes the nest of the leaves' results.
    """

    leaves: list[Operand]
    rebuild: Callable[[Sequence[Any]], Any]


def _prepared(through: ThroughHost, leaf_of: Callable[[Any], Operand | _Same | None]) -> _Prepared:
    """Take a nest apart into leaves that take part, those that are the same everywhere, and others, which stay."""
    given_leaves, structure = nests.flatten_with_none(through.value)
    found = [leaf_of(as_distributed(leaf)) for leaf in given_leaves]
    for place, mark in enumerate(through.marks or ()):
        leaf = found[place]
        if mark is not None and leaf is not None:
            found[place] = leaf._replace(mark=mark)
    taking_part = [leaf for leaf in found if isinstance(leaf, Operand)]

    def rebuild(results: Sequence[Any]) -> Any:
        totals, leaves = iter(results), list(given_leaves)
        for place, leaf in enumerate(found):
            if leaf is not None:
                leaves[place] = given(leaf.mark, next(totals) if isinstance(leaf, Operand) else leaf.make())
        return nests.unflatten(structure, leaves)

    return _Prepared(taking_part, rebuild)


def _reduced_leaf(op: ReduceOp, axis: Any, local: Sequence[int], bare: bool, leaf: Any) -> Operand | _Same | None:
    """Describe a leaf that is reduced.

    Args:
        op: the reduce op.
        axis: None, or what to reduce along.
        local: the ids of local replicas.
        bare: some worker has a single replica, whose component nothing tells from a value that is the same for all.
        leaf: the leaf.
    """
    if leaf is None:
        return None
    parts = components(op, leaf, local)
    if not (bare or _differs(op, leaf, local)):
        operand = reduced_operand(op, axis, parts, local)
        return _Same(partial(total, op, "native", operand), operand.mark)
    if len(parts) < len(local):  # one stands for all of them
        parts = [parts[0]] * len(local)
    return reduced_operand(op, axis, parts, local)


def _differs(op: ReduceOp, leaf: Any, local: Sequence[int]) -> bool:
    """Whether a leaf differs by worker. A mirrored value is the same everywhere, and a plain one must be."""
    if isinstance(leaf, Mirrored):
        return op in (ReduceOp.SUM, ReduceOp.PRODUCT)
    return isinstance(leaf, DistributedValues) or len(local) == 1


def _gathered_leaf(axis: Any, local: Sequence[int], leaf: Any) -> Operand | None:
    if leaf is None or (len(local) > 1 and not isinstance(leaf, DistributedValues)):
        return None
    return gathered_operand(axis, components(None, leaf, local), local)


def _call(kind: str, op: ReduceOp | None, axes: Any, prepared: _Prepared) -> Call:
    """Return what the workers compare."""
    leaves = prepared.leaves
    return Call(
        kind,
        op=None if op is None else op.name,
        axis=axes,
        structure=f"[{', '.join([LEAF] * len(leaves))}]",
        paths=tuple(f"[{place}]" for place in range(len(leaves))),
        shapes=tuple(leaf.shape for leaf in leaves),
        dtypes=tuple(dtype_text(leaf.dtype) for leaf in leaves),
        arrays=tuple(array_text(leaf.mark) for leaf in leaves),
    )


def _spec(prepared: _Prepared) -> Spec:
    leaves = prepared.leaves
    marks = [None if isinstance(leaf.mark, (DeviceType, HostType)) else leaf.mark for leaf in leaves]
    return Spec(tuple(leaf.shape for leaf in leaves), tuple(leaf.dtype for leaf in leaves), tuple(marks), single=False)


# What is moved, once all workers have agreed.


def _moved(collective: Collective, prepared: _Prepared, team: Team, channel: Channel, found: Found) -> Steps[Any]:
    leaves, layout = prepared.leaves, team.layout
    if not leaves:
        return prepared.rebuild([])
    values = [[in_native_order(leaf.arrays[position]) for leaf in leaves] for position in range(layout.local)]
    results = yield from moved(channel, layout, collective, values, found, team.threads, ordered=team.settings.ordered)
    return prepared.rebuild(results)


def _reduce_along(
    op: ReduceOp, leaves: Sequence[Operand], prepared: _Prepared, channel: Channel, found: Found
) -> Steps[Any]:
    """Reduce each component along its axes here, and fold what comes of them in the order of all replicas."""
    own = [parts_along(op, leaf, accumulate_of(found)) for leaf in leaves]
    told = yield from gather_objects(channel.communicator, own)
    columns = [[part for worker in told for part in worker[i]] for i in range(len(leaves))]
    totals = [combine_parts(op, leaf, column) for leaf, column in zip(leaves, columns, strict=True)]
    return prepared.rebuild([frozen(each) for each in totals])
