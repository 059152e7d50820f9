"""MultiWorkerMirroredStrategy: replicas on the devices of several workers, a process each, which work in step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from sys import _getframe
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from aiodist._arrays.options import CommunicationOptions
from aiodist._core.call import Call, OrderCheck
from aiodist._core.errors import ReplicaContextError
from aiodist._core.ledger import Path
from aiodist._core.report import ReplicaState
from aiodist._data.distributed import Share
from aiodist._data.workers import fill_up
from aiodist._runtime import requests as arguments
from aiodist._runtime.current import CrossReplica, current
from aiodist._runtime.requests import function_of
from aiodist._runtime.scheduler import Run
from aiodist._runtime.stacks import call_path
from aiodist._strategy import across_workers, sharing
from aiodist._strategy.base import Strategy
from aiodist._strategy.cluster import ClusterSettings
from aiodist._strategy.destinations import devices_of, placed
from aiodist._strategy.extended import StrategyExtended, pairs_of
from aiodist._strategy.on_devices import gpus_by_leaf
from aiodist._strategy.scope import replicas_here, require_cross_replica
from aiodist._strategy.through_host import ThroughHost
from aiodist._workers.bootstrap import Meeting
from aiodist._workers.channel import Channel
from aiodist._workers.moving import Moving
from aiodist._workers.record import Found
from aiodist._workers.span import RunSpan
from aiodist._workers.team import Move, Pending, Settings, Team
from aiodist._workers.transport import Steps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from aiodist._strategy.update import Update


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous data parallelism on several workers: a process each, with a replica for each of its devices.

    Every worker runs the same program. Replica ids count over all workers: first worker 0's replicas, then worker 1's,
    and so on; workers may have different numbers of them. `run`, per-replica values and ``merge_call`` have this
    worker's components. Reductions and gathered values are those of all replicas, on every worker.

    The order of calls outside of replicas (`run`, `reduce`, `gather`, the creation of a variable) must be the same on
    every worker, and is checked like that of collectives. An error of order, of a worker or of the engine ends the
    strategy, and every later call raises it; make a new strategy to go on.

    Args:
        communicator: the workers. None: those that a launcher has started, e.g. ``aiodist run -n 4`` or ``mpiexec -n
            4``; without a launcher this process alone. An ``mpi4py.MPI.Intracomm``: its processes, all of which make
            the strategy. It is duplicated, and remains the program's own.
        devices: a device for each local replica; see `MirroredStrategy`.
        communication_options: the options of every collective.
        order_check: how call sites are compared; see `MirroredStrategy`.

    Raises:
        DeviceNotFoundError: this machine does not have a device.
        ImportError: a launcher has started several workers, and the library of their engine is not installed.
        TypeError: an argument has the wrong type.
        ValueError: a device is misspelled or given twice; ``order_check`` is unknown; this process is not in the
            communicator.
    """

    def __init__(
        self,
        communicator: Any = None,
        devices: Sequence[str] | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        order_check: str = "call_site",
    ) -> None:
        extended = MultiWorkerExtended.on(devices, communication_options, order_check)
        super().__init__(extended)
        settings = Settings(extended.order_check, extended.communication_options.reduction == "ordered")
        self._meeting = Meeting(communicator, extended.devices, settings)
        self._joined: Team | None = None
        self._cluster: ClusterSettings | None = None
        self._run_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._in_order = anyio.Lock()
        if not self._meeting.is_in_one_thread:
            self._joined = self._team  # so that the order in which strategies are first used does not matter

    def __repr__(self) -> str:
        layout = self._team.layout
        return (
            f"<{type(self).__name__}: worker {layout.rank} of {layout.workers}, {layout.local} of {layout.replicas} "
            f"replicas, over {self._meeting.communicator.engine}>"
        )

    @property
    def _team(self) -> Team:
        """The workers; the first use waits for them."""
        if self._joined is None:
            self._joined = self._meeting.team
            let_go = getattr(self._joined.control, "let_go", None)
            if let_go is not None:
                self._dropped = weakref.finalize(self, let_go)
                self._dropped.atexit = False  # the control connection sees to that
        return self._joined

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas work in step, over all workers."""
        return self._team.layout.replicas

    @property
    def _span(self) -> tuple[int, int]:
        layout = self._team.layout
        return layout.offset, layout.replicas

    @property
    def _share(self) -> Share:
        layout = self._team.layout
        return Share(layout.replicas, layout.own, layout.workers, layout.rank, partial(fill_up, self._team))

    @property
    def _has_bare_values(self) -> bool:
        return 1 in self._team.layout.counts

    @property
    def _shares_variables(self) -> bool:
        return self._team.layout.workers > 1

    @property
    def cluster_resolver(self) -> ClusterSettings:
        """The cluster that the strategy spans, and this worker's place in it."""
        if self._cluster is not None:
            return self._cluster
        hosts = tuple(hello.host for hello in self._meeting.hellos)
        return ClusterSettings({"worker": hosts}, "worker", self._team.layout.rank)

    def _use_cluster(self, settings: ClusterSettings) -> None:
        """Keep the settings of a cluster, which must be that of the workers."""
        layout = self._team.layout
        tasks = len(settings.spec[settings.task_type])
        if (tasks, settings.task_id) != (layout.workers, layout.rank):
            raise ValueError(
                f"the workers have found each other already: this is worker {layout.rank} of {layout.workers}, got "
                f"{settings.task_type!r} {settings.task_id} of {tasks}; the launcher decides, so leave the settings out"
            )
        self._cluster = settings

    def _new_run(self, options: CommunicationOptions | None = None) -> Run:
        extended = self._extended
        first, total = self._span
        merged = extended.communication_options.merge(options)
        return Run(self, extended.devices, extended.order_check, merged, first=first, total=total)

    # What all workers do together.

    def run(  # a plain function, so that the place of the call is known also where a task of its own awaits it
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Run a function on every replica of every worker; return what this worker's replicas return.

        Args:
            fn: as in `Strategy.run`; the same on every worker.
            args: as in `Strategy.run`; per-replica values have this worker's components.
            kwargs: likewise.
            options: as in `Strategy.run`.

        Returns:
            What this worker's replicas returned, regrouped.

        Raises:
            CollectiveError: the replicas disagree, or a replica of another worker failed.
            WorkerLostError: a worker is gone.
            ExceptionGroup, ReplicaContextError, TypeError, ValueError, Exception: as `Strategy.run`.
        """
        return self._run_from(caller(self._extended.order_check), fn, args, kwargs, options)

    async def _run_from(self, frame: Site, fn: Any, args: Any, kwargs: Any, options: Any) -> Any:
        with self._noting_refusal("strategy.run", frame):
            calls = self._calls(fn, args, kwargs)
            given = arguments.options(options, None)
        run = self._new_run(given)
        team = self._team
        if team.layout.workers == 1:
            team.check()
            return await self._run_calls(run, calls)
        span = await self._opened(run, fn, frame)
        failure: BaseException | None = None
        result = None
        over = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(team.driver.until, lambda: over)
            try:
                result = await self._run_calls(run, calls)
            except anyio.get_cancelled_exc_class():
                span.abandon()
                raise
            except BaseException as error:  # noqa: BLE001  (raised again behind the task group, which would wrap it)
                failure = error
            finally:
                over = True
                span.leave()
                team.driver.notify()
        if failure is not None:
            raise failure
        return result

    async def _opened(self, run: Run, fn: Any, frame: Site) -> RunSpan:
        """Return a run's span, once all workers have come to the run."""
        team = self._team
        pending = await self._posted(Call("strategy.run", function=function_of(fn)), frame, partial(_open, team))
        try:
            await team.awaited(pending, run.options.timeout_seconds)
        except anyio.get_cancelled_exc_class():
            if pending.has_result:  # the others begin the run
                for replica in run.ledger.replicas:
                    run.ledger.end(replica, ReplicaState.CANCELLED)
                self._spanning(run, pending).abandon()
            raise
        return self._spanning(run, pending)

    def _spanning(self, run: Run, pending: Pending) -> RunSpan:
        team = self._team
        number, communicator, of_opening = pending.result()
        moving = Moving(team.layout, self._extended.devices, team.threads, ordered=team.settings.ordered)
        run.span = span = RunSpan(team, of_opening, number, communicator, run, moving)
        self._run_numbers[run.ledger] = of_opening
        return span

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduce a per-replica value over the replicas of all workers and, optionally, along axes.

        Args:
            reduce_op: as in `Strategy.reduce`.
            value: this worker's components; a plain value counts for each of its replicas.
            axis: as in `Strategy.reduce`.

        Returns:
            The same nest of reduced values on every worker. Values on GPUs go through the host, and become arrays of
            the same framework on the GPU of this worker's first component.

        Raises:
            CollectiveError: the workers disagree, or one is gone.
            ReplicaContextError, TypeError, ValueError: as `Strategy.reduce`.
        """
        frame = caller(self._extended.order_check)
        require_cross_replica(self, "strategy.reduce")
        if _in_group_of_this_worker():
            return super().reduce(reduce_op, value, axis)
        with self._noting_refusal("strategy.reduce", frame):
            op = arguments.reduce_op(reduce_op)
            replicas = replicas_here(self)
            through = ThroughHost(self, value, replicas)
            prepared = across_workers.prepare_reduce(
                op, through.value, axis, replicas, through.marks, bare=self._has_bare_values
            )
        call = across_workers.call_of("strategy.reduce", op, prepared)
        return self._together(call, across_workers.reduced(op, prepared, self._team), frame, through)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the components of a per-replica value along an axis, in replica order over all workers.

        Args:
            value: this worker's components; with one local replica, its plain value.
            axis: as in `Strategy.gather`.

        Returns:
            The same nest of arrays on every worker; for values on GPUs see `reduce`.

        Raises:
            CollectiveError: the workers disagree, or one is gone.
            ReplicaContextError, TypeError, ValueError: as `Strategy.gather`.
        """
        frame = caller(self._extended.order_check)
        require_cross_replica(self, "strategy.gather")
        if _in_group_of_this_worker():
            return super().gather(value, axis)
        replicas = replicas_here(self)
        with self._noting_refusal("strategy.gather", frame):
            through = ThroughHost(self, value, replicas)
            prepared = across_workers.prepare_gather(through.value, axis, replicas, through.marks)
        call = across_workers.call_of("strategy.gather", None, prepared)
        return self._together(call, across_workers.gathered(prepared, self._team), frame, through)

    async def _together(
        self,
        call: Call,
        move: Move,
        frame: Site,
        through: ThroughHost,
        targets: Sequence[tuple[int, ...]] | None = None,
    ) -> Any:
        pending = await self._posted(call, frame, move, through.down)
        result = await self._team.awaited(pending, self._extended.communication_options.timeout_seconds)
        return await through.up(result, targets)

    async def _perform(self, call: Call, frame: Site, move: Move) -> Any:
        """Carry out a call that all workers make outside of replicas."""
        pending = await self._posted(call, frame, move)
        return await self._team.awaited(pending, self._extended.communication_options.timeout_seconds)

    def _site_of(self, frame: FrameType) -> Site:
        return site_of(frame, self._extended.order_check)

    async def _posted(
        self, call: Call, frame: Site, move: Move, before: Callable[[], Awaitable[object]] | None = None
    ) -> Pending:
        """Post a call in its turn, when values on GPUs have been copied down; the others wait for it from now on."""
        with self._noting_refusal(call.kind, frame):
            async with self._in_order:
                if before is not None:
                    await before()
        return self._begin(call, frame, move)

    def _begin(self, call: Call, frame: Site, move: Move) -> Pending:
        sharing.check_all_workers_are_here()
        float64 = self._extended.communication_options.accumulate == "float64"
        outside = self._team.outside
        path = None if call.name is not None else frame.path
        return outside.begin(call, frame.f_code, frame.f_lasti, path, move, float64=float64)

    @contextmanager
    def _noting_refusal(self, kind: str, frame: Site) -> Iterator[None]:
        """Tell the other workers, which wait for this call, if its arguments are wrong."""
        try:
            yield
        except ReplicaContextError:  # it does not belong here, and is none of what all workers call
            raise
        except BaseException as error:
            if self._team.layout.workers > 1 and self._team.error is None:
                told = error if isinstance(error, Exception) else None
                self._team.outside.refuse(Call(kind), frame.f_code, frame.f_lasti, told)
            raise

    def close(self) -> None:
        """Leave the other workers without waiting for them, as the end of the process does.

        Later calls of the strategy raise, here and on the other workers. A strategy that is garbage-collected without
        this call leaves them, too, with a `ResourceWarning`.
        """
        if self._joined is not None:
            self._dropped.detach()
            self._joined.close()


def _open(team: Team, channel: Channel, found: Found) -> Steps[tuple[int, Any, int]]:  # noqa: ARG001  (nothing is added up)
    """Choose the channel of a run; return its number, its communicator and the number of the opening."""
    of_opening = channel.session.number
    number, communicator = yield from team.choose_channel(channel)
    return number, communicator, of_opening


class MultiWorkerExtended(StrategyExtended):
    """The devices and settings of a strategy on several workers; devices and components are this worker's."""

    async def _reduce(self, what: str, reduce_op: Any, pairs: Iterable[tuple[Any, Any]], options: Any) -> list[Any]:
        if _in_group_of_this_worker():
            return await super()._reduce(what, reduce_op, pairs, options)
        strategy = self._required(what)
        assert isinstance(strategy, MultiWorkerMirroredStrategy)
        frame = caller(self.order_check)
        with strategy._noting_refusal("extended.reduce_to", frame):
            op = arguments.reduce_op(reduce_op)
            arguments.options(options, None)
            targets = [(value, devices_of(destinations, self.devices)) for value, destinations in pairs_of(pairs)]
            replicas = replicas_here(strategy)
            gpus = gpus_by_leaf(targets)
            through = ThroughHost(strategy, [value for value, _ in targets], replicas)
            prepared = across_workers.prepare_reduce(
                op, through.value, None, replicas, through.marks, bare=strategy._has_bare_values
            )
        call = across_workers.call_of("extended.reduce_to", op, prepared)
        move = across_workers.reduced(op, prepared, strategy._team)
        results = await strategy._together(call, move, frame, through, gpus)
        return [placed(result, devices) for result, (_, devices) in zip(results, targets, strict=True)]

    async def _update(self, make: Callable[[], Awaitable[Update]], variable: Any) -> Update:
        return await sharing.update_together(self._strategy, make, variable, caller(self.order_check))


def _in_group_of_this_worker() -> bool:
    """Whether this is the merge function of a group that has no members elsewhere."""
    here = current.get()
    group = here.group if isinstance(here, CrossReplica) else None
    return group is not None and group.size == len(group.members)


class Site(NamedTuple):
    """Where a call stands, as it was when it was made: its frame goes on while it is awaited.

    Attributes:
        f_code: the caller's code, with
        f_lasti: the offset of the call in it.
        path: the call sites of all its callers, where calls are compared by paths.
    """

    f_code: CodeType
    f_lasti: int
    path: Path | None


def site_of(frame: FrameType, order_check: OrderCheck) -> Site:
    """Return where a frame is now."""
    path = call_path(frame) if order_check is OrderCheck.CALL_PATH else None
    return Site(frame.f_code, frame.f_lasti, path)


def caller(order_check: OrderCheck) -> Site:
    """Return where the innermost frame is that is not the strategy's own."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and frame.f_back is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OWN):
            break
        frame = frame.f_back
    assert frame is not None
    return site_of(frame, order_check)


_OWN = ("aiodist._strategy", "aiodist._strategy", "aiodist._runtime", "aiodist._data")

MultiWorkerMirroredStrategy.__module__ = "aiodist"
