"""Exchange: what becomes of a collective's values over workers.

What is small travels in the records by which the workers agree on the step: everybody has the values of all replicas
then, and makes the result as one machine would (`Small`). The rest follows a plan (`_collectives.workers`), in segments
of 1 MiB: while one is on its way, the next is folded and the one before is finished, and no operation holds up the
event loop for long. What takes long by itself is done in worker threads. Values on GPUs go through the host.

An engine reduces a segment where it does so with our meaning. Else each worker is given a share of it from all others,
folds that, and all gather the shares. A row that needs no folding is sent from where it lies.

Where replicas have joined, each worker tells all others what each of its replicas contributes, and makes the result as
one machine would that had all the replicas that are there. A worker whose replicas have all joined does not know what
the step is, and need not. There are few such steps, the last ones of uneven data. What was rejected: neutral values in
the engine's reduction (for MIN there is none, and adding 0 to -0.0 changes it).
"""

from __future__ import annotations

import io
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafType, Spec
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import ALL_TO_ALL, Collective
from aiodist._collectives.work import Work
from aiodist._collectives.workers import Crossing, Members, Rows, WorkerPlan, bytes_of, joined
from aiodist._core.ledger import Group
from aiodist._workers.layout import Layout
from aiodist._workers.record import FLOAT64, PAYLOAD, Found, RecordBuffers
from aiodist._workers.session import Session
from aiodist._workers.transport import (
    Array,
    Communicator,
    Parts,
    Request,
    Steps,
    Threads,
    as_bytes,
)
from aiodist_kernels import policy
from aiodist_kernels.pool import results as pool

if TYPE_CHECKING:
    from aiodist._runtime.rendezvous import Rendezvous

SEGMENT: Final = 1 << 20
_IN_FLIGHT: Final = 2
_FARTHEST: Final = 2**31 - 1
"""How far from the beginning of a buffer MPI 3 can put something, in bytes."""
_MOST_KEPT: Final = 1024


# What travels in the record.


class Small:
    """Values that fit into the record of every worker: where they lie in the records of a communicator.

    Args:
        collective: what is asked for.
        members: who takes part.
        records: the records.

    Attributes:
        shared: one result serves all local replicas; else there is one for each, by local position.
    """

    def __init__(self, collective: Collective, members: Members, records: RecordBuffers) -> None:
        spec = collective.spec
        assert spec is not None
        self._collective, self._members, self._spec = collective, members, spec
        self.shared = collective.kind.shared and not any(isinstance(mark, HostType) for mark in spec.marks)
        self._own = [_views(spec, records.payload, i) for i in range(len(members.own))]
        views = {
            position: _views(spec, payload, i)
            for payload, ids in zip(records.payloads, members.ids, strict=True)
            for i, position in enumerate(ids)
        }
        rows = [views[position] for position in range(members.replicas)]
        self._all: list[Any] = [row[0] for row in rows] if spec.single else rows
        self._integers = [view for row in rows for view, dtype in zip(row, spec.dtypes, strict=True) if dtype is int]
        self._has_scalars = any(mark in _SCALARS for mark in spec.marks)
        self._runs: dict[Any, Callable[[Sequence[Any]], Any]] = {}

    @staticmethod
    def fits(collective: Collective, members: Members) -> bool:
        """Return whether the values have a size that is known, and small enough on every worker."""
        spec = collective.spec
        if spec is None or collective.kind is ALL_TO_ALL:
            return False
        for shape, dtype, mark in zip(*spec[:3], strict=True):
            known = None not in shape and (isinstance(dtype, type) or dtype.kind not in "USO")
            if not known or mark == LeafType.INDEXED_SLICES or isinstance(mark, DeviceType):
                return False
        return max(map(len, members.ids)) * sum(_padded(nbytes) for _, _, nbytes in _fields(spec)) <= PAYLOAD

    def write(self, values: Sequence[Any]) -> None:
        """Put what the local replicas contribute into this worker's record."""
        for value, views in zip(values, self._own, strict=True):
            for leaf, view in zip((value,) if self._spec.single else value, views, strict=True):
                try:
                    view[...] = leaf
                except OverflowError:
                    view[...] = _TOO_LARGE

    @property
    def is_whole(self) -> bool:
        """Whether the records hold all values; the exchange is complete. Integers may be too large."""
        return not (self._integers and any(view == _TOO_LARGE for view in self._integers))

    def take(self, slot: Rendezvous, found: Found) -> Any:
        """Return what comes of the values in all records on one machine, for the local replicas."""
        accumulate_in = accumulate_of(found)
        run = self._runs.get(accumulate_in)
        if run is None:
            made = executor(self._collective, self._members.replicas, (), accumulate_in)
            run = self._runs[accumulate_in] = made.run
        result: Any = run([self._as_contributed(row) for row in self._all] if self._has_scalars else self._all)
        slot.shared = self.shared
        if not self.shared:
            result = [result[position] for position in self._members.own]
        over = slot.request.over_workers
        if over is not None:
            return over.finish(slot.values, result)
        return _in_buffers(slot, result) if slot.outs else result

    def _as_contributed(self, row: Any) -> Any:
        leaves = zip((row,) if self._spec.single else row, self._spec.marks, strict=True)
        found = [
            view.item() if mark == LeafType.PYTHON_NUMBER else view[()] if mark == LeafType.NUMPY_SCALAR else view
            for view, mark in leaves
        ]
        return found[0] if self._spec.single else found


_SCALARS: Final = (LeafType.PYTHON_NUMBER, LeafType.NUMPY_SCALAR)
_TOO_LARGE: Final = -(2**63)
"""Stands for an integer that does not fit; then all values are moved otherwise."""


def _fields(spec: Spec) -> Iterator[tuple[Any, Any, int]]:
    """Yield shape, dtype and bytes of each leaf of a value as it stands in a record."""
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        native = np.dtype(dtype).newbyteorder("=")
        yield shape, native, native.itemsize * math.prod([size or 0 for size in shape])


def _views(spec: Spec, payload: Array, index: int) -> list[Array]:
    """Return the places of a replica's leaves in a payload, each aligned."""
    fields = list(_fields(spec))
    sizes = [_padded(nbytes) for _, _, nbytes in fields]
    begins = accumulate(sizes, initial=index * sum(sizes))
    return [np.ndarray(shape, dtype, payload, at) for (shape, dtype, _), at in zip(fields, begins, strict=False)]


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class Moving:
    """Moves the values of a strategy's collectives; plans are kept, since most calls come again.

    Attributes:
        threads: fold and copy what would hold up the event loop.
    """

    def __init__(self, layout: Layout, *, ordered: bool) -> None:
        self.threads = Threads()
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

    def _members(self, group: Group) -> Members:
        return self._all if group.is_root else self._members_of(group.key[0])

    def begin_for_all(self, collective: Collective, accumulate_in: Any, values: Sequence[Any]) -> Crossing:
        """Take values that all replicas contribute."""
        return Crossing(self._plan_of(collective, self._all, accumulate_in), values)

    def small(self, session: Session, slot: Rendezvous) -> Small | None:
        """Return how a slot's values travel in the records; None where they do not."""
        collective, members = _collective(slot), self._members(slot.group)
        if not session.records.in_full or not Small.fits(collective, members):
            return None
        several = max(map(len, members.ids)) > 1  # whose sums have the bits of sums of each worker's sum
        if several and not self._ordered and self._plan_of(collective, members, "native").reductions:
            return None
        return Small(collective, members, session.records)

    def plan(self, slot: Rendezvous) -> WorkerPlan | None:
        """Return how a slot's values are probably moved; None where there are none, or they lie on GPUs."""
        if slot.request.collective.spec is None or slot.request.on_devices:
            return None
        return self._plan_of(_collective(slot), self._members(slot.group), slot.options.accumulate)

    def move(self, session: Session, slot: Rendezvous, found: Found, crossing: Crossing | None) -> Steps[Any]:
        """Move the values of a slot that all workers have agreed on, and may have begun; return the result."""
        request, accumulate_in = slot.request, accumulate_of(found)
        slot.shared = True
        if request.collective.spec is None:
            return None
        if crossing is None or crossing.plan.accumulate != accumulate_in:
            plan = self._plan_of(_collective(slot), self._members(slot.group), accumulate_in)
            values = (yield from self._on_host(slot)) if request.on_devices else contributed(slot)
            crossing = Crossing(plan, values)
        plan = crossing.plan
        yield from _carry_out(crossing, session.communicator, self.threads)
        result = crossing.result()
        if request.over_workers is not None:
            return request.over_workers.finish(slot.values, result)
        slot.shared = plan.shared
        if request.on_devices:
            return (yield from self._on_gpus(slot, result))
        return plan.hand_out(_in_buffers(slot, result) if slot.outs else result)

    def gather(self, session: Session, slot: Rendezvous | None) -> Steps[Any]:
        """Tell all workers what each replica contributes that is there; return what comes of it.

        The slot is None where all of this worker's replicas have joined.
        """
        own: dict[int, Any] = {}
        accumulate_in = ""
        if slot is not None:
            accumulate_in = slot.options.accumulate
            values = (yield from self._on_host(slot)) if slot.request.on_devices else contributed(slot)
            has_value = slot.request.collective.spec is not None
            there = [member for member in slot.group.members if member.position not in slot.absent]
            own = {member.replica_id: values[member.position] if has_value else None for member in there}
        told = yield from gather_objects(session.communicator, (accumulate_in, own), self.threads)
        if slot is None:
            return None
        ids, request = slot.group.key[0], slot.request
        by_id = {replica_id: value for _, values in told for replica_id, value in values.items()}
        absent = tuple(position for position, replica_id in enumerate(ids) if replica_id not in by_id)
        collective = _collective(slot)
        slot.shared = True
        collective.check_present(absent)
        if collective.spec is None:
            return None
        on_host = collective._replace(spec=_without_devices(collective.spec)) if request.on_devices else collective
        made = executor(on_host, len(ids), absent, next(found for found, _ in told if found))
        result = made.run([by_id.get(replica_id) for replica_id in ids])
        if isinstance(result, Work):
            result = yield from self.threads.call(result.carry_out)
        if request.over_workers is not None:
            return request.over_workers.finish(slot.values, result)
        slot.shared = made.shared
        if not made.shared:
            result = [result[member.rank] for member in slot.group.members]
        if request.on_devices:
            return (yield from self._on_gpus(slot, result))
        return _in_buffers(slot, result)

    def _on_host(self, slot: Rendezvous) -> Steps[Any]:
        """Return values on GPUs as they are on the host, each by itself."""
        from aiodist._collectives.device import to_host  # loaded where there are arrays on GPUs

        devices = self._devices_of(slot.group)
        work = to_host(slot.request.collective, slot.values, devices)
        return (yield from self.threads.call(work.carry_out))

    def _on_gpus(self, slot: Rendezvous, result: Any) -> Steps[Any]:
        """Return a result on the GPUs that the values came from."""
        from aiodist._collectives.device import from_host

        outs = {position: out.leaves for position, out in (slot.outs or {}).items()}
        slot.shared = False
        devices = self._devices_of(slot.group)
        work = from_host(slot.request.collective, slot.values, result, devices, outs)
        return (yield from self.threads.call(work.carry_out))

    def _devices_of(self, group: Group) -> tuple[str, ...]:
        own, devices = self._layout.own, self._layout.devices[self._layout.rank]
        return tuple(devices[own.index(member.replica_id)] for member in group.members)


class Agreed(NamedTuple):
    """A call outside of replicas that all workers make: what moves its values."""

    communicator: Communicator
    accumulate: Any  # what the first worker says
    moving: Moving

    def move(self, collective: Collective, values: Sequence[Any]) -> Steps[Any]:
        """Move values that all replicas contribute, by local position; return the result, on the host."""
        crossing = self.moving.begin_for_all(collective, self.accumulate, values)
        yield from _carry_out(crossing, self.communicator, self.moving.threads)
        return crossing.result()

    def gather(self, own: Any) -> Steps[list[Any]]:
        """Return what each worker has, by rank."""
        return gather_objects(self.communicator, own, self.moving.threads)


def _collective(slot: Rendezvous) -> Collective:
    over = slot.request.over_workers
    return slot.request.collective if over is None else over.collective


def contributed(slot: Rendezvous) -> Sequence[Any]:
    """Return what the local replicas contribute to a slot."""
    over = slot.request.over_workers
    return slot.values if over is None else over.bring(slot.values)


def _in_buffers(slot: Rendezvous, result: Any) -> Any:
    """Copy a result into the replicas' own buffers, where there are any; return it."""
    for position, out in (slot.outs or {}).items():
        own = result if slot.shared else result[position]
        for buffer, leaf in zip(out.leaves, own if isinstance(own, list) else [own], strict=True):
            buffer[...] = leaf
    return result


def _without_devices(spec: Spec) -> Spec:
    return spec._replace(marks=tuple(None if isinstance(m, (DeviceType, HostType)) else m for m in spec.marks))


def accumulate_of(found: Found) -> Any:
    """Return the accumulator that the records have said."""
    return "float64" if found.flags & FLOAT64 else "native"


# What is moved.


def _carry_out(crossing: Crossing, communicator: Communicator, threads: Threads) -> Steps[None]:
    """Move the values of a step, and make the results of them."""
    for rows in crossing.rows:
        yield from _reduce(rows, communicator, threads)
    if crossing.plan.pieces:
        crossing.take_parts((yield from _exchange(crossing, communicator, threads)))
    if crossing.given:
        crossing.take_gathered((yield from gather_objects(communicator, crossing.given, threads)))


def _reduce(rows: Rows, communicator: Communicator, threads: Threads) -> Steps[None]:
    """Reduce segment by segment, of which a few are on their way."""
    size, step = rows.reduction.size, SEGMENT // rows.reduction.dtype.itemsize
    if 0 < size <= step:
        yield from _reduce_segment(rows, 0, size, communicator, threads)
    else:
        ends = ((begin, min(begin + step, size)) for begin in range(0, size, step))
        yield from _in_turns((_reduce_segment(rows, *each, communicator, threads) for each in ends), communicator.depth)


def _reduce_segment(rows: Rows, begin: int, end: int, communicator: Communicator, threads: Threads) -> Steps[None]:
    reduction = rows.reduction
    dtype, size, count = reduction.dtype, end - begin, reduction.rows[communicator.rank]
    by_engine = not reduction.ordered and communicator.reduces(reduction.op, dtype)
    shares = [size] if by_engine else _shares(size, communicator.size)
    source = rows.own(begin, end)
    if source is None:
        source = pool.empty((size * count,), dtype)
        cost = reduction.cost * size // reduction.size
        yield from _by_cost(cost, threads, _fold, rows, begin, shares, source)
    room = rows.room(begin, end)
    total = pool.empty((size,), dtype) if room is None else room
    if by_engine:
        yield communicator.iallreduce(reduction.op, source, total)
    else:  # each worker gets its share of everybody's rows
        share, item = shares[communicator.rank], dtype.itemsize
        received = pool.empty((share * sum(reduction.rows),), dtype)
        to = Parts(as_bytes(source), [each * count * item for each in shares])
        of = Parts(as_bytes(received), [share * each * item for each in reduction.rows])
        yield communicator.ialltoallv(to, of)
        folded = reduction.combine(list(received.reshape(-1, share))) if share else received
        yield communicator.iallgatherv(as_bytes(folded), Parts(as_bytes(total), [each * item for each in shares]))
    rows.finish(begin, end, total)


def _shares(size: int, workers: int) -> list[int]:
    share = -(-size // workers)
    return [max(0, min(share, size - worker * share)) for worker in range(workers)]


def _fold(rows: Rows, begin: int, shares: Sequence[int], out: Array) -> None:
    """Fold this worker's rows; of several, each worker's share behind the other."""
    at, count = 0, rows.reduction.own_rows
    for low, high in pairwise(accumulate(shares, initial=begin)):
        rows.fold(low, high, out[at : at + (high - low) * count])
        at += (high - low) * count


def _exchange(crossing: Crossing, communicator: Communicator, threads: Threads) -> Steps[Array]:
    """Return the bytes for this worker, of all by rank."""
    going = coming = crossing.plan.counts
    send = yield from _by_cost(2 * sum(going), threads, crossing.parts)
    whole = np.empty(sum(coming), np.uint8)
    step, most = max(1, SEGMENT // communicator.size), crossing.plan.most
    segments = [(_segment(send, going, at, step), _segment(whole, coming, at, step)) for at in range(0, most, step)]
    yield from _in_turns(_waiting(communicator.ialltoallv(to, of)) for to, of in segments)
    return whole


def gather_bytes(communicator: Communicator, own: Array, sizes: Sequence[int]) -> Steps[list[Array]]:
    """Return the bytes of all workers, by rank, who have so many each; of more, only these are given."""
    own = own[: sizes[communicator.rank]]
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


# Objects: pickled, without their arrays, which are moved from where they lie and read where they come to.


class _Pickler(pickle.Pickler):
    """Keeps arrays out of what is pickled."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.pieces: list[Array] = []

    def persistent_id(self, value: Any) -> Any:
        """Return shape and dtype of an array, and keep its bytes."""
        if type(value) is not np.ndarray or value.dtype.hasobject:
            return None
        native = value.dtype.newbyteorder("=")
        self.pieces.append(bytes_of(np.asarray(value, native)))
        gap = -self.pieces[-1].size % 16
        if gap:
            self.pieces.append(np.zeros(gap, np.uint8))
        return value.shape, native


class _Unpickler(pickle.Unpickler):
    """Puts the arrays in again."""

    def __init__(self, head: Array, body: Array) -> None:
        super().__init__(io.BytesIO(head.data))
        self._body, self._at = body, 0

    def persistent_load(self, known: Any) -> Array:
        """Return the next array."""
        shape, dtype = known
        begin, nbytes = self._at, dtype.itemsize * math.prod(shape)
        self._at += _padded(nbytes)
        return np.ndarray(shape, dtype, self._body[begin : begin + nbytes]) if nbytes else np.empty(shape, dtype)


def gather_objects(communicator: Communicator, own: Any, threads: Threads | None = None) -> Steps[list[Any]]:
    """Return what each worker has, by rank."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(own)
    file.write(bytes(-file.tell() % 16))  # what is behind it is aligned
    head = np.frombuffer(file.getbuffer(), np.uint8)
    nbytes = sum(piece.size for piece in pickler.pieces)
    body = yield from _by_cost(2 * nbytes if len(pickler.pieces) > 1 else 0, threads, joined, pickler.pieces)

    lengths = np.empty((communicator.size, 2), np.int64)
    yield communicator.iallgather(as_bytes(np.array([len(head), nbytes])), as_bytes(lengths))
    heads = yield from gather_bytes(communicator, head, lengths[:, 0].tolist())
    bodies = yield from gather_bytes(communicator, body, lengths[:, 1].tolist())
    return [_Unpickler(head, body).load() for head, body in zip(heads, bodies, strict=True)]


def _by_cost(nbytes: int, threads: Threads | None, fn: Callable[..., Any], *args: Any) -> Steps[Any]:
    """Call a function that takes as long as moving so many bytes, in a thread where that would hold up the loop."""
    return fn(*args) if threads is None or not policy.blocks(nbytes) else (yield from threads.call(fn, *args))


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
