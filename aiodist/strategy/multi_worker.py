"""MultiWorkerMirroredStrategy: replicas on the devices of several workers, a process each, which work in step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from sys import _getframe
from types import FrameType
from typing import TYPE_CHECKING, Any

from anyio import create_task_group, get_cancelled_exc_class

from aiodist._arrays.options import CommunicationOptions, OrderCheck
from aiodist._core.errors import ReplicaContextError
from aiodist._core.report import Reason
from aiodist._data.distributed import Share
from aiodist._data.workers import fill_up
from aiodist.collective.callsite import call_path
from aiodist.collective.group import SyncGroup
from aiodist.collective.kinds import Kind
from aiodist.collective.signature import Signature
from aiodist.collective.spanned import SpannedGroup
from aiodist.replica import arguments
from aiodist.replica.merge import function_key
from aiodist.replica.refusal import NO_RUN, group_here
from aiodist.replica.team import Team
from aiodist.strategy import across_workers, sharing
from aiodist.strategy.base import Strategy
from aiodist.strategy.cluster import ClusterSettings
from aiodist.strategy.destinations import devices_of, placed
from aiodist.strategy.extended import StrategyExtended, pairs_of
from aiodist.strategy.on_devices import gpus_by_leaf
from aiodist.strategy.scope import replicas_here, require_cross_replica
from aiodist.strategy.through_host import ThroughHost
from aiodist.workers.communicator import Communicator, Intracomm, SharingCommunicator
from aiodist.workers.crossing import Plan, Span
from aiodist.workers.engines import communicator_of
from aiodist.workers.joining import Hello, Joining, place_of_making
from aiodist_kernels import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from aiodist.strategy.update import Update


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous data parallelism on several workers: one process each, with one replica a device of that process.

    Every worker runs the same program. Replica ids count over all workers: worker 0's replicas first, then worker 1's;
    workers may have different numbers of them. Local replicas are reduced first, then the workers', in one step for
    each collective, whatever the number of values in it. `run`, per-replica values and ``merge_call`` have this
    worker's components; reductions and gathered values are those of all replicas, on every worker.

    What is called outside of replicas (`run`, `reduce`, `gather`, the creation of a variable) has one order, the same
    on every worker, and is checked as collectives are.

    Args:
        communicator: the workers. None: those that a launcher has started, such as ``aiodist run -n 4`` or ``mpiexec -n
            4``; without a launcher this process alone. A communicator of mpi4py's (``mpi4py.MPI.Intracomm``): its
            processes, all of which make the strategy; it is duplicated, and stays the program's own.
        devices: one device a local replica, as `MirroredStrategy` has them. None: all GPUs, else CPU:0.
        communication_options: the options of every collective.
        order_check: what makes two calls the same collective, as `MirroredStrategy` has it.

    Raises:
        DeviceNotFoundError: a device does not exist on this machine.
        ImportError: a launcher has started several workers, and the library of their engine is not installed.
        TypeError: an argument of the wrong type.
        ValueError: a device is misspelled or given twice; an unknown ``order_check``; a communicator that this process
            is not in.
    """

    def __init__(
        self,
        communicator: Communicator | Intracomm | None = None,
        devices: Sequence[str] | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        order_check: str = "call_site",
    ) -> None:
        extended = MultiWorkerExtended.on(devices, communication_options, order_check)
        super().__init__(extended)
        self._communicator = communicator_of(communicator)
        hello = Hello.of_this_process(extended.devices, self._communicator.listening(), place_of_making())
        self._joining = Joining(self._communicator, hello)
        self._joined: Team | None = None
        self._cluster: ClusterSettings | None = None
        if not isinstance(self._communicator, SharingCommunicator):  # whose workers' strategies one thread makes
            self._joined = self._team  # so that the order in which strategies are first used does not matter

    def __repr__(self) -> str:
        layout = self._team.span.layout
        return (
            f"<{type(self).__name__}: worker {layout.rank} of {layout.workers}, {layout.local} of {layout.replicas} "
            f"replicas, over {self._communicator.engine}>"
        )

    @property
    def _team(self) -> Team:
        """The workers; the first use waits for them."""
        if self._joined is None:
            hellos, layout = self._joining.hellos, self._joining.layout
            extended = self._extended
            control = self._communicator.control(layout, extended.order_check, hellos)
            options = extended.communication_options
            alongside = layout.workers > 1 and options.verify == "alongside"
            span = Span(layout, options.reduction == "ordered", alongside)
            places = [hello.place for hello in hellos]
            self._joined = Team(self._communicator, control, span, extended.order_check, options, places)
            self._dropped = weakref.finalize(self, control.let_go)
            self._dropped.atexit = False  # the control plane sees to that
        return self._joined

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas work in step, over all workers."""
        return self._team.span.layout.replicas

    @property
    def _span(self) -> tuple[int, int]:
        layout = self._team.span.layout
        return layout.offset, layout.replicas

    @property
    def _share(self) -> Share:
        layout = self._team.span.layout
        mine = range(layout.offset, layout.offset + layout.local)
        return Share(layout.replicas, mine, layout.workers, layout.rank, partial(fill_up, self._team))

    @property
    def _has_bare_values(self) -> bool:
        return 1 in self._team.span.layout.counts

    @property
    def _shares_variables(self) -> bool:
        return self._team.span.layout.workers > 1

    @property
    def cluster_resolver(self) -> ClusterSettings:
        """The cluster that the strategy spans, and this worker's place in it."""
        if self._cluster is not None:
            return self._cluster
        hosts = tuple(hello.host for hello in self._joining.hellos)
        return ClusterSettings({"worker": hosts}, "worker", self._team.span.layout.rank)

    def _use_cluster(self, settings: ClusterSettings) -> None:
        """Keep the settings of a cluster, which must be the one that the workers are in."""
        layout = self._team.span.layout
        tasks = len(settings.spec[settings.task_type])
        if (tasks, settings.task_id) != (layout.workers, layout.rank):
            raise ValueError(
                f"the workers have found each other already: this is worker {layout.rank} of {layout.workers}, got "
                f"{settings.task_type!r} {settings.task_id} of {tasks}; the launcher decides, so leave the settings out"
            )
        self._cluster = settings

    def _standing_group(self) -> SyncGroup:
        if self.num_replicas_in_sync == 1:
            return super()._standing_group()
        group = self._extended.new_group()
        group.offset, group.world_size = self._span
        group.places = range(group.offset, group.offset + group.size)
        group.thread = NO_RUN
        return group

    # What all workers do together.

    def run(  # a plain function, so that the place of the call is known also where a task of its own awaits it
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Run a function on every replica of every worker; return this worker's replicas' values.

        Args:
            fn: as in `Strategy.run`; the same on every worker.
            args: likewise; per-replica values in them have this worker's components.
            kwargs: likewise.
            options: likewise.

        Returns:
            What this worker's replicas returned, regrouped.

        Raises:
            CollectiveError: the replicas did not meet in a collective, or a replica of another worker failed.
            WorkerLostError: a worker is gone.
            ExceptionGroup, ReplicaContextError, TypeError, ValueError, Exception: as `Strategy.run`.
        """
        return self._run_from(caller(), fn, args, kwargs, options)

    async def _run_from(self, frame: FrameType, fn: Any, args: Any, kwargs: Any, options: Any) -> Any:
        with self._noting_refusal(RUN, frame):
            calls = self._calls(fn, args, kwargs)
            given = arguments.options(options, None)
        group = self._extended.new_group(given)
        assert isinstance(group, SpannedGroup)
        signature = self._signature(RUN, function_key(fn), frame)
        crossing = await self._team.open_run(signature, frame.f_code, frame.f_lasti, group, given)
        failure: BaseException | None = None
        result = None
        async with create_task_group() as tasks:
            crossing.start_in(tasks)
            tasks.start_soon(crossing.drive)
            try:
                result = await self._run_calls(group, calls)
            except get_cancelled_exc_class():
                crossing.tell()
                raise
            except BaseException as error:  # noqa: BLE001  (raised again behind the task group, which would wrap it)
                failure = error
            finally:
                crossing.stop()
                self._team.close_run(crossing)
        if failure is not None:
            raise failure
        return result

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduce a per-replica value to one, over the replicas of all workers and along an axis.

        Args:
            reduce_op: as in `Strategy.reduce`.
            value: this worker's components; a plain value is that of each of its replicas.
            axis: as in `Strategy.reduce`.

        Returns:
            The same nest of reduced values on every worker. What is on GPUs goes through the host, and becomes an array
            of its framework's on the GPU of this worker's first component.

        Raises:
            CollectiveError: the workers do not meet.
            ReplicaContextError, TypeError, ValueError: as `Strategy.reduce`.
        """
        frame = caller()
        require_cross_replica(self, "strategy.reduce")
        if _in_group_of_this_worker():
            return super().reduce(reduce_op, value, axis)
        with self._noting_refusal(across_workers.REDUCE, frame):
            op = arguments.reduce_op(reduce_op)
            replicas = replicas_here(self)
            through = ThroughHost(self, value, replicas)
            prepared = across_workers.prepare_reduce(
                op, through.value, axis, replicas, through.marks, bare=self._has_bare_values
            )
        return self._together(across_workers.REDUCE, op, prepared, frame, through)

    def gather(self, value: Any, axis: int) -> Any:
        """Put the components of a per-replica value together along an axis, in replica order over all workers.

        Args:
            value: this worker's components; with one local replica, its plain value.
            axis: as in `Strategy.gather`.

        Returns:
            The same nest of arrays on every worker; what is on GPUs as `reduce` has it.

        Raises:
            CollectiveError: the workers do not meet.
            ReplicaContextError, TypeError, ValueError: as `Strategy.gather`.
        """
        frame = caller()
        require_cross_replica(self, "strategy.gather")
        if _in_group_of_this_worker():
            return super().gather(value, axis)
        replicas = replicas_here(self)
        with self._noting_refusal(across_workers.GATHER, frame):
            through = ThroughHost(self, value, replicas)
            prepared = across_workers.prepare_gather(through.value, axis, replicas, through.marks)
        return self._together(across_workers.GATHER, None, prepared, frame, through)

    async def _together(
        self,
        kind: Kind,
        op: ReduceOp | None,
        prepared: across_workers.Prepared,
        frame: FrameType,
        through: ThroughHost,
        targets: Sequence[tuple[int, ...]] | None = None,
    ) -> Any:
        signature = (*across_workers.signature_of(kind, op, prepared)[:-1], self._path(frame))
        result = await self._team.perform(signature, frame.f_code, frame.f_lasti, prepared, through.down)
        return await through.up(result, targets)

    @contextmanager
    def _noting_refusal(self, kind: Kind, frame: FrameType) -> Iterator[None]:
        """Note a call that raises for its arguments: the others wait for it all the same."""
        try:
            yield
        except ReplicaContextError:  # it does not belong here, and is none of what all workers call
            raise
        except Exception as error:
            self._team.refuse(self._signature(kind, None, frame), frame.f_code, frame.f_lasti, error)
            raise

    def _signature(self, kind: Kind, detail: Any, frame: FrameType) -> Signature:
        return (kind, None, detail, None, None, None, None, None, self._path(frame))

    def _path(self, frame: FrameType) -> Any:
        return call_path(frame) if self._extended.order_check is OrderCheck.CALL_PATH else None

    def close(self) -> None:
        """Leave the other workers, as the end of the process does; wait for none of them.

        What others still ask of this one then fails, and so does what is asked here. A strategy of several processes
        that is dropped without this leaves them when it is collected, with a `ResourceWarning`.
        """
        if self._joined is not None:
            self._dropped.detach()
            self._joined.close()
            self._joined.lose(self._joined.span.layout.rank, "has closed this strategy")


class MultiWorkerExtended(StrategyExtended):
    """What stands behind a strategy on several workers; devices, components and destinations are this worker's."""

    def new_group(self, options: CommunicationOptions | None = None) -> SyncGroup:
        """Return a sync group for one run."""
        return SpannedGroup(self.devices, self.order_check, self.communication_options.merge(options))

    async def _reduce(self, what: str, reduce_op: Any, pairs: Iterable[tuple[Any, Any]], options: Any) -> list[Any]:
        if _in_group_of_this_worker():
            return await super()._reduce(what, reduce_op, pairs, options)
        strategy = self._required(what)
        assert isinstance(strategy, MultiWorkerMirroredStrategy)
        frame = caller()
        with strategy._noting_refusal(across_workers.REDUCE_TO, frame):
            op = arguments.reduce_op(reduce_op)
            arguments.options(options, None)
            targets = [(value, devices_of(destinations, self.devices)) for value, destinations in pairs_of(pairs)]
            replicas = replicas_here(strategy)
            gpus = gpus_by_leaf(targets)
            through = ThroughHost(strategy, [value for value, _ in targets], replicas)
            prepared = across_workers.prepare_reduce(
                op, through.value, None, replicas, through.marks, bare=strategy._has_bare_values
            )
        results = await strategy._together(across_workers.REDUCE_TO, op, prepared, frame, through, gpus)
        return [placed(result, devices) for result, (_, devices) in zip(results, targets, strict=True)]

    async def _update(self, make: Callable[[], Awaitable[Update]], variable: Any) -> Update:
        return await sharing.update_together(self._strategy, make, variable, caller())


def _in_group_of_this_worker() -> bool:
    """Whether this is the merge function of a group that has no members elsewhere."""
    group = group_here()
    return group is not None and group.bridge is None


def caller() -> FrameType:
    """Return the innermost frame that is not the strategy's own."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and frame.f_back is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OWN):
            return frame
        frame = frame.f_back
    assert frame is not None
    return frame


_OWN = ("aiodist.strategy", "aiodist.replica", "aiodist._data")
RUN = Kind("strategy.run", Reason.MERGE_FN, None, across=lambda *_: Plan([], lambda _: None))

MultiWorkerMirroredStrategy.__module__ = "aiodist"
