"""MultiWorkerMirroredStrategy: replicas on the devices of several workers, a process each, which work in step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import CoroutineType
from typing import Any, cast

import anyio

from aiodist._arrays import environment
from aiodist._arrays.environment import ClusterSettings
from aiodist._arrays.options import CommunicationOptions, choice
from aiodist._core.call import Call
from aiodist._core.terms import ReplicaState
from aiodist._runtime import requests as arguments
from aiodist._runtime.requests import function_of
from aiodist._runtime.scheduler import Run
from aiodist._strategy.across_workers import CallSite, Workers
from aiodist._strategy.extended import new_extended
from aiodist._strategy.reductions import combine, gathering
from aiodist._strategy.strategy import Strategy
from aiodist._workers.span import RunSpan
from aiodist._workers.team import Pending, Team


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous data parallelism on several workers: a process each, with a replica for each of its devices.

    Every worker runs the same program. Replica ids count over all workers: first worker 0's replicas, then worker 1's,
    and so on; workers may have different numbers of them. `run`, per-replica values and ``merge_call`` have this
    worker's components. Reductions and gathered values are those of all replicas, on every worker.

    The order of calls outside of replicas (`run`, `reduce`, `gather`, the creation of a variable) must be the same on
    every worker, and is checked like that of collectives. A disagreement, a lost worker or an engine's error
    ends the strategy, and every later call raises it; make a new strategy to go on.

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
                "MultiWorkerMirroredStrategy(communicator=comm), or give the devices, too: "
                'MultiWorkerMirroredStrategy(["CPU:0"], comm)'
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
        """The workers; the first use waits for them."""
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
        """Keep the settings of a cluster, which must be that of the workers."""
        layout = self._team.layout
        tasks = len(settings.spec[settings.task_type])
        if (tasks, settings.task_id) != (layout.workers, layout.rank):
            raise ValueError(
                f"the workers are already connected: this is worker {layout.rank} of {layout.workers}, got "
                f"{settings.task_type!r} {settings.task_id} of {tasks}; the launcher decides, so leave the settings out"
            )
        self._cluster = settings

    # Runs.

    def run(  # a plain function, so that the place of the call is known also where a task of its own awaits it
        self,
        fn: Callable[..., Awaitable[Any] | Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> CoroutineType[Any, Any, Any]:
        """Run a function on every replica of every worker, as `Strategy.run`; values are this worker's.

        Raises:
            CollectiveError: the replicas disagree, or a replica of another worker failed.
            WorkerLostError: a worker is gone.
            Exception: as `Strategy.run`.
        """
        return _as_method(self._run_from(self._workers.caller(), fn, args, kwargs, options))

    async def _run_from(self, site: CallSite, fn: Any, args: Any, kwargs: Any, options: Any) -> Any:
        calls = self._calls(fn, args, kwargs)
        run = self._new_run(arguments.options(options, None))
        team = self._team
        if team.layout.workers == 1 and not team.ordered:
            team.check()
            return await self._run_calls(run, calls)
        span = await self._opened(run, fn, site)
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

    async def _opened(self, run: Run, fn: Any, site: CallSite) -> RunSpan:
        """Return a run's span, once all workers have come to the run."""
        team = self._team
        call = Call("strategy.run", function=function_of(fn))
        pending = await self._workers.begin(call, site, lambda _: team.choose_channel())
        try:
            await team.awaited(pending, run.options.timeout_seconds)
        except anyio.get_cancelled_exc_class():
            if pending.has_result:  # the others begin the run
                for replica in run.ledger.replicas:
                    run.ledger.end(replica, ReplicaState.CANCELLED)
                self._span(run, pending).abandon()
            raise
        return self._span(run, pending)

    def _span(self, run: Run, pending: Pending) -> RunSpan:
        team = self._team
        channel, communicator = pending.result()
        run.span = span = RunSpan(team, pending.number, channel, communicator, run)
        self._workers.run_numbers[run.ledger] = pending.number
        return span

    # Per-replica values.

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> CoroutineType[Any, Any, Any]:
        """Reduce a per-replica value over the replicas of all workers, as `Strategy.reduce`.

        The value has this worker's components; a plain one counts for each of its replicas. Every worker gets the same
        nest. Values on GPUs go through the host, and become arrays on the GPU of this worker's first component.

        Raises:
            CollectiveError: the workers disagree, or one is gone.
            Exception: as `Strategy.reduce`.
        """
        arguments.check_not_all_none(value, 3)
        make, site = self._reduction(reduce_op, value, axis), self._workers.caller()
        return _as_method(_only(combine(self, "strategy.reduce", make, site)))

    def gather(self, value: Any, axis: int) -> CoroutineType[Any, Any, Any]:
        """Concatenate the components of a per-replica value over all workers, as `Strategy.gather`.

        The value has this worker's components; with one local replica it is plain. For values on GPUs see `reduce`.

        Raises:
            CollectiveError: the workers disagree, or one is gone.
            Exception: as `Strategy.gather`.
        """
        arguments.check_not_all_none(value, 3)
        make, site = lambda: (gathering(axis), [value], None), self._workers.caller()
        return _as_method(_only(combine(self, "strategy.gather", make, site)))

    def close(self) -> None:
        """Leave the other workers without waiting for them, as the end of the process does.

        Later calls of the strategy raise, here and on the other workers. A strategy that is garbage-collected without
        this call leaves them, too.
        """
        self._workers.close()


async def _only(doing: Coroutine[Any, Any, list[Any]]) -> Any:
    (result,) = await doing
    return result


def _as_method(doing: Coroutine[Any, Any, Any]) -> CoroutineType[Any, Any, Any]:
    """Return a coroutine as checkers know the result of an ``async`` method, which these override."""
    return cast("CoroutineType[Any, Any, Any]", doing)


MultiWorkerMirroredStrategy.__module__ = "aiodist"
