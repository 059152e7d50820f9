"""Exchange: how a collective's values move between workers.

Small values travel in the records by which the workers agree on a step. Every worker then has the values of all
replicas, and computes the result as one machine would (`Small`). Larger values follow a plan (`_collectives.workers`),
in segments of 1 MiB: while one segment is in flight, the next is folded and the last is finished, so no operation holds
up the event loop for long. Long computations run in worker threads. Values on GPUs go through the host.

The engine reduces a segment if its result is the one that aiodist defines. Otherwise each worker receives its share of
the segment from all others and folds it, and all gather the shares. A row that needs no folding is sent without a copy.

If replicas have joined, the workers gather the contributions of all replicas, and each computes the result as one
machine would with the replicas that are left. A worker whose replicas have all joined need not know what the step is.
This happens only in the last steps of uneven data. Rejected: neutral values in the engine's reduction (MIN has none,
and adding 0 changes -0.0).
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import in_native_order
from aiodist._arrays.leaves import LeafType, Spec
from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives.execution import executor
from aiodist._collectives.host import COST_FROM, HostExecutor
from aiodist._collectives.kinds import ALL_TO_ALL, Collective
from aiodist._collectives.out import NO_OUTS
from aiodist._collectives.work import Work
from aiodist._collectives.workers import (
    Members,
    Rows,
    Transfer,
    WorkerPlan,
    joined,
    on_host,
)
from aiodist._core.ledger import Group
from aiodist._workers.layout import Layout
from aiodist._workers.record import FLOAT64, NO_FLAGS, RecordBuffers
from aiodist._workers.session import Session
from aiodist._workers.transport import Array, Communicator, Parts, Request, Steps, as_bytes, in_thread
from aiodist_kernels import policy
from aiodist_kernels.pool import results as pool

if TYPE_CHECKING:
    from aiodist._runtime.rendezvous import Rendezvous

SEGMENT: Final = 1 << 20
_IN_FLIGHT: Final = 2
_LARGEST_DISPLACEMENT: Final = 2**31 - 1
"""The largest displacement in a buffer that MPI 3 supports, in bytes."""
_MOST_KEPT: Final = 1024
_ALIGNED: Final = 16


# Values in the record.


class Small:
    """Moves the values of one collective that fit into the records of a communicator.

    A Python int is stored as an int64, followed by 1 if it fits and else 0.
    """

    def __init__(self, plan: WorkerPlan, records: RecordBuffers) -> None:
        spec, members = plan.collective.spec, plan.members
        assert spec is not None
        self._plan = plan
        self._single, self._marks = spec.single, spec.marks
        own = [_views(spec, records.payload, i) for i in range(len(members.own))]
        self._own = list(chain.from_iterable(own))
        self._has_ints = int in spec.dtypes
        self._positions = members.own
        self._nbytes = len(members.own) * sum(nbytes for *_, nbytes in _fields(spec))
        views = {
            position: _views(spec, payload, i)
            for payload, ids in zip(records.payloads, members.ids, strict=True)
            for i, position in enumerate(ids)
        }
        rows = [views[position] for position in range(members.replicas)]
        self._all: list[Any] = [row[0] for row in rows] if spec.single else rows
        self._has_scalars = any(mark in _SCALARS for mark in spec.marks)
        self._executors: dict[Any, Any] = {}

    @staticmethod
    def fits(plan: WorkerPlan, records: RecordBuffers) -> bool:
        """Return whether the values' size is known, and small enough on every worker."""
        spec = plan.collective.spec
        if spec is None or plan.collective.kind is ALL_TO_ALL or not records.in_full:
            return False
        for shape, dtype, mark in zip(*spec[:3], strict=True):
            known = None not in shape and (isinstance(dtype, type) or dtype.kind not in "USO")
            if not known or mark == LeafType.INDEXED_SLICES or isinstance(mark, DeviceType):
                return False
        most_replicas, nbytes = max(map(len, plan.members.ids)), sum(nbytes for *_, nbytes in _fields(spec))
        is_small = plan.members.replicas * nbytes < COST_FROM  # so that it is reduced at once, without a thread
        return is_small and most_replicas * nbytes <= records.payload.size

    def write(self, values: Sequence[Any]) -> int:
        """Write the local replicas' contributions into this worker's record; return how many bytes they take."""
        leaves: Iterable[Any] = values if self._single else chain.from_iterable(values)
        if self._has_ints:
            leaves = [((leaf, 1) if _fits_int64(leaf) else 0) if type(leaf) is int else leaf for leaf in leaves]
        for view, leaf in zip(self._own, leaves, strict=True):
            view[...] = leaf
        return self._nbytes

    def take(self, slot: Rendezvous, flags: int) -> Any:
        """Return the local replicas' results of the values in all records.

        Raises:
            OverflowError: a Python int that a replica contributed, or that is the result, does not fit int64.
        """
        made = self._executors.get(flags)
        if made is None:
            made = executor(self._plan.collective, self._plan.members.replicas, (), accumulate_of(flags))
            self._executors[flags] = made
        values = list(map(self._with_scalars, self._all)) if self._has_scalars else self._all
        result: Any = made.run_into(values, _buffers(slot, self._positions)) if slot.outs else made.run(values)
        if self._has_scalars:
            _check_integers(result)  # all results, so that every worker raises the error
        slot.shared = self._plan.shared
        if not slot.shared:
            result = [result[position] for position in self._positions]
        over = slot.request.over_workers
        return result if over is None else over.finish(slot.values, result)

    def _with_scalars(self, row: Any) -> Any:
        leaves = zip((row,) if self._single else row, self._marks, strict=True)
        found = [view if mark not in _SCALARS else _scalar(view, mark) for view, mark in leaves]
        return found[0] if self._single else found


_SCALARS: Final = (LeafType.PYTHON_NUMBER, LeafType.NUMPY_SCALAR)


def _scalar(view: Array, mark: Any) -> Any:
    """Return a number from a record."""
    if mark == LeafType.NUMPY_SCALAR:
        return view[()]
    if not view.ndim:
        return view.item()
    number, does_fit = view.tolist()
    if not does_fit:
        raise _too_large()
    return number


def _check_integers(value: Any) -> None:
    """Check that any Python ints in a nest of lists and tuples fit int64; raise an OverflowError otherwise."""
    if isinstance(value, (list, tuple)):
        for each in value:
            _check_integers(each)
    elif type(value) is int and not _fits_int64(value):
        raise _too_large()


def _fits_int64(number: int) -> bool:
    """Return whether an int fits int64."""
    return -(2**63) <= number < 2**63


def _too_large() -> OverflowError:
    """Return the error for a Python int that does not fit."""
    return OverflowError(
        "over several workers Python ints, and what collectives make of them, must fit int64, and one does not; "
        "pass floats or arrays"
    )


def _fields(spec: Spec) -> Iterator[tuple[Any, Any, int]]:
    """Yield the shape, dtype and padded size in bytes of each leaf as it is stored in a record."""
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        native = np.dtype(dtype).newbyteorder("=")
        known: Any = (2,) if dtype is int else shape
        yield known, native, _padded(native.itemsize * math.prod(known))


def _views(spec: Spec, payload: Array, index: int) -> list[Array]:
    """Return views of a replica's leaves in a payload, each aligned."""
    fields = list(_fields(spec))
    sizes = [nbytes for *_, nbytes in fields]
    begins = accumulate(sizes, initial=index * sum(sizes))
    return [np.ndarray(shape, dtype, payload, at) for (shape, dtype, _), at in zip(fields, begins, strict=False)]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class Moving:
    """Moves the values of a strategy's collectives; plans are cached, since most calls are repeated."""

    def __init__(self, layout: Layout, *, ordered: bool) -> None:
        self._layout = layout
        self._ordered = ordered
        self._all = Members(layout.rank, layout.ids)
        self._members_of = lru_cache(maxsize=_MOST_KEPT)(self._members_of_group)
        self._plan_of = lru_cache(maxsize=_MOST_KEPT)(partial(WorkerPlan, ordered=ordered))

    def _members_of_group(self, replica_ids: tuple[int, ...]) -> Members:
        """Return the members of a group by worker, as positions in the group."""
        layout = self._layout
        ranks: dict[int, list[int]] = {worker: [] for worker in layout.workers_of(replica_ids)}
        for rank, replica_id in enumerate(replica_ids):
            ranks[layout.worker_of(replica_id)].append(rank)
        return Members(list(ranks).index(layout.rank), tuple(map(tuple, ranks.values())))

    def _plan(self, slot: Rendezvous, accumulate_in: Any) -> WorkerPlan:
        group = slot.group
        members = self._all if group.is_root else self._members_of(group.key[0])
        return self._plan_of(_collective(slot), members, accumulate_in)

    def ways(self, session: Session, slot: Rendezvous) -> tuple[Small | None, WorkerPlan | None]:
        """Return what moves a slot's values in the records, or the plan that probably moves them afterwards.

        Both are None if there are no values, or if they are on GPUs.
        """
        if slot.request.collective.spec is None or slot.request.on_devices:
            return None, None
        plan = self._plan(slot, slot.options.accumulate)
        folds_first = plan.reductions and max(map(len, plan.members.ids)) > 1  # on each worker
        if (self._ordered or not folds_first) and Small.fits(plan, session.records):
            return Small(plan, session.records), None
        return None, plan

    def move(self, session: Session, slot: Rendezvous, flags: int, transfer: Transfer | None) -> Steps[Any]:
        """Move the values of a slot that all workers have agreed on; return the result.

        ``transfer`` may have been prepared before the agreement.
        """
        request, accumulate_in = slot.request, accumulate_of(flags)
        slot.shared = True
        if request.collective.spec is None:
            return None
        if transfer is None or transfer.plan.accumulate != accumulate_in:
            transfer = Transfer(self._plan(slot, accumulate_in), (yield from self._on_host(slot)))
        plan = transfer.plan
        result = yield from carry_out(transfer, session.communicator)
        if request.over_workers is not None or request.on_devices:
            return (yield from self._handed_out(slot, result))
        if slot.outs is not None:
            for out in slot.outs.values():
                for buffer, leaf in zip(out.leaves, result if isinstance(result, list) else [result], strict=True):
                    buffer[...] = leaf
        slot.shared = plan.shared
        return plan.results_by_replica(result)

    def gather(self, session: Session, slot: Rendezvous | None) -> Steps[Any]:
        """Gather the contributions of all replicas that have not joined; return the result.

        The slot is None if all of this worker's replicas have joined.
        """
        own: dict[int, Any] = {}
        accumulate_in = ""
        if slot is not None:
            accumulate_in = slot.options.accumulate
            values = yield from self._on_host(slot)
            has_value = slot.request.collective.spec is not None
            present = [member for member in slot.group.members if member.position not in slot.absent]
            own = {m.replica_id: in_native_order(values[m.position]) if has_value else None for m in present}
        gathered = yield from gather_objects(session.communicator, (accumulate_in, own))
        if slot is None:
            return None
        ids, collective = slot.group.key[0], _collective(slot)
        by_id = {replica_id: value for _, values in gathered for replica_id, value in values.items()}
        absent = tuple(position for position, replica_id in enumerate(ids) if replica_id not in by_id)
        slot.shared = True
        collective.check_present(absent)
        if collective.spec is None:
            return None
        if slot.request.on_devices:
            collective = on_host(collective)
        made: Any = executor(collective, len(ids), absent, next(first for first, _ in gathered if first))
        outs = {} if slot.request.on_devices else _buffers(slot, [member.rank for member in slot.group.members])
        result = yield from _on_one_machine(made, [by_id.get(replica_id) for replica_id in ids], outs)
        if slot.request.over_workers is None:
            slot.shared = made.shared
            if not made.shared:
                result = [result[member.rank] for member in slot.group.members]
        return (yield from self._handed_out(slot, result))

    def _handed_out(self, slot: Rendezvous, result: Any) -> Steps[Any]:
        """Return a result in the form that this worker's replicas get."""
        request = slot.request
        if request.over_workers is not None:
            return request.over_workers.finish(slot.values, result)
        if not request.on_devices:
            return result
        from aiodist._collectives.device import from_host  # loaded where there are arrays on GPUs

        slot.shared = False
        outs = _buffers(slot, range(len(slot.group.members)))
        work = from_host(request.collective, slot.values, result, self._devices_of(slot.group), outs)
        return (yield from in_thread(work.carry_out))

    def _on_host(self, slot: Rendezvous) -> Steps[Any]:
        """Return the local replicas' contributions, on the host."""
        if not slot.request.on_devices:
            return contributed(slot)
        from aiodist._collectives.device import to_host  # loaded where there are arrays on GPUs

        work = to_host(slot.request.collective, slot.values, self._devices_of(slot.group))
        return (yield from in_thread(work.carry_out))

    def _devices_of(self, group: Group) -> tuple[str, ...]:
        own, devices = self._layout.own, self._layout.devices[self._layout.rank]
        return tuple(devices[own.index(member.replica_id)] for member in group.members)

    def begin_for_all(self, collective: Collective, accumulate_in: Any, values: Sequence[Any]) -> Transfer:
        """Return the transfer of values to which all replicas contribute."""
        return Transfer(self._plan_of(collective, self._all, accumulate_in), values)


class Agreed(NamedTuple):
    """Moves the values of a call outside of replicas that all workers make."""

    communicator: Communicator
    accumulate: Any  # as worker 0 has it
    moving: Moving

    def move(self, collective: Collective, values: Sequence[Any]) -> Steps[Any]:
        """Move the local replicas' contributions; return the result, on the host."""
        return carry_out(self.moving.begin_for_all(collective, self.accumulate, values), self.communicator)

    def gather(self, own: Any) -> Steps[list[Any]]:
        """Gather an object from each worker, by rank."""
        return gather_objects(self.communicator, own)


def _collective(slot: Rendezvous) -> Collective:
    over = slot.request.over_workers
    return slot.request.collective if over is None else over.collective


def contributed(slot: Rendezvous) -> Sequence[Any]:
    """Return the local replicas' contributions to a slot."""
    over = slot.request.over_workers
    return slot.values if over is None else over.contribute(slot.values)


def _buffers(slot: Rendezvous, keys: Sequence[int]) -> dict[int, Any]:
    """Return the replicas' own buffers for the result, if any; ``keys`` has a key for each local position."""
    return {keys[position]: out.leaves for position, out in (slot.outs or {}).items()}


def flags_of(options: CommunicationOptions) -> int:
    """Return a step's options as flags of its record."""
    return FLOAT64 if options.accumulate == "float64" else NO_FLAGS


def accumulate_of(flags: int) -> Any:
    """Return the accumulator from the flags of a step."""
    return "float64" if flags & FLOAT64 else "native"


# Transfers.


def carry_out(transfer: Transfer, communicator: Communicator) -> Steps[Any]:
    """Carry out a transfer; return the result, on the host."""
    for rows in transfer.rows:
        size, step = rows.reduction.size, SEGMENT // rows.reduction.dtype.itemsize
        if size > step:  # segment by segment, with a few in flight
            ends = ((begin, min(begin + step, size)) for begin in range(0, size, step))
            yield from _in_turns((_reduce(rows, communicator, *each) for each in ends), communicator.depth)
        elif size:
            yield from _reduce(rows, communicator, 0, size)
    if transfer.plan.pieces:
        transfer.take_parts((yield from _exchange(transfer, communicator)))
    made = transfer.plan.on_one_machine
    if made is not None:
        values = transfer.all_values((yield from gather_objects(communicator, transfer.given)))
        result = transfer.joined_in_place(values)
        transfer.take_gathered(result if result is not None else (yield from _on_one_machine(made, values)))
    return transfer.result()


def _on_one_machine(made: HostExecutor, values: Sequence[Any], outs: Mapping[int, Any] = NO_OUTS) -> Steps[Any]:
    """Return the result of all replicas' values, by position, as one machine computes it.

    Raises:
        OverflowError: a Python int in the values or the result does not fit int64; every worker raises it.
    """
    _check_integers(values)
    result: Any = made.run_into(values, outs)
    if isinstance(result, Work):
        result = yield from in_thread(result.carry_out)
    _check_integers(result)
    return result


def _reduce(rows: Rows, communicator: Communicator, begin: int, end: int) -> Steps[None]:
    """Reduce a segment."""
    reduction = rows.reduction
    dtype, size, count = reduction.dtype, end - begin, reduction.own_rows
    by_engine = not reduction.ordered and communicator.reduces(reduction.op, dtype)
    shares = [size] if by_engine else _shares(size, communicator.size)
    source = rows.own(begin, end)
    if source is None:
        source = pool.empty((size * count,), dtype)
        yield from _by_cost(reduction.cost * size // reduction.size, _fold, rows, begin, shares, source)
    total = rows.room(begin, end)
    if by_engine:
        yield communicator.iallreduce(reduction.op, source, total)
    else:  # each worker gets its share of everybody's rows
        share, item, rows_of = shares[communicator.rank], dtype.itemsize, map(reduction.rows_of, range(len(shares)))
        received = pool.empty((share * len(reduction.order),), dtype)
        to = Parts(as_bytes(source), [each * count * item for each in shares])
        of = Parts(as_bytes(received), [share * each * item for each in rows_of])
        yield communicator.ialltoallv(to, of)
        folded = reduction.combine(list(received.reshape(-1, share))) if share else received
        yield communicator.iallgatherv(as_bytes(folded), Parts(as_bytes(total), [each * item for each in shares]))
    rows.finish(begin, end, total)


def _shares(size: int, workers: int) -> list[int]:
    share = -(-size // workers)
    return [max(0, min(share, size - worker * share)) for worker in range(workers)]


def _fold(rows: Rows, begin: int, shares: Sequence[int], out: Array) -> None:
    """Fold this worker's rows, one receiver's share after the other."""
    count = rows.reduction.own_rows
    for low, high in pairwise(accumulate(shares, initial=begin)):
        rows.fold(low, high, out[(low - begin) * count : (high - begin) * count])


def _exchange(transfer: Transfer, communicator: Communicator) -> Steps[Array]:
    """Exchange the parts of an all_to_all; return those for this worker, by rank, as bytes."""
    counts = transfer.plan.counts  # the same in both directions
    send = yield from _by_cost(2 * sum(counts), transfer.parts)
    whole = np.empty(sum(counts), np.uint8)
    step = max(1, SEGMENT // communicator.size)
    yield from _in_turns(
        _waiting(communicator.ialltoallv(_segment(send, counts, at, step), _segment(whole, counts, at, step)))
        for at in range(0, transfer.plan.most, step)
    )
    return whole


def _gather_bytes(communicator: Communicator, own: Array, sizes: Sequence[int]) -> Steps[list[Array]]:
    """Gather the bytes of all workers, whose sizes are given by rank."""
    roots = [rank for rank, size in enumerate(sizes) if size]
    if len(roots) == 1 < len(sizes) or sum(sizes) > _LARGEST_DISPLACEMENT:
        parts = [own if rank == communicator.rank else np.empty(size, np.uint8) for rank, size in enumerate(sizes)]
        for root in roots:
            segments = (parts[root][at : at + SEGMENT] for at in range(0, sizes[root], SEGMENT))
            yield from _in_turns(_waiting(communicator.ibcast(segment, root)) for segment in segments)
        return parts
    whole, step = np.empty(sum(sizes), np.uint8), max(1, SEGMENT // communicator.size)
    yield from _in_turns(
        _waiting(communicator.iallgatherv(own[at : at + step], _segment(whole, sizes, at, step)))
        for at in range(0, max(sizes), step)
    )
    return Parts(whole, sizes).views()


def gather_objects(communicator: Communicator, own: Any) -> Steps[list[Any]]:
    """Gather an object from each worker, by rank.

    Objects are pickled without their arrays, which are sent and received in place.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(own, 5, buffer_callback=buffers.append)
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    head = np.frombuffer(pickle.dumps((pickled, [array.size for array in arrays])), np.uint8)
    gaps = [np.zeros(-array.size % _ALIGNED, np.uint8) for array in arrays]
    pieces = [piece for pair in zip(arrays, gaps, strict=True) for piece in pair if piece.size]
    nbytes = sum(piece.size for piece in pieces)
    body = yield from _by_cost(2 * nbytes if len(pieces) > 1 else 0, joined, pieces)

    lengths = np.empty((communicator.size, 2), np.int64)
    yield communicator.iallgather(as_bytes(np.array([len(head), nbytes])), as_bytes(lengths))
    heads = yield from _gather_bytes(communicator, head, lengths[:, 0].tolist())
    bodies = yield from _gather_bytes(communicator, body, lengths[:, 1].tolist())
    return list(map(_unpickled, heads, bodies))


def _unpickled(head: Array, body: Array) -> Any:
    """Return another worker's object; its arrays are views of the received bytes."""
    pickled, sizes = pickle.loads(head.data)  # noqa: S301  (the engine's data path is trusted)
    begins = accumulate(map(_padded, sizes), initial=0)
    return pickle.loads(pickled, buffers=[body[at : at + size] for at, size in zip(begins, sizes, strict=False)])  # noqa: S301


def _by_cost(nbytes: int, fn: Callable[..., Any], *args: Any) -> Steps[Any]:
    """Call a function that costs as much as moving so many bytes, in a thread if that would hold up the loop."""
    return (yield from in_thread(fn, *args)) if policy.blocks(nbytes) else fn(*args)


def _segment(whole: Array, sizes: Sequence[int], at: int, step: int) -> Parts:
    """Return the segment of each part that begins at an offset in it."""
    begins = [begin + min(at, size) for begin, size in zip(Parts(whole, sizes).begins, sizes, strict=True)]
    return Parts(whole, [min(step, max(0, size - at)) for size in sizes], begins)


def _in_turns(all_steps: Iterator[Steps[None]], most: int = _IN_FLIGHT) -> Steps[None]:
    """Run steps with a few in flight, the oldest first, so that every worker begins operations in the same order."""
    in_flight: deque[tuple[Steps[None], Request]] = deque()
    while True:
        steps = next(all_steps, None) if len(in_flight) < most else None
        if steps is None:
            if not in_flight:
                return
            steps, request = in_flight.popleft()
            yield request
        with suppress(StopIteration):
            in_flight.append((steps, next(steps)))


def _waiting(request: Request) -> Steps[None]:
    yield request
