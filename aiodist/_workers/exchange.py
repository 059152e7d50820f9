"""Exchange: how a collective's values move between workers.

Small values travel in the records by which the workers agree on the step: then every worker has the values of all
replicas, and computes the result as one machine would (`Small`). Larger ones follow a plan (`_collectives.workers`), in
segments of 1 MiB: while one segment is in flight, the next is folded and the last is finished, so no operation holds up
the event loop for long. Long computations run in worker threads. Values on GPUs go through the host.

The engine reduces a segment if it gives the result that aiodist defines. Otherwise each worker receives its share of
the segment from all others and folds it, and all gather the shares. A row that needs no folding is sent without a copy.

If replicas have joined, each worker tells all others what each of its replicas contributes, and computes the result as
one machine would with the replicas that are left. A worker whose replicas have all joined need not know what the step
is. Only the last steps of uneven data are like that. What was rejected: neutral values in the engine's reduction (MIN
has none, and adding 0 changes -0.0).
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, chain, cycle, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafType, Spec
from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives.execution import executor
from aiodist._collectives.host import HostExecutor, in_native_order
from aiodist._collectives.kinds import ALL_TO_ALL, Collective
from aiodist._collectives.out import NO_OUTS
from aiodist._collectives.work import Work
from aiodist._collectives.workers import (
    Members,
    Rows,
    Transfer,
    WorkerPlan,
    check_integers,
    fits,
    joined,
    on_host,
    too_large,
)
from aiodist._core.ledger import Group
from aiodist._workers.layout import Layout
from aiodist._workers.record import FLOAT64, NO_FLAGS, Found, RecordBuffers
from aiodist._workers.session import Session
from aiodist._workers.transport import Array, Communicator, Parts, Request, Steps, as_bytes, in_thread
from aiodist_kernels import policy
from aiodist_kernels.pool import results as pool

if TYPE_CHECKING:
    from aiodist._runtime.rendezvous import Rendezvous

SEGMENT: Final = 1 << 20
_IN_FLIGHT: Final = 2
_FARTHEST: Final = 2**31 - 1
"""How far from the beginning of a buffer MPI 3 can put something, in bytes."""
_MOST_KEPT: Final = 1024
_ALIGNED: Final = 16


# What travels in the record.


class Small:
    """Values that fit into the record of every worker: where they lie in the records of a communicator.

    A Python int stands there as an int64, and behind it whether it fits.
    """

    def __init__(self, collective: Collective, members: Members, records: RecordBuffers) -> None:
        spec = collective.spec
        assert spec is not None
        self._collective, self._members = collective, members
        self._single, self._marks = spec.single, spec.marks
        self.shared = collective.kind.shared and not any(isinstance(mark, HostType) for mark in spec.marks)
        own = [_views(spec, records.payload, i) for i in range(len(members.own))]
        self._own = list(zip(chain.from_iterable(own), cycle(dtype is int for dtype in spec.dtypes), strict=False))
        self._nbytes = len(members.own) * sum(nbytes for *_, nbytes in _fields(spec))
        views = {
            position: _views(spec, payload, i)
            for payload, ids in zip(records.payloads, members.ids, strict=True)
            for i, position in enumerate(ids)
        }
        rows = [views[position] for position in range(members.replicas)]
        self._all: list[Any] = [row[0] for row in rows] if spec.single else rows
        self._has_scalars = any(mark in (LeafType.PYTHON_NUMBER, LeafType.NUMPY_SCALAR) for mark in spec.marks)
        self._executors: dict[Any, Any] = {}

    @staticmethod
    def fits(collective: Collective, members: Members, records: RecordBuffers) -> bool:
        """Return whether the values have a size that is known, and small enough on every worker."""
        spec = collective.spec
        if spec is None or collective.kind is ALL_TO_ALL:
            return False
        for shape, dtype, mark in zip(*spec[:3], strict=True):
            known = None not in shape and (isinstance(dtype, type) or dtype.kind not in "USO")
            if not known or mark == LeafType.INDEXED_SLICES or isinstance(mark, DeviceType):
                return False
        return (
            max(map(len, members.ids)) * sum(_padded(nbytes) for _, _, nbytes in _fields(spec)) <= records.payload.size
        )

    def write(self, values: Sequence[Any]) -> int:
        """Put what the local replicas contribute into this worker's record; return how many bytes that is."""
        leaves: Iterable[Any] = values if self._single else chain.from_iterable(values)
        for (view, is_int), leaf in zip(self._own, leaves, strict=True):
            if is_int:
                view[:] = (leaf, 1) if fits(leaf) else 0
            else:
                view[...] = leaf
        return self._nbytes

    def take(self, slot: Rendezvous, found: Found) -> Any:
        """Return what comes of the values in all records on one machine, for the local replicas.

        Raises:
            OverflowError: a Python int that a replica contributed, or that is the result, does not fit int64.
        """
        made = self._executors.get(found.flags)
        if made is None:
            made = executor(self._collective, self._members.replicas, (), accumulate_of(found))
            self._executors[found.flags] = made
        own = self._members.own
        values = list(map(self._as_contributed, self._all)) if self._has_scalars else self._all
        result: Any = made.run_into(values, _buffers(slot, own)) if slot.outs else made.run(values)
        if self._has_scalars:  # all results: what one worker raises, all do
            check_integers(result)
        slot.shared = self.shared
        if not self.shared:
            result = [result[position] for position in own]
        over = slot.request.over_workers
        return result if over is None else over.finish(slot.values, result)

    def _as_contributed(self, row: Any) -> Any:
        leaves = zip((row,) if self._single else row, self._marks, strict=True)
        found = [view if mark not in _SCALARS else _scalar(view, mark) for view, mark in leaves]
        return found[0] if self._single else found


_SCALARS: Final = (LeafType.PYTHON_NUMBER, LeafType.NUMPY_SCALAR)


def _scalar(view: Array, mark: Any) -> Any:
    """Return the number that stands in a record."""
    if mark == LeafType.NUMPY_SCALAR:
        return view[()]
    if not view.ndim:
        return view.item()
    number, does_fit = view.tolist()
    if not does_fit:
        raise too_large()
    return number


def _fields(spec: Spec) -> Iterator[tuple[Any, Any, int]]:
    """Yield shape, dtype and padded bytes of each leaf of a value as it stands in a record."""
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        native = np.dtype(dtype).newbyteorder("=")
        known: Any = (2,) if dtype is int else shape
        yield known, native, _padded(native.itemsize * math.prod(known))


def _views(spec: Spec, payload: Array, index: int) -> list[Array]:
    """Return the places of a replica's leaves in a payload, each aligned."""
    fields = list(_fields(spec))
    sizes = [nbytes for *_, nbytes in fields]
    begins = accumulate(sizes, initial=index * sum(sizes))
    return [np.ndarray(shape, dtype, payload, at) for (shape, dtype, _), at in zip(fields, begins, strict=False)]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class Moving:
    """Moves the values of a strategy's collectives; plans are kept, since most calls come again."""

    def __init__(self, layout: Layout, *, ordered: bool) -> None:
        self._layout = layout
        self._ordered = ordered
        self._all = Members(layout.rank, layout.ids)
        self._members_of = lru_cache(maxsize=_MOST_KEPT)(self._members_of_group)
        self._plan_of = lru_cache(maxsize=_MOST_KEPT)(partial(WorkerPlan, ordered=ordered))

    def _members_of_group(self, replica_ids: tuple[int, ...]) -> Members:
        """Return the members of a group by worker, by their ids in the group."""
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
        """Return how a slot's values travel in the records; or how they are probably moved behind them.

        Neither where there are none. Those on GPUs are to be fetched first.
        """
        if slot.request.collective.spec is None or slot.request.on_devices:
            return None, None
        plan = self._plan(slot, slot.options.accumulate)
        several = plan.reductions and max(map(len, plan.members.ids)) > 1  # summed on each worker, unless ordered
        if (
            session.records.in_full
            and Small.fits(plan.collective, plan.members, session.records)
            and (self._ordered or not several)
        ):
            return Small(plan.collective, plan.members, session.records), None
        return None, plan

    def move(self, session: Session, slot: Rendezvous, found: Found, transfer: Transfer | None) -> Steps[Any]:
        """Move the values of a slot that all workers have agreed on, and may have begun; return the result."""
        request, accumulate_in = slot.request, accumulate_of(found)
        slot.shared = True
        if request.collective.spec is None:
            return None
        if transfer is None or transfer.plan.accumulate != accumulate_in:
            transfer = Transfer(self._plan(slot, accumulate_in), (yield from self._on_host(slot)))
        plan = transfer.plan
        result = yield from carry_out(transfer, session.communicator)
        for buffers in _buffers(slot, range(len(slot.group.members))).values() if not request.on_devices else ():
            for buffer, leaf in zip(buffers, result if isinstance(result, list) else [result], strict=True):
                buffer[...] = leaf
        if request.over_workers is None and not request.on_devices:
            slot.shared = plan.shared
            return plan.hand_out(result)
        return (yield from self._handed_out(slot, result))

    def gather(self, session: Session, slot: Rendezvous | None) -> Steps[Any]:
        """Tell all workers what each replica contributes that is there; return what comes of it.

        The slot is None where all of this worker's replicas have joined.
        """
        own: dict[int, Any] = {}
        accumulate_in = ""
        if slot is not None:
            accumulate_in = slot.options.accumulate
            values = yield from self._on_host(slot)
            has_value = slot.request.collective.spec is not None
            there = [member for member in slot.group.members if member.position not in slot.absent]
            own = {m.replica_id: in_native_order(values[m.position]) if has_value else None for m in there}
        told = yield from gather_objects(session.communicator, (accumulate_in, own))
        if slot is None:
            return None
        ids, collective = slot.group.key[0], _collective(slot)
        by_id = {replica_id: value for _, values in told for replica_id, value in values.items()}
        absent = tuple(position for position, replica_id in enumerate(ids) if replica_id not in by_id)
        slot.shared = True
        collective.check_present(absent)
        if collective.spec is None:
            return None
        if slot.request.on_devices:
            collective = on_host(collective)
        made: Any = executor(collective, len(ids), absent, next(found for found, _ in told if found))
        outs = {} if slot.request.on_devices else _buffers(slot, [member.rank for member in slot.group.members])
        result = yield from _on_one_machine(made, [by_id.get(replica_id) for replica_id in ids], outs)
        if slot.request.over_workers is None:
            slot.shared = made.shared
            if not made.shared:
                result = [result[member.rank] for member in slot.group.members]
        return (yield from self._handed_out(slot, result))

    def _handed_out(self, slot: Rendezvous, result: Any) -> Steps[Any]:
        """Return a result as this worker's replicas get it."""
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
        """Return what the local replicas contribute; values on GPUs as they are on the host, each by itself."""
        if not slot.request.on_devices:
            return contributed(slot)
        from aiodist._collectives.device import to_host  # loaded where there are arrays on GPUs

        work = to_host(slot.request.collective, slot.values, self._devices_of(slot.group))
        return (yield from in_thread(work.carry_out))

    def _devices_of(self, group: Group) -> tuple[str, ...]:
        own, devices = self._layout.own, self._layout.devices[self._layout.rank]
        return tuple(devices[own.index(member.replica_id)] for member in group.members)

    def begin_for_all(self, collective: Collective, accumulate_in: Any, values: Sequence[Any]) -> Transfer:
        """Take values that all replicas contribute."""
        return Transfer(self._plan_of(collective, self._all, accumulate_in), values)


class Agreed(NamedTuple):
    """A call outside of replicas that all workers make: what moves its values."""

    communicator: Communicator
    accumulate: Any  # what the first worker says
    moving: Moving

    def move(self, collective: Collective, values: Sequence[Any]) -> Steps[Any]:
        """Move values that all replicas contribute, by local position; return the result, on the host."""
        return carry_out(self.moving.begin_for_all(collective, self.accumulate, values), self.communicator)

    def gather(self, own: Any) -> Steps[list[Any]]:
        """Return what each worker has, by rank."""
        return gather_objects(self.communicator, own)


def _collective(slot: Rendezvous) -> Collective:
    over = slot.request.over_workers
    return slot.request.collective if over is None else over.collective


def contributed(slot: Rendezvous) -> Sequence[Any]:
    """Return what the local replicas contribute to a slot."""
    over = slot.request.over_workers
    return slot.values if over is None else over.contribute(slot.values)


def _buffers(slot: Rendezvous, places: Sequence[int]) -> dict[int, Any]:
    """Return the replicas' own buffers for the result, where there are any; by the places of local positions."""
    return {places[position]: out.leaves for position, out in (slot.outs or {}).items()}


def flags_of(options: CommunicationOptions) -> int:
    """Return what the record says of a step's options."""
    return FLOAT64 if options.accumulate == "float64" else NO_FLAGS


def accumulate_of(found: Found) -> Any:
    """Return the accumulator that the records have said."""
    return "float64" if found.flags & FLOAT64 else "native"


# What is moved.


def carry_out(transfer: Transfer, communicator: Communicator) -> Steps[Any]:
    """Move the values of a step; return the result, on the host."""
    for rows in transfer.rows:
        yield from _reduce(rows, communicator)
    if transfer.plan.pieces:
        transfer.take_parts((yield from _exchange(transfer, communicator)))
    made = transfer.plan.on_one_machine
    if made is not None:
        values = transfer.all_values((yield from gather_objects(communicator, transfer.given)))
        result = transfer.as_they_lie(values)
        transfer.take_gathered(result if result is not None else (yield from _on_one_machine(made, values)))
    return transfer.result()


def _on_one_machine(made: HostExecutor, values: Sequence[Any], outs: Mapping[int, Any] = NO_OUTS) -> Steps[Any]:
    """Return what comes of the values of all replicas, by position, on one machine.

    Raises:
        OverflowError: a Python int among them, or of what comes out, does not fit int64; every worker finds that.
    """
    check_integers(values)
    result: Any = made.run_into(values, outs)
    if isinstance(result, Work):
        result = yield from in_thread(result.carry_out)
    check_integers(result)
    return result


def _reduce(rows: Rows, communicator: Communicator) -> Steps[None]:
    """Reduce segment by segment, of which a few are on their way."""
    size, step = rows.reduction.size, SEGMENT // rows.reduction.dtype.itemsize
    if 0 < size <= step:
        yield from _reduce_segment(rows, communicator, 0, size)
    else:
        ends = ((begin, min(begin + step, size)) for begin in range(0, size, step))
        yield from _in_turns((_reduce_segment(rows, communicator, *each) for each in ends), communicator.depth)


def _reduce_segment(rows: Rows, communicator: Communicator, begin: int, end: int) -> Steps[None]:
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
    """Fold this worker's rows; of several, each worker's share behind the other."""
    count = rows.reduction.own_rows
    for low, high in pairwise(accumulate(shares, initial=begin)):
        rows.fold(low, high, out[(low - begin) * count : (high - begin) * count])


def _exchange(transfer: Transfer, communicator: Communicator) -> Steps[Array]:
    """Return the bytes for this worker, of all by rank."""
    counts = transfer.plan.counts  # of what goes, and of what comes
    send = yield from _by_cost(2 * sum(counts), transfer.parts)
    whole = np.empty(sum(counts), np.uint8)
    step = max(1, SEGMENT // communicator.size)
    yield from _in_turns(
        _waiting(communicator.ialltoallv(_segment(send, counts, at, step), _segment(whole, counts, at, step)))
        for at in range(0, transfer.plan.most, step)
    )
    return whole


def _gather_bytes(communicator: Communicator, own: Array, sizes: Sequence[int]) -> Steps[list[Array]]:
    """Return the bytes of all workers, by rank, who have so many each."""
    givers = [rank for rank, size in enumerate(sizes) if size]
    if len(givers) == 1 < len(sizes) or sum(sizes) > _FARTHEST:
        parts = [own if rank == communicator.rank else np.empty(size, np.uint8) for rank, size in enumerate(sizes)]
        for root in givers:
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
    """Return what each worker has, by rank.

    It is pickled, without its arrays, which are moved from where they lie and read where they come to.
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
    """Return what another worker has pickled; its arrays are views of the bytes that have come."""
    pickled, sizes = pickle.loads(head.data)  # noqa: S301  (the engine's data path is trusted)
    begins = accumulate(map(_padded, sizes), initial=0)
    return pickle.loads(pickled, buffers=[body[at : at + size] for at, size in zip(begins, sizes, strict=False)])  # noqa: S301


def _by_cost(nbytes: int, fn: Callable[..., Any], *args: Any) -> Steps[Any]:
    """Call a function that takes as long as moving so many bytes, in a thread where that would hold up the loop."""
    return (yield from in_thread(fn, *args)) if policy.blocks(nbytes) else fn(*args)


def _segment(whole: Array, sizes: Sequence[int], at: int, step: int) -> Parts:
    """Return how much of each part is in a segment, and where that begins."""
    places = [begin + min(at, size) for begin, size in zip(Parts(whole, sizes).begins, sizes, strict=True)]
    return Parts(whole, [min(step, max(0, size - at)) for size in sizes], places)


def _in_turns(all_steps: Iterator[Steps[None]], most: int = _IN_FLIGHT) -> Steps[None]:
    """Take steps of which a few are under way, always the oldest first: so every worker begins them in one order."""
    under_way: deque[tuple[Steps[None], Request]] = deque()
    while True:
        steps = next(all_steps, None) if len(under_way) < most else None
        if steps is None:
            if not under_way:
                return
            steps, request = under_way.popleft()
            yield request
        with suppress(StopIteration):
            under_way.append((steps, next(steps)))


def _waiting(request: Request) -> Steps[None]:
    yield request
