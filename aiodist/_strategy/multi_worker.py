"""MultiWorkerMirroredStrategy: replicas on the devices of several workers, which are processes that work in step.

A variable's initial value is replica 0's, on whichever worker that is. Creating a variable is a collective that is
never awaited: inside a replica it is complete once a later collective of the replica is, outside of replicas with the
strategy's next awaited call. Values that must be equal on all workers are compared by digest.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from sys import _getframe
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import anyio
import numpy as np

from aiodist._arrays import environment
from aiodist._arrays.environment import ClusterSettings
from aiodist._arrays.host import Array, frozen
from aiodist._arrays.leaves import Spec
from aiodist._arrays.options import CommunicationOptions, choice
from aiodist._collectives.kinds import ALL_GATHER, ALL_REDUCE, BROADCAST, Collective
from aiodist._collectives.work import Work
from aiodist._core.call import LEAF, Call, OrderCheck
from aiodist._core.ledger import Member, Path
from aiodist._core.terms import ReplicaState
from aiodist._data.batches import without_rows
from aiodist._runtime.requests import OverWorkers, Request, array_text, dtype_text, function_of
from aiodist._runtime.scheduler import Run
from aiodist._runtime.stacks import all_callers
from aiodist._runtime.tasks import ReplicaCall
from aiodist._strategy.extended import StrategyExtended, new_extended
from aiodist._strategy.reductions import (
    Combination,
    Leaf,
    Operand,
    Operation,
    combine_parts,
    parts_along,
    to_host,
    values_of,
)
from aiodist._strategy.scope import Replicas, Share, require_all_workers
from aiodist._strategy.strategy import Strategy
from aiodist._strategy.variable import State, VariableAggregation, unequal_values
from aiodist._workers.bootstrap import in_one_thread, rendezvous
from aiodist._workers.exchange import Agreed
from aiodist._workers.team import Move, Pending, Span, Team
from aiodist._workers.transport import Steps, in_thread

_INTERNAL: Final = ("aiodist._strategy", "aiodist._runtime", "aiodist._data")


class CallSite(NamedTuple):
    """The place of a call outside of replicas, noted at the call because the caller's frame continues."""

    code: CodeType  # the caller's
    offset: int  # of the call in it
    path: Path  # the caller's callers, if the order check compares them


class Workers(Replicas):
    """The replicas of a strategy on several workers, and what the workers do together outside of replicas.

    Args:
        communicator: as in `MultiWorkerMirroredStrategy`.
        extended: the strategy's devices and settings.
        ordered: whether reductions give the same bits for every layout.

    Attributes:
        communicator: connects the workers.
        run_numbers: the number of each run, by its ledger.
    """

    def __init__(self, communicator: Any, extended: StrategyExtended, *, ordered: bool) -> None:
        super().__init__(len(extended.devices))
        self._extended = extended
        self.run_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        order_check = extended.order_check
        self.communicator, self._joined = rendezvous(communicator, extended.devices, order_check, ordered=ordered)

    @property
    def team(self) -> Team:
        """The connected workers. If they are simulated, the first use connects them."""
        if self._joined is None:
            self._joined = in_one_thread(self.communicator)
        return self._joined

    @property
    def share(self) -> Share:
        """This process's share of the replicas."""
        layout = self.team.layout
        return Share(layout.replicas, layout.own, layout.workers, layout.rank, self._fill_up)

    @property
    def several_workers(self) -> Workers | None:
        """The workers, if variables have components on others; None if this is the only one."""
        return self if self.team.layout.workers > 1 else None

    def close(self) -> None:
        """Leave the other workers."""
        if self._joined is not None:
            self._joined.close()

    # Calls that all workers make.

    def caller(self) -> CallSite:
        """Return the call site in the innermost frame outside of this package and its helpers."""
        frame: FrameType = _getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INTERNAL):
            frame = frame.f_back
        return self._site_of(frame)

    def _site_of(self, frame: FrameType) -> CallSite:
        path = all_callers(frame) if self._extended.order_check is OrderCheck.CALL_PATH else ()
        return CallSite(frame.f_code, frame.f_lasti, path)

    def begin(self, call: Call, site: CallSite, move: Move) -> Pending:
        """Post a call that all workers make; once all have, ``move`` exchanges its values, awaited or not."""
        require_all_workers()
        return self.team.outside.begin(call, *site, self._extended.communication_options, move)

    async def _perform(self, call: Call, site: CallSite, move: Move) -> Any:
        pending = self.begin(call, site, move)
        return await self.team.awaited(pending, self._extended.communication_options.timeout_seconds)

    async def combine(self, kind: str, operation: Operation, combination: Combination, site: CallSite) -> None:
        """Compute the results of an operation over the replicas of all workers.

        A plain value belongs to every replica, so each worker computes its result alone. But the components of a
        worker's only replica are plain values, too: if any worker has a single replica, all values are exchanged.
        """
        local, exchange_all = self.local, 1 in self.team.layout.counts
        alone, together = list[Leaf](), list[Leaf]()
        for leaf in combination.participating:
            (together if exchange_all or len(leaf.operand.arrays) == local else alone).append(leaf)
        operands = [leaf.operand for leaf in together]
        call = _call(kind, operation, operands)
        for index, operand in enumerate(operands):
            if len(operand.arrays) < local:  # one array stands for all
                operands[index] = operand._replace(arrays=[operand.arrays[0]] * local)
        copying = to_host(operands, self._extended.devices)
        results = await self._perform(call, site, partial(_exchange, operation, operands, copying))
        await combination.set_results(together, results)
        if alone:
            await combination.carry_out(alone)

    async def _fill_up(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return this worker's batches for a step of a dataset, of which each worker has a pipeline of its own.

        A worker without batches gets one without rows while others still have some.
        """
        if self.team.layout.workers == 1:
            return batches

        def gathered(call: Call, own: Any) -> Awaitable[Any]:
            site = CallSite(gathered.__code__, 0, ())  # the same wherever a worker iterates
            pending = self.begin(call, site, lambda agreed: agreed.gather(own))
            return self.team.awaited(pending)  # however long a pipeline takes

        have = await gathered(_NEXT_STEP, bool(batches))
        if all(have) or not any(have):
            return batches
        patterns = await gathered(_LAST_STEPS, (bool(batches), without_rows(batches[0]) if batches else None))
        return batches or next([pattern] for has_batch, pattern in patterns if has_batch)

    # Variables.

    def create(self, state: State, value: Array, name: str | None, frame: FrameType) -> str:
        """Create a variable on all workers, under the strategy's scope; return what tells it from others."""

        def exchange(agreed: Agreed) -> Steps[None]:
            first = yield from agreed.move(state.spec.collective(BROADCAST, 0), [value] * self.local)
            state.fill(frozen(first))

        pending = self.begin(state.spec.call("Variable", None, name), self._site_of(frame), exchange)
        return f"outside {pending.number}"

    def creation(self, state: State, member: Member, name: str | None) -> tuple[str, Request]:
        """Return what tells a variable that each replica creates from others, and the request to create it."""
        collective = state.spec.collective(BROADCAST, 0)
        over = OverWorkers(collective, list, lambda _, first: state.fill(frozen(np.asarray(first))))
        subject = f"run {self.run_numbers[member.group.ledger]} {member.group.key} {member.sequence}"
        return subject, Request(collective, state.spec.call("Variable", None, name), over_workers=over)

    def assignment(self, state: State, apply: Callable[[Any], Any]) -> OverWorkers:
        """Return how replicas of all workers assign to a mirrored variable; ``apply`` assigns one value."""
        spec = state.spec
        if spec.aggregation is not VariableAggregation.NONE:
            collective = spec.collective(BROADCAST, 0) if spec.op is None else spec.collective(ALL_REDUCE)
            return OverWorkers(collective, list, lambda _, aggregate: apply(aggregate))

        def finish(values: Sequence[Array], digests: Any) -> Any:
            _check_equal(digests, spec.name)
            return apply(values[0])

        return OverWorkers(_OF_DIGESTS, _digests, finish)

    async def compare_update(self, state: State, components: Sequence[Array]) -> None:
        """Check that an update gives a mirrored variable equal components on all workers."""

        def exchange(agreed: Agreed) -> Steps[None]:
            _check_equal((yield from agreed.move(_OF_DIGESTS, _digests(components))), state.spec.name)

        await self._perform(state.spec.call("extended.update", state.subject, None), self.caller(), exchange)


# Datasets.

_NEXT_STEP: Final = Call("next step of a dataset")
_LAST_STEPS: Final = Call("last steps of a dataset")


# Reductions and gathers.


def _call(kind: str, operation: Operation, operands: Sequence[Operand]) -> Call:
    # A reduction's several axes are sent as text, because a pair of numbers means the axes of an all_to_all.
    axes = [each[0] if len(each) == 1 else str(each) for operand in operands if (each := operand.axes) is not None]
    return Call(
        kind,
        op=None if operation.op is None else operation.op.name,
        axis=tuple(axes) or None,
        structure=f"[{', '.join([LEAF] * len(operands))}]",
        paths=tuple(f"[{index}]" for index in range(len(operands))),
        shapes=tuple(operand.shape for operand in operands),
        dtypes=tuple(dtype_text(operand.dtype, operation.kind) for operand in operands),
        arrays=tuple(array_text(operand.mark) for operand in operands),
    )


def _exchange(
    operation: Operation, operands: Sequence[Operand], copying: Work | None, agreed: Agreed
) -> Steps[Sequence[Any]]:
    """Return the results of operands, on the host, once all workers have agreed; ``copying`` copies operands there."""
    if not operands:
        return []
    if copying is not None:
        operands = yield from in_thread(copying.carry_out)
    op = operation.op
    if op is not None and operands[0].axes is not None:  # an axis applies to every leaf
        own = [parts_along(op, operand, agreed.accumulate) for operand in operands]
        of_workers = yield from agreed.gather(own)
        parts = [[part for worker in of_workers for part in worker[index]] for index in range(len(operands))]
        return [combine_parts(op, operand, each) for operand, each in zip(operands, parts, strict=True)]
    result = yield from agreed.move(operation.collective(operands), values_of(operands))
    return [result] if len(operands) == 1 else result


# Digests of values that must be equal.

_DIGEST: Final = 16
_DIGESTS: Final = Spec(((_DIGEST,),), (np.dtype(np.uint8),), (None,), single=True)
_OF_DIGESTS: Final = Collective(ALL_GATHER, None, (0,), _DIGESTS)


def _check_equal(digests: Any, name: str) -> None:
    each = np.asarray(digests).reshape(-1, _DIGEST)
    different = np.flatnonzero((each != each[0]).any(axis=1))
    if different.size:
        raise unequal_values(name, int(different[0]))


def _digests(values: Sequence[Array | None]) -> list[Array | None]:
    return [None if value is None else _digest(value) for value in values]


def _digest(value: Array) -> Array:
    """Return a digest that is equal for arrays of one shape with equal values; all NaNs are equal."""
    known = np.where(value != value, np.asarray(np.nan, value.dtype), value) if value.dtype.kind in "fcV" else value  # noqa: PLR0124
    zero = np.zeros((), value.dtype)
    plain = np.where(known == zero, zero, known)  # zeros of either sign are equal
    found = hashlib.blake2b(np.ascontiguousarray(plain).tobytes(), digest_size=_DIGEST).digest()
    return np.frombuffer(found, np.uint8)


# The strategy.


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous data parallelism on several workers: a process each, with a replica for each of its devices.

    Every worker runs the same program. Replica ids count over all workers: first worker 0's replicas, then worker 1's,
    and so on; workers may have different numbers of them. `run`, per-replica values and ``merge_call`` have this
    worker's components. Reductions and gathered values are those of all replicas, on every worker.

    The order of calls outside of replicas (`run`, `reduce`, `gather`, the creation of a variable) must be the same on
    every worker, and is checked like that of collectives. A disagreement, a lost worker or an engine's error ends the
    strategy, and every later call raises it; make a new strategy to continue.

    Args:
        devices: a device for each local replica; see `MirroredStrategy`.
        communicator: the workers. None: those that a launcher has started, e.g. ``aiodist run -n 4`` or ``mpiexec -n
            4``; without a launcher this process alone. An ``mpi4py.MPI.Intracomm``: its processes, all of which make
            the strategy. It is duplicated, and remains the program's own.
        communication_options: the options of every collective.
        order_check: how call sites are compared; see `MirroredStrategy`.
        reduction: "fast", or "ordered", which gives the same bits however the same replicas are spread over workers.

    Raises:
        DeviceNotFoundError: this machine does not have a device.
        ImportError: a launcher has started several workers, and the library of their engine is not installed.
        RuntimeError: the workers differ in ``order_check``, ``reduction`` or the version of aiodist, or the launcher,
            the library and ``TF_CONFIG`` in their number.
        TypeError: an argument has the wrong type.
        ValueError: a device is misspelled or given twice; ``order_check`` or ``reduction`` is unknown; this process
            is not in the communicator.
    """

    def __init__(
        self,
        devices: int | Sequence[str] | None = None,
        communicator: Any = None,
        *,
        communication_options: CommunicationOptions | None = None,
        order_check: str = "call_site",
        reduction: str = "fast",
    ) -> None:
        if hasattr(devices, "Get_rank"):
            raise TypeError(
                f"the devices are the first argument, got the communicator {devices!r}; write "
                "MultiWorkerMirroredStrategy(communicator=comm)"
            )
        ordered = choice("reduction", reduction, ("fast", "ordered")) == "ordered"
        extended = new_extended(devices, communication_options, order_check)
        super().__init__(extended)
        self._replicas = self._workers = Workers(communicator, extended, ordered=ordered)
        self._cluster: ClusterSettings | None = None

    def __repr__(self) -> str:
        layout = self._team.layout
        return (
            f"<{type(self).__name__}: worker {layout.rank} of {layout.workers}, {layout.local} of {layout.replicas} "
            f"replicas, over {self._workers.communicator.engine}>"
        )

    @property
    def _team(self) -> Team:
        """The connected workers."""
        return self._workers.team

    @property
    def cluster_resolver(self) -> ClusterSettings:
        """The cluster that the strategy spans, and this worker's place in it."""
        if self._cluster is not None:
            return self._cluster
        layout, config = self._team.layout, environment.tf_config()
        if config is not None and (config.workers, config.rank) == (layout.workers, layout.rank):
            return config
        return ClusterSettings({"worker": layout.hosts}, "worker", layout.rank)

    def _use_cluster(self, settings: ClusterSettings) -> None:
        """Keep a cluster's settings, which must agree with the connected workers."""
        layout = self._team.layout
        tasks = len(settings.spec[settings.task_type])
        if (tasks, settings.task_id) != (layout.workers, layout.rank):
            raise ValueError(
                f"the workers are already connected: this is worker {layout.rank} of {layout.workers}, got "
                f"{settings.task_type!r} {settings.task_id} of {tasks}; the launcher decides, so leave the settings out"
            )
        self._cluster = settings

    # Runs.

    async def _carry_out(self, run: Run, calls: Sequence[ReplicaCall], site: CallSite) -> Any:
        team = self._team
        if team.layout.workers == 1:
            team.check()
            return await super()._carry_out(run, calls, site)
        span = await self._open(run, calls[0][0], site)
        failure, result, over = None, None, False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(team.driver.until, lambda: over)
            try:
                result = await super()._carry_out(run, calls, site)
            except anyio.get_cancelled_exc_class():
                span.abandon()
                raise
            except BaseException as error:  # noqa: BLE001  (raised after the task group, which would wrap it)
                failure = error
            finally:
                over = True
                span.leave()
                team.driver.notify()
        if failure is not None:
            raise failure
        return result

    async def _open(self, run: Run, fn: Any, site: CallSite) -> Span:
        """Return the run's span once all workers have reached the run."""
        team, cancelled = self._team, None
        call = Call("strategy.run", function=function_of(fn))
        pending = self._workers.begin(call, site, lambda _: team.choose_channel())
        try:
            await team.awaited(pending, run.options.timeout_seconds)
        except anyio.get_cancelled_exc_class() as cancellation:
            if not pending.has_result:
                raise
            cancelled = cancellation
        channel, communicator = pending.result()
        span = Span(team, pending.number, channel, communicator, run)
        run.connect(span)
        self._workers.run_numbers[run.ledger] = pending.number
        if cancelled is not None:  # but the other workers begin the run
            for replica in run.ledger.replicas:
                run.ledger.end(replica, ReplicaState.CANCELLED)
            span.abandon()
            raise cancelled
        return span

    def close(self) -> None:
        """Leave the other workers without waiting for them; later calls of the strategy raise, here and there."""
        self._workers.close()


MultiWorkerMirroredStrategy.__module__ = "aiodist"
