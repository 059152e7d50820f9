"""The replica context: what a replica function sees of its sync group, and the collectives that it can issue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import _getframe
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

from aiodist._arrays import nests
from aiodist._arrays.leaves import describe
from aiodist._arrays.options import CommunicationOptions
from aiodist.collective import joining, kinds
from aiodist.collective.brought import OutBuffers
from aiodist.collective.callsite import call_path
from aiodist.collective.signature import NAME, PATH, Signature
from aiodist.replica import arguments, refusal
from aiodist.replica.branching import member_of_new_group, tell_when_gone
from aiodist.replica.current import current
from aiodist.replica.handle import CollectiveHandle
from aiodist.replica.identity import Identity
from aiodist.replica.merge import MergeCall, function_key
from aiodist.replica.worker import check_plain
from aiodist_kernels import ReduceOp

T = TypeVar("T")


class ReplicaContext(Identity):
    """One replica's view of its sync group. `strategy.run` makes one for each replica; `get_replica_context` finds it.

    A collective is issued by the call, in the order of the calls, and completed by the await of what it returns. Every
    replica must issue the same collectives in the same order. Values are nests of NumPy arrays and scalars, Python
    numbers, `IndexedSlices`, variables (as the array that they read as), other frameworks' arrays in host memory, such
    as PyTorch's and JAX's, and PyTorch's, CuPy's, Numba's and JAX's on GPUs. NumPy arrays in results are shared and
    read-only; a framework's arrays come back as its own, one for each replica where they can be changed.

    Every collective raises, at the call:

    Raises:
        ReplicaContextError: the call is made outside this replica: in another's function, in cross-replica context or a
            merge function, in another thread, or after the run.
        TypeError: a value, or a dtype, that the collective does not take.
        ValueError: an argument out of range.

    and at the await `CollectiveError` in one of its forms, when the replicas do not meet.

    Args:
        strategy: the strategy that the replica belongs to.
        replica_id_in_sync_group: its id.
    """

    __slots__ = ()

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
        float32; MEAN of float32 in float64), so equal inputs give bitwise equal results. Nothing is broadcast.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name.
            value: a nest of leaves, of equal structure, shapes and dtypes on every replica.
            options: how to carry it out.
            experimental_hints: the former name of ``options``.
            name: stands in for the call site where several places are meant to be one collective.
            out: the caller's own buffers for the result, a nest like ``value``; they are what the await returns. On
                GPUs they may be what ``value`` has in the same places, and overlap it nowhere else.

        Returns:
            A handle; its await gives a nest like ``value``. MEAN of integers is float64.
        """
        if current.get() is not self or self._thread != get_ident():
            refusal.check_current(self, "all_reduce")
        op = reduce_op if type(reduce_op) is ReduceOp else arguments.reduce_op(reduce_op)
        member = self._member
        frame = _getframe(1)
        if type(value) is np.ndarray and not member.group.paths:
            signature: Signature = (kinds.ALL_REDUCE, op, None, name, None, value.shape, value.dtype, None, None)
            leaves = value
        else:
            signature, leaves = self._describe(kinds.ALL_REDUCE, op, None, name, value, frame)
        if options is None and experimental_hints is None and out is None and name is None:
            handle: CollectiveHandle[Any] = member.group.arrive(member, signature, frame.f_code, frame.f_lasti, leaves)
            return handle
        options = arguments.options(options, experimental_hints)
        if name is not None:
            signature = (*signature[:NAME], arguments.checked_name(name), *signature[NAME + 1 :])
        return self._issue(frame, signature, leaves, options, arguments.out_buffers(out, signature, leaves))

    def all_gather(
        self, value: Any, axis: int, options: CommunicationOptions | None = None, *, name: str | None = None
    ) -> CollectiveHandle[Any]:
        """Put the replicas' arrays together along an axis, in replica order; every replica gets the whole.

        Args:
            value: a nest of arrays with at least one axis; their sizes along ``axis`` may differ between replicas.
            axis: the axis to concatenate along; a negative one counts from the end.
            options: how to carry it out.
            name: stands in for the call site.

        Returns:
            A handle; its await gives a nest like ``value``.
        """
        refusal.check_current(self, "all_gather")
        frame = _getframe(1)
        signature, leaves = self._describe(kinds.ALL_GATHER, None, None, name, value, frame)
        signature = arguments.with_axes(signature, axis, ragged=True)
        return self._issue(frame, signature, leaves, arguments.options(options, None))

    def broadcast(self, value: Any, source: int = 0, *, name: str | None = None) -> CollectiveHandle[Any]:
        """Give every replica the value of one.

        Args:
            value: a nest of leaves, of the same structure, shapes and dtypes on every replica.
            source: the id of the replica whose value counts.
            name: stands in for the call site.

        Returns:
            A handle; its await gives a nest like ``value``.
        """
        refusal.check_current(self, "broadcast")
        frame = _getframe(1)
        signature, leaves = self._describe(
            kinds.BROADCAST, None, arguments.replica_id(source, "source"), name, value, frame
        )
        return self._issue(frame, signature, leaves)

    def reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, axis: int = 0, *, name: str | None = None
    ) -> CollectiveHandle[Any]:
        """Reduce a nest over the replicas and give each its part: the i-th of n equal parts along an axis.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name.
            value: a nest of arrays whose sizes along ``axis`` are divisible by the number of replicas.
            axis: the axis to cut along.
            name: stands in for the call site.

        Returns:
            A handle; its await gives a nest like ``value``.
        """
        refusal.check_current(self, "reduce_scatter")
        frame = _getframe(1)
        op = arguments.reduce_op(reduce_op)
        signature, leaves = self._describe(kinds.REDUCE_SCATTER, op, None, name, value, frame)
        return self._issue(frame, arguments.with_axes(signature, axis), leaves)

    def all_to_all(
        self, value: Any, split_axis: int = 0, concat_axis: int = 0, *, name: str | None = None
    ) -> CollectiveHandle[Any]:
        """Cut every replica's arrays into n parts and give the i-th parts to replica i.

        Args:
            value: a nest of arrays whose sizes along ``split_axis`` are divisible by the number of replicas.
            split_axis: the axis to cut along.
            concat_axis: the axis to put the received parts together along, in replica order.
            name: stands in for the call site.

        Returns:
            A handle; its await gives a nest like ``value``.
        """
        refusal.check_current(self, "all_to_all")
        frame = _getframe(1)
        signature, leaves = self._describe(kinds.ALL_TO_ALL, None, None, name, value, frame)
        return self._issue(frame, arguments.with_split_axes(signature, split_axis, concat_axis), leaves)

    def barrier(self, *, name: str | None = None) -> CollectiveHandle[None]:
        """Wait until every replica is here.

        Args:
            name: stands in for the call site.

        Returns:
            A handle; its await gives None.
        """
        if current.get() is not self or self._thread != get_ident():
            refusal.check_current(self, "barrier")
        member = self._member
        frame = _getframe(1)
        if name is None and not member.group.paths:
            handle: CollectiveHandle[None] = member.group.arrive(member, _BARRIER, frame.f_code, frame.f_lasti, None)
            return handle
        name = arguments.checked_name(name)
        signature = (kinds.BARRIER, None, None, name, None, None, None, None, self._path(frame, name))
        return self._issue(frame, signature, None)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> CollectiveHandle[Any]:
        """Run a function once for all replicas, in cross-replica context: ``merge_fn(strategy, *args, **kwargs)``.

        It runs in a task of its own, with the context variables of replica 0, whose function it is. Each argument is
        regrouped over the replicas as the results of `run` are. In it `strategy.run` may be called again.

        Args:
            merge_fn: a plain or coroutine function; the same on every replica.
            args: a tuple or list of its positional arguments.
            kwargs: its keyword arguments.
            name: stands in for the call site.

        Returns:
            A handle; its await gives this replica's component of what ``merge_fn`` returned. An exception in it is
            raised there, too, and comes out of `run` once.
        """
        refusal.check_current(self, "merge_call")
        frame = _getframe(1)
        if not callable(merge_fn):
            raise TypeError(f"merge_call expects a function, got {merge_fn!r}")
        call = MergeCall(merge_fn, *arguments.call_arguments(args, kwargs))
        _, structure = nests.flatten_with_none((list(call.args), dict(call.kwargs)))
        name = arguments.checked_name(name)
        signature = (
            kinds.MERGE_CALL, None, function_key(merge_fn), name, structure, None, None, None, self._path(frame, name),
        )  # fmt: skip
        return self._issue(frame, signature, call)

    def join(self) -> CollectiveHandle[int]:
        """Take part in the others' collectives with nothing, until every replica has joined.

        For replicas that run out of data: a reduction is one of what the others bring (a MEAN is divided by their
        number), an all_gather puts their values together, a barrier needs them alone. What needs a value of every
        replica (reduce_scatter, all_to_all, merge_call, a broadcast from one that has joined) raises `ValueError` in
        those who wait in it.

        Returns:
            A handle; its await gives the id of the replica that joined last, as this context counts.
        """
        refusal.check_current(self, "join")
        frame = _getframe(1)
        handle: CollectiveHandle[int] = joining.join(self._member.group, self._member, frame.f_code, frame.f_lasti)
        return handle

    def new_group(self, replica_ids: Iterable[int], name: str | None = None) -> ReplicaContext:
        """Return this replica's context in a group of some of the replicas, with an order of collectives of its own.

        Only members call it, each with the same arguments; nobody waits. The groups that members make for the same
        replicas under the same name are one and the same: the first of each, the second of each, and so on. In the
        group's context this replica's id is its position in ``replica_ids``. Its methods are used as they are, in any
        task of the replica; ``with group:`` makes it what `get_replica_context` returns. Variables belong to the
        strategy: in such a block, too, an assignment is made by all replicas.

        Args:
            replica_ids: the members, as this context counts them, in the order that they are to have.
            name: what reports call the group; it stands in for the call site.

        Returns:
            The context.

        Raises:
            ReplicaContextError: the call is made outside this replica.
            TypeError: an argument of the wrong type.
            ValueError: no replicas, unknown ones, one that is given twice; or this one is not among them.
        """
        refusal.check_current(self, "new_group")
        member = member_of_new_group(self, replica_ids, name, _getframe(1))
        run = self._of_run
        context = self._of(self._strategy, member, self._worker)
        context._run = run
        run._branches = run._branches if run._branches is not None else WeakSet()
        run._branches.add(context)
        tell_when_gone(context)
        return context

    async def run_sync(self, fn: Callable[..., T], *args: Any) -> T:
        """Run a plain function in the worker thread of this replica's device, and wait for it.

        Other replicas run meanwhile. The function keeps this replica's context variables; collectives are not for
        threads. When the replica is cancelled, the cancellation is raised once ``fn`` has returned.

        Args:
            fn: the function.
            *args: its arguments.

        Returns:
            What it returns; what it raises is raised here.

        Raises:
            ReplicaContextError: the call is made outside this replica.
            TypeError: ``fn`` is no plain function.
        """
        refusal.check_current(self, "run_sync")
        check_plain(fn)
        if self._worker is None:
            return await arguments.run_in_any_thread(fn, *args)
        return await self._worker.run(fn, *args)

    def _describe(
        self, kind: kinds.Kind, op: ReduceOp | None, detail: Any, name: str | None, value: Any, frame: FrameType
    ) -> tuple[Signature, Any]:
        """Return the signature of a call and the leaves of its value (the leaf itself, where it is one)."""
        name = arguments.checked_name(name)
        structure, shapes, dtypes, types, leaves = describe(value)
        return (kind, op, detail, name, structure, shapes, dtypes, types, self._path(frame, name)), leaves

    def _path(self, frame: FrameType, name: str | None) -> Any:
        return call_path(frame) if self._member.group.paths and name is None else None

    def _issue(
        self,
        frame: FrameType,
        signature: Signature,
        leaves: Any,
        options: CommunicationOptions | None = None,
        out: OutBuffers | None = None,
    ) -> CollectiveHandle[Any]:
        member = self._member
        handle: CollectiveHandle[Any] = member.group.arrive(
            member, signature, frame.f_code, frame.f_lasti, leaves, options, out
        )
        return handle


_BARRIER: Signature = (kinds.BARRIER, None, None, None, None, None, None, None, None)
assert len(_BARRIER) == PATH + 1

ReplicaContext.__module__ = "aiodist"
