"""The replica context: a replica's view of its sync group, and the collectives that it can issue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from sys import _getframe
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, overload
from weakref import ref

import anyio.to_thread
import numpy as np
from numpy import ndarray

from aiodist._arrays import nests
from aiodist._arrays.host import Array, ArrayLike
from aiodist._arrays.leaves import Spec
from aiodist._arrays.nests import Build, builder
from aiodist._arrays.options import CommunicationOptions, integer
from aiodist._collectives import kinds
from aiodist._collectives import out as out_buffers
from aiodist._collectives.kinds import Kind
from aiodist._runtime import arguments, requests
from aiodist._runtime.current import ContextStack, get_current, standing_run
from aiodist._runtime.handle import CollectiveHandle, post
from aiodist._runtime.merge import MergeCall
from aiodist._runtime.participant import Participant
from aiodist._runtime.rendezvous import OutBuffers
from aiodist._runtime.requests import Request
from aiodist_kernels import ReduceOp

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
P = ParamSpec("P")
Mean = Literal[ReduceOp.MEAN, "mean", "MEAN"]


class ReplicaContext:
    """One replica's view of its sync group. `Strategy.run` makes one for each replica; `get_replica_context` finds it.

    Calling a method issues a collective; awaiting the handle that it returns completes it. Every replica must issue the
    same collectives in the same order. Values are nests of NumPy arrays and scalars, Python numbers, `IndexedSlices`,
    variables (as arrays), and arrays of other frameworks: PyTorch and JAX in host memory, PyTorch, CuPy, Numba and JAX
    on GPUs. NumPy arrays in results are read-only and shared by the replicas. Arrays of other frameworks come back as
    the framework's own, one for each replica where they can be changed.

    Every collective raises at the call:

    Raises:
        ReplicaContextError: the call is made outside this replica: in another replica's function, in cross-replica
            context or a merge function, in another thread, or after the run; or the replica has joined.
        TypeError: the collective does not take such a value or dtype.
        ValueError: an argument is out of range.

    and at the await a `CollectiveError` if the replicas disagree.

    Args:
        strategy: the strategy that the replica belongs to.
        replica_id_in_sync_group: the replica's id, from 0.
    """

    __slots__ = ("__weakref__", "_entries", "_me")

    _entries: ContextStack
    _me: Participant

    def __init__(self, strategy: Any, replica_id_in_sync_group: int) -> None:
        run = standing_run(strategy)
        members = run.ledger.root.members
        index = integer("replica_id_in_sync_group", replica_id_in_sync_group)
        if not 0 <= index < len(members):
            raise ValueError(f"replica_id_in_sync_group must be from 0 to {len(members) - 1}, got {index}")
        self._show(Participant(run, members[index]))

    def _show(self, participant: Participant) -> Self:
        self._me = participant
        self._entries = ContextStack()
        participant.context = ref(self)
        return self

    def __enter__(self) -> Self:
        self._entries.enter(self._me)
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.exit()

    def __repr__(self) -> str:
        me = f"replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}"
        label = self._me.member.group.label()
        return f"<ReplicaContext: {me if label is None else f'{me} in {label}'} on {self.devices[0]}>"

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's id, from 0; in a group that `new_group` made, its position there."""
        return self._me.member.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas in the sync group."""
        return self._me.member.group.size

    @property
    def strategy(self) -> Any:
        """The strategy that the replica belongs to."""
        return self._me.run.strategy

    @property
    def devices(self) -> tuple[str, ...]:
        """The replica's devices, in canonical form."""
        return (self._me.run.device_of(self._me.member.replica_id),)

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: ArrayLike,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        name: str | None = None,
        out: Any = None,
    ) -> CollectiveHandle[Array]: ...

    @overload
    def all_reduce(
        self,
        reduce_op: Mean,
        value: int,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        name: str | None = None,
        out: Any = None,
    ) -> CollectiveHandle[float]: ...

    @overload
    def all_reduce(
        self,
        reduce_op: Mean,
        value: NDArray[np.integer[Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        name: str | None = None,
        out: Any = None,
    ) -> CollectiveHandle[NDArray[np.float64]]: ...

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        name: str | None = None,
        out: Any = None,
    ) -> CollectiveHandle[T]: ...

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        name: str | None = None,
        out: Any = None,
    ) -> CollectiveHandle[Any]:
        """Reduce a nest over the replicas; every replica gets the result.

        The reduction is a left fold in replica-id order in the leaves' own dtype (float16 and bfloat16 accumulate in
        float32, MEAN of float32 in float64), so equal inputs give equal bits. Shapes are not broadcast.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name.
            value: a nest of leaves, of equal structure, shapes and dtypes on every replica.
            options: how to carry it out.
            experimental_hints: the former name of ``options``.
            name: replaces the call site where several places are meant to be one collective.
            out: the caller's own writeable buffers, a nest like ``value`` with the result's shapes and dtypes; the
                await returns them. No two may overlap. On the host they may overlap ``value``; on GPUs a buffer may
                be the very array that it is the result of, and overlap no other.

        Returns:
            A handle; its await gives a nest of the same structure, shapes and dtypes as ``value``, except that the MEAN
            of integers is float64.

        Raises:
            TypeError: SUM, MEAN or PRODUCT of bool, and other dtypes that the op does not take; a buffer of another
                type or dtype than the result.
            ValueError: an unknown reduce op; a buffer that has another shape, is read-only or overlaps.
        """
        me = self._me
        if get_current() is not me or me.thread != get_ident():
            me.check("all_reduce")
        frame = _getframe(1)
        awaits = me.awaits
        if frame is not awaits.frame and frame.f_code is not awaits.code:
            frame = me.caller(frame, name)
        request: Request | None = None
        leaves: Any = value
        build: Build | None = None
        before = awaits.request
        expected = before.following
        if expected is not None and expected.spelling is reduce_op and name is None:
            if type(value) is ndarray:
                if expected.dtype is value.dtype and expected.shape == value.shape:
                    request = expected
            else:
                template = expected.template  # read once: another thread's event loop may replace it
                if template is not None and (found := template.match(value)) is not None:
                    request, leaves, build = expected, found, template.build
        if request is None:
            request, build, leaves = requests.reduction(reduce_op, value, name)
            before.following = request
        awaits.request = request
        if options is None and experimental_hints is None and out is None:
            run = me.run
            path = () if frame is awaits.frame else run.callers(frame)
            return post(run.handle(), me, request, frame.f_code, frame.f_lasti, path, leaves, build, None)
        options = arguments.options(options, experimental_hints)
        buffers = None if out is None else _out_buffers(out, request, leaves)
        return me.issue(frame, request, leaves, build, options=options, out=buffers)

    def all_gather(
        self, value: Any, axis: int, options: CommunicationOptions | None = None, *, name: str | None = None
    ) -> CollectiveHandle[Any]:
        """Concatenate the replicas' arrays along an axis, in replica order; every replica gets all of them.

        Args:
            value: a nest of arrays with at least one axis; their sizes along ``axis`` may differ between replicas.
            axis: the axis to concatenate along; a negative one counts from the end.
            options: how to carry it out.
            name: replaces the call site.

        Returns:
            A handle; its await gives a nest like ``value``, whose size along ``axis`` is the sum of all replicas'.

        Raises:
            ValueError: an array has no such axis.
        """
        of_spec = partial(kinds.axes_of, axis=axis)
        return self._issue(_getframe(1), kinds.ALL_GATHER, value, name, detail=of_spec, options=options)

    def broadcast(self, value: Any, source: int = 0, *, name: str | None = None) -> CollectiveHandle[Any]:
        """Give every replica the value of one.

        Args:
            value: a nest of leaves, of the same structure, shapes and dtypes on every replica.
            source: the id of the replica whose value is sent.
            name: replaces the call site.

        Returns:
            A handle; its await gives the source's nest.

        Raises:
            ValueError: there is no replica with the id ``source``; at the await, that replica has joined.
        """
        return self._issue(_getframe(1), kinds.BROADCAST, value, name, detail=lambda _: integer("source", source))

    def reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, axis: int = 0, *, name: str | None = None
    ) -> CollectiveHandle[Any]:
        """Reduce a nest over the n replicas, and give replica i the i-th of n equal parts along an axis.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name.
            value: a nest of arrays whose sizes along ``axis`` are divisible by n.
            axis: the axis to cut along; a negative one counts from the end.
            name: replaces the call site.

        Returns:
            A handle; its await gives a nest like ``value``, whose sizes along ``axis`` are an n-th. Dtypes are those of
            `all_reduce`.

        Raises:
            TypeError: a dtype that the op does not take.
            ValueError: an unknown reduce op; an array has no such axis, or its size is not divisible by n; at the
                await, a replica has joined.
        """
        op, of_spec = arguments.reduce_op(reduce_op, value), partial(kinds.axes_of, axis=axis)
        return self._issue(_getframe(1), kinds.REDUCE_SCATTER, value, name, op, detail=of_spec)

    def scan(self, reduce_op: ReduceOp | str, value: Any, *, name: str | None = None) -> CollectiveHandle[Any]:
        """Reduce a nest over the replicas up to and including this one (an inclusive prefix reduction, as MPI_Scan).

        Replica i gets the left fold of the values of replicas 0 to i, so the last one gets what `all_reduce` gives.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name.
            value: a nest of leaves, of equal structure, shapes and dtypes on every replica.
            name: replaces the call site.

        Returns:
            A handle; its await gives a nest like ``value``, with the dtypes of `all_reduce`.

        Raises:
            TypeError: a dtype that the op does not take, or `IndexedSlices`.
            ValueError: an unknown reduce op; at the await, a replica has joined.
        """
        return self._issue(_getframe(1), kinds.SCAN, value, name, arguments.reduce_op(reduce_op, value))

    def all_to_all(
        self, value: Any, split_axis: int = 0, concat_axis: int = 0, *, name: str | None = None
    ) -> CollectiveHandle[Any]:
        """Cut every replica's arrays into n equal parts, and give replica i the i-th part of each.

        Args:
            value: a nest of arrays whose sizes along ``split_axis`` are divisible by n.
            split_axis: the axis to cut along.
            concat_axis: the axis to concatenate the received parts along, in replica order.
            name: replaces the call site.

        Returns:
            A handle; its await gives a nest like ``value``, with sizes along ``split_axis`` divided by n and those
            along ``concat_axis`` multiplied by n.

        Raises:
            ValueError: an array has no such axis, or its size is not divisible by n; at the await, a replica has
                joined.
        """
        of_spec = partial(kinds.split_axes_of, split_axis=split_axis, concat_axis=concat_axis)
        return self._issue(_getframe(1), kinds.ALL_TO_ALL, value, name, detail=of_spec)

    def _issue(
        self,
        frame: FrameType,
        kind: Kind,
        value: Any,
        name: str | None,
        op: ReduceOp | None = None,
        *,
        detail: Callable[[Spec], Any] = lambda _: None,
        options: CommunicationOptions | None = None,
    ) -> CollectiveHandle[Any]:
        """Issue a collective of a nest from a frame; ``detail`` returns the kind's argument for such nests."""
        self._me.check(kind.name)
        name = arguments.checked_name(name)
        structure, spec, leaves = requests.described(value)
        given = detail(spec)
        if kind is kinds.ALL_GATHER:
            spec = kinds.ragged(spec, given)
        request = requests.request(kind, op, given, name, structure, spec)
        return self._me.issue(frame, request, leaves, builder(structure), options=arguments.options(options, None))

    def barrier(self, *, name: str | None = None) -> CollectiveHandle[None]:
        """Wait until every replica has called this.

        Args:
            name: replaces the call site.

        Returns:
            A handle; its await gives None.
        """
        me = self._me
        if get_current() is not me or me.thread != get_ident():
            me.check("barrier")
        frame = _getframe(1)
        awaits = me.awaits
        if frame is not awaits.frame and frame.f_code is not awaits.code:
            frame = me.caller(frame, name)
        if name is None:
            run = me.run
            path = () if frame is awaits.frame else run.callers(frame)
            return post(run.handle(), me, requests.BARRIER, frame.f_code, frame.f_lasti, path, None, None, None)
        request = requests.request(kinds.BARRIER, None, None, arguments.checked_name(name), None, None)
        return me.issue(frame, request, None)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> CollectiveHandle[Any]:
        """Run a function once for all replicas, in cross-replica context: ``merge_fn(strategy, *args, **kwargs)``.

        Replica 0's function runs, in a task of its own with replica 0's context variables. Each argument is regrouped
        over the replicas, as the results of `Strategy.run` are, except that strings and bytes stay bare where they are
        equal. The function may call ``strategy.run``.

        Args:
            merge_fn: a plain or coroutine function; the same on every replica.
            args: a tuple or list of positional arguments, of equal structure on every replica.
            kwargs: keyword arguments, likewise.
            name: replaces the call site.

        Returns:
            A handle; its await gives this replica's component of what ``merge_fn`` returned.

        Raises:
            TypeError: ``merge_fn`` is no function to call, or ``args`` is neither a tuple nor a list.
            ValueError: at the await: a per-replica value in the result has another number of components, or a replica
                has joined.
            Exception: at the await: what ``merge_fn`` raised; `Strategy.run` raises it once.
        """
        self._me.check("merge_call")
        if not callable(merge_fn):
            raise TypeError(f"merge_call expects a function, got {merge_fn!r}")
        arguments.check_iterated(merge_fn, "merge_call")
        call = MergeCall(merge_fn, *arguments.call_arguments(args, kwargs), copy_context())
        request = requests.merge_request(merge_fn, call.args, call.kwargs, arguments.checked_name(name))
        return self._me.issue(_getframe(1), request, call)

    def join(self) -> CollectiveHandle[int]:
        """Take part in the others' collectives without a value, until every replica has joined.

        This is for replicas that run out of data. Reductions and all_gather combine the values of the others (a MEAN is
        divided by their number), and a barrier waits for them alone. Collectives that need a value from
        every replica (reduce_scatter, scan, all_to_all, merge_call, a broadcast from a replica that has joined) raise
        `ValueError` in the replicas that wait in them.

        Returns:
            A handle; its await gives the id, in this context, of the replica that joined last.

        Raises:
            ReplicaContextError: the replica has joined already, or the call is made outside this replica.
        """
        self._me.check("join")
        frame = self._me.caller(_getframe(1), "join")
        handle: CollectiveHandle[int] = self._me.run.join(self._me, frame.f_code, frame.f_lasti)
        return handle

    def new_group(self, replica_ids: Iterable[int], name: str | None = None) -> ReplicaContext:
        """Return this replica's context in a group of some of the replicas, with an order of collectives of its own.

        Only members call it, with the same arguments; the call does not wait. Groups for the same replicas and name
        are matched in order: the first that each member makes, the second, and so on. In the group's context this
        replica's id is its position in ``replica_ids``. Use the context in any task of the replica; ``with group:``
        makes it what `get_replica_context` returns. Variables belong to the strategy: all replicas take part in an
        assignment, also in such a block.

        Args:
            replica_ids: the ids of the members in this context, in the order of their ids in the group.
            name: what reports call the group; it replaces the call site.

        Returns:
            The context.

        Raises:
            ReplicaContextError: the call is made outside this replica.
            TypeError: an argument has the wrong type.
            ValueError: there are no ids, unknown ones or duplicates; or this replica is not a member.
        """
        self._me.check("new_group")
        name = arguments.checked_name(name)
        ids = arguments.replica_ids(replica_ids, self.num_replicas_in_sync)
        me = self.replica_id_in_sync_group
        if me not in ids:
            raise ValueError(
                f"new_group makes a group of replicas {list(ids)}, and replica {me}, which called it, is not among "
                f"them; let only members make it:  if ctx.replica_id_in_sync_group in {list(ids)}: ..."
            )
        frame, run = self._me.caller(_getframe(1), name), self._me.run
        member = run.new_group(self._me.member, ids, name, frame.f_code, frame.f_lasti, run.callers(frame))
        return context_of(self._me.branch(member))

    async def run_sync(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a plain function in the worker thread of this replica's device, and wait for it.

        Other replicas run meanwhile. The function has this replica's context variables, but cannot issue collectives.
        If the replica is cancelled, the cancellation is raised once ``fn`` has returned; after a Ctrl-C, a second later
        at most: the thread is left then, and a line on standard error names ``fn``.

        Args:
            fn: the function.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Returns:
            What ``fn`` returns.

        Raises:
            ReplicaContextError: the call is made outside this replica.
            TypeError: ``fn`` is not callable, or is a coroutine function.
            Exception: what ``fn`` raises.
        """
        self._me.check("run_sync")
        arguments.check_plain(fn)
        call = partial(fn, *args, **kwargs) if args or kwargs else fn
        run, replica_id = self._me.run, self._me.member.replica_id
        if run.device_threads is None:  # outside any run
            return await anyio.to_thread.run_sync(call)
        result: T = await run.device_threads.run(run.device_of(replica_id), replica_id, call)
        return result


def context_of(participant: Participant) -> ReplicaContext:
    """Return the context of a participant: the same object as long as it is alive."""
    found = None if participant.context is None else participant.context()
    context: ReplicaContext = found or ReplicaContext.__new__(ReplicaContext)._show(participant)  # noqa: SLF001
    return context


def _out_buffers(given: Any, request: Request, leaves: Any) -> OutBuffers:
    """Return the buffers for a result in the form that executors take."""
    structure = request.structure
    if type(given) is ndarray:
        buffers, found = [given], None
    else:
        buffers, found = nests.flatten(given)
        found = None if len(buffers) == 1 and buffers[0] is given else found
    expected, got = (None if each is None else nests.without_factories(each) for each in (structure, found))
    if expected != got:
        texts = ["a single array" if each is None else nests.text(each) for each in (expected, got)]
        raise ValueError(f"out must be a nest like the value, {texts[0]}, got {texts[1]}")
    own = [leaves] if structure is None else leaves
    return OutBuffers(out_buffers.checked(request.collective, own, buffers), given)


ReplicaContext.__module__ = "aiodist"
