"""Exchange: what becomes of a collective's values over workers: plan, record or transfers, result.

A plan (`_collectives.workers`) says what each worker contributes of a step and what is made of what all have. What is
small travels in the step's record. The rest goes in segments of 1 MiB: while one is on its way, the next is folded and
the one before is finished, and no operation holds up the event loop for long. What takes long by itself, with many
local replicas, is folded in worker threads. Values on GPUs go through the host.

An engine reduces a segment where it does so with our meaning. Else each worker is given a share of it from all others,
folds that, and all gather the shares. A row that needs no folding is sent from where it lies.

Where replicas have joined, each worker tells all others what each of its replicas contributes, and makes the result as
one machine would that had all the replicas that are there. A worker whose replicas have all joined does not know what
the step is, and need not. There are few such steps, the last ones of uneven data. What was rejected: neutral values in
the engine's reduction (for MIN there is none, and adding 0 to -0.0 changes it).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aiodist._arrays.device import DeviceType
from aiodist._arrays.leaves import Spec
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import Collective
from aiodist._collectives.transfers import Exchange, Gathering, Members, Reduction, Transfer
from aiodist._collectives.work import Work
from aiodist._collectives.workers import Crossing, WorkerPlan
from aiodist._core.ledger import Group
from aiodist._workers.layout import Layout
from aiodist._workers.record import FLOAT64, MOST_IN_FULL, PAYLOAD, Found
from aiodist._workers.session import Session
from aiodist._workers.transport import (
    OF_VALUES,
    Array,
    Communicator,
    Job,
    Parts,
    Request,
    Steps,
    Threads,
    as_bytes,
    begins_of,
)
from aiodist_kernels import policy

if TYPE_CHECKING:
    from aiodist._runtime.rendezvous import Rendezvous

SEGMENT: Final = 1 << 20
_AHEAD: Final = 2  # segments that worker threads fold before their turn
_IN_FLIGHT: Final = 2
_FARTHEST: Final = 2**31 - 1
"""How far from the beginning of a buffer MPI 3 can put something, in bytes."""
_NO_LENGTHS: Final = np.empty(0, np.int64)


class Plans:
    """A worker's plans, which are kept, since most calls come again."""

    def __init__(self, layout: Layout, *, ordered: bool) -> None:
        self._layout = layout
        self._all = Members(layout.rank, layout.positions)
        self._members = lru_cache(maxsize=1024)(self._members_of)
        self._plans = lru_cache(maxsize=1024)(partial(WorkerPlan, ordered=ordered))

    def members(self, group: Group | None = None) -> Members:
        """Return the members of a group by worker, by their ids in the group; None: all replicas."""
        return self._all if group is None or group.is_root else self._members(group.key[0])

    def plan(self, collective: Collective, accumulate_in: Any, group: Group | None = None) -> WorkerPlan:
        """Return the plan of a collective in a group; None: of all replicas."""
        return self._plans(collective, self.members(group), accumulate_in)

    def _members_of(self, replica_ids: tuple[int, ...]) -> Members:
        layout = self._layout
        ranks: dict[int, list[int]] = {}
        for rank, replica_id in enumerate(replica_ids):
            ranks.setdefault(layout.worker_of(replica_id), []).append(rank)
        workers = sorted(ranks)
        return Members(workers.index(layout.rank), tuple(tuple(ranks[worker]) for worker in workers))


class Moving:
    """Moves the values of one run's collectives."""

    def __init__(self, plans: Plans, device_of: Mapping[int, str], threads: Threads) -> None:
        self._plans = plans
        self._device_of = device_of
        self._threads = threads
        self._begun: dict[Rendezvous, Crossing] = {}

    def payload(self, slot: Rendezvous) -> bytes:
        """Return the values of a slot where they are small enough for the record of every worker; else nothing."""
        members, request = self._plans.members(slot.group), slot.request
        workers = len(members.ids)
        if workers > MOST_IN_FULL or request.collective.spec is None or request.on_devices:
            return b""
        try:
            crossing = self._plan(slot, slot.options.accumulate).begin(_contributed(slot))
            sizes = payload_sizes(crossing, workers)
            self._begun[slot] = crossing
            return b"" if sizes is None else payload(crossing, members.rank)
        except OF_VALUES:
            self._begun.pop(slot, None)
            return b""  # every worker finds the same when it comes to moving them

    def move(self, session: Session, slot: Rendezvous, found: Found) -> Steps[Any]:
        """Move the values of a slot that all workers have agreed on; return the result."""
        crossing, request = self._begun.pop(slot, None), slot.request
        slot.shared = True
        if request.collective.spec is None:
            return None
        plan = self._plan(slot, accumulate_of(found))
        if request.on_devices:
            work = plan.on_host(slot.values, self._devices_of(slot.group))
            crossing = plan.begin((yield from self._threads.call(work.carry_out)))
        elif crossing is None or not found.flags_alike:
            crossing = plan.begin(_contributed(slot))
        communicator = session.communicator
        in_record = session.records.in_full and found.flags_alike and not request.on_devices
        sizes = payload_sizes(crossing, communicator.size) if in_record else None
        if sizes is not None:
            take_payloads(crossing, session.records.payloads(sizes), communicator.size)
            yield from carry_out_further(crossing, communicator, self._threads)
        else:
            yield from carry_out(crossing, communicator, self._threads)
        result = crossing.result()
        if request.over_workers is not None:
            return request.over_workers.finish(slot.values, result)
        slot.shared = plan.shared
        if request.on_devices or slot.outs:
            result = yield from self._in_place(slot, result)
        return result if request.on_devices else plan.hand_out(result)

    def gather(self, session: Session, slot: Rendezvous | None) -> Steps[Any]:
        """Tell all workers what each replica contributes that is there; return what comes of it.

        The slot is None where all of this worker's replicas have joined.
        """
        own: dict[int, Any] = {}
        accumulate_in = ""
        if slot is not None:
            self._begun.pop(slot, None)
            accumulate_in = slot.options.accumulate
            values = (yield from self._on_host(slot)) if slot.request.on_devices else _contributed(slot)
            has_value = slot.request.collective.spec is not None
            there = [member for member in slot.group.members if member.position not in slot.absent]
            own = {member.replica_id: values[member.position] if has_value else None for member in there}
        told = yield from gather_objects(session.communicator, (accumulate_in, own))
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
            result = yield from self._threads.call(result.carry_out)
        if request.over_workers is not None:
            return request.over_workers.finish(slot.values, result)
        slot.shared = made.shared
        if not made.shared:
            result = [result[member.rank] for member in slot.group.members]
        return (yield from self._in_place(slot, result))

    def _on_host(self, slot: Rendezvous) -> Steps[Any]:
        """Return values on GPUs as they are on the host, each by itself."""
        from aiodist._collectives.device import to_host  # loaded where there are arrays on GPUs

        devices = self._devices_of(slot.group)
        work = to_host(slot.request.collective, slot.values, devices, slot.options.accumulate)
        return (yield from self._threads.call(work.carry_out))

    def _in_place(self, slot: Rendezvous, result: Any) -> Steps[Any]:
        """Return a result on the GPUs that the values came from; copy it into the replicas' own buffers."""
        collective = slot.request.collective
        outs = {position: out.leaves for position, out in (slot.outs or {}).items()}
        if slot.request.on_devices:
            from aiodist._collectives.device import from_host

            slot.shared = False
            work = from_host(collective, slot.values, result, self._devices_of(slot.group), outs or None)
            return (yield from self._threads.call(work.carry_out))
        for position, buffers in outs.items():
            own = result if slot.shared else result[position]
            assert collective.spec is not None
            for buffer, leaf in zip(buffers, [own] if collective.spec.single else own, strict=True):
                buffer[...] = leaf
        return result

    def _plan(self, slot: Rendezvous, accumulate_in: Any) -> WorkerPlan:
        return self._plans.plan(_collective(slot), accumulate_in, slot.group)

    def _devices_of(self, group: Group) -> tuple[str, ...]:
        return tuple(self._device_of[member.replica_id] for member in group.members)


class Agreed(NamedTuple):
    """A call outside of replicas that all workers make: what moves its values."""

    communicator: Communicator
    accumulate: Any  # what the first worker says
    plans: Plans
    threads: Threads

    def move(self, collective: Collective, values: Sequence[Any]) -> Steps[Any]:
        """Move values that all replicas contribute, by local position; return the result, on the host."""
        crossing = self.plans.plan(collective, self.accumulate).begin(values)
        yield from carry_out(crossing, self.communicator, self.threads)
        return crossing.result()

    def gather(self, own: Any) -> Steps[list[Any]]:
        """Return what each worker has, by rank."""
        return gather_objects(self.communicator, own)


def _collective(slot: Rendezvous) -> Collective:
    over = slot.request.over_workers
    return slot.request.collective if over is None else over.collective


def _contributed(slot: Rendezvous) -> Sequence[Any]:
    over = slot.request.over_workers
    return slot.values if over is None else over.bring(slot.values)


def _without_devices(spec: Spec) -> Spec:
    return spec._replace(marks=tuple(None if isinstance(mark, DeviceType) else mark for mark in spec.marks))


def accumulate_of(found: Found) -> Any:
    """Return the accumulator that the records have said."""
    return "float64" if found.flags & FLOAT64 else "native"


# What travels in the record.


def payload_sizes(crossing: Crossing, workers: int) -> list[int] | None:
    """Return by rank how many bytes of a record the values take; None where they do not fit, on any worker."""
    totals = [0] * workers
    for transfer in crossing.transfers:
        sizes = _sizes_in_record(transfer, workers)
        if sizes is None:
            return None
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
    return totals if max(totals) <= PAYLOAD else None


def _sizes_in_record(transfer: Transfer, workers: int) -> list[int] | None:
    if isinstance(transfer, Reduction):
        nbytes = transfer.size * transfer.dtype.itemsize
        return [count * nbytes for count in transfer.rows]
    if isinstance(transfer, Gathering) and not any(transfer.length_counts):
        return transfer.sizes([_NO_LENGTHS] * workers)
    return None


def payload(crossing: Crossing, rank: int) -> bytes:
    """Return this worker's values, for its record; `payload_sizes` says that they fit."""
    parts: list[bytes] = []
    for transfer in crossing.transfers:
        if isinstance(transfer, Reduction):
            row = np.empty(transfer.rows[rank] * transfer.size, transfer.dtype)
            transfer.fold(0, transfer.size, row)
            parts.append(row.tobytes())
        elif isinstance(transfer, Gathering):
            parts.append(transfer.data().tobytes())
    return parts[0] if len(parts) == 1 else b"".join(parts)


def take_payloads(crossing: Crossing, payloads: Sequence[memoryview], workers: int) -> None:
    """Make the results of all workers' values, by rank, as they stand in the records."""
    at = [0] * workers
    for transfer in crossing.transfers:
        sizes = _sizes_in_record(transfer, workers)
        assert sizes is not None
        parts = [
            np.frombuffer(payload[begin : begin + size], np.uint8).copy()  # aligned, and ours to write to
            for payload, begin, size in zip(payloads, at, sizes, strict=True)
        ]
        at = [begin + size for begin, size in zip(at, sizes, strict=True)]
        if isinstance(transfer, Reduction):
            of_workers = zip(parts, transfer.rows, strict=True)
            rows = [row for part, n in of_workers for row in part.view(transfer.dtype).reshape(n, transfer.size)]
            transfer.finish(0, transfer.size, transfer.combine(rows))
        elif isinstance(transfer, Gathering):
            transfer.take([_NO_LENGTHS] * workers, parts)


# What is moved.


def carry_out(crossing: Crossing, communicator: Communicator, threads: Threads) -> Steps[None]:
    """Move the values of a step, and make the results of them."""
    for transfer in crossing.transfers:
        yield from _carry_out(transfer, communicator, threads)
    yield from carry_out_further(crossing, communicator, threads)


def carry_out_further(crossing: Crossing, communicator: Communicator, threads: Threads) -> Steps[None]:
    """Move what turned out to be needed once the first has been moved: integers that are too large to be added up."""
    for transfer in crossing.further:
        yield from _carry_out(transfer, communicator, threads)


def _carry_out(transfer: Transfer, communicator: Communicator, threads: Threads) -> Steps[None]:
    if isinstance(transfer, Reduction):
        yield from _Reducing(transfer, communicator, threads).carry_out()
    elif isinstance(transfer, Exchange):
        yield from _exchange(transfer, communicator, threads)
    else:
        yield from _gather(transfer, communicator, threads)


class _Ring:
    """Buffers that serve one segment after the other."""

    def __init__(self, count: int, size: int, dtype: np.dtype[Any]) -> None:
        self._buffers: list[Array | None] = [None] * count
        self._size, self._dtype = size, dtype

    def take(self, index: int) -> Array:
        """Return the buffer of a segment: that of the one ``count`` before it."""
        place = index % len(self._buffers)
        buffer = self._buffers[place]
        if buffer is None:
            buffer = self._buffers[place] = np.empty(self._size, self._dtype)
        return buffer


class _Reducing:
    """A reduction on its way."""

    def __init__(self, transfer: Reduction, communicator: Communicator, threads: Threads) -> None:
        self._transfer, self._communicator, self._threads = transfer, communicator, threads
        self._dtype = transfer.dtype
        self._step = max(1, min(transfer.size, SEGMENT // self._dtype.itemsize))
        self._segments = [(a, min(a + self._step, transfer.size)) for a in range(0, transfer.size, self._step)]
        self._own_rows = transfer.rows[communicator.rank]
        self._by_engine = transfer.engine_may_reduce and communicator.reduces(transfer.op, self._dtype)
        self._depth = communicator.depth
        self._slow = bool(transfer.size) and policy.blocks(transfer.cost * self._step // transfer.size)
        self._sources = _Ring(self._depth + _AHEAD + 1, self._step * self._own_rows, self._dtype)
        self._totals = _Ring(self._depth + 1, self._step, self._dtype)
        self._jobs: deque[tuple[Job, Array]] = deque()
        self._begun = 0

    def carry_out(self) -> Steps[None]:
        """Reduce segment by segment; of each stage a few are on their way, begun in the same order on every worker."""
        going: deque[tuple[int, Request, Array]] = deque()  # to those who fold shares
        coming: deque[tuple[int, Request, Array]] = deque()  # folded
        for index in range(len(self._segments)):
            source = yield from self._source(index)
            if self._by_engine:
                total = self._total(index)
                coming.append((index, self._communicator.iallreduce(self._transfer.op, source, total), total))
            else:
                going.append(self._give_shares(index, source))
                if len(going) == self._depth:
                    coming.append((yield from self._gather_shares(*going.popleft())))
            if len(coming) == self._depth:
                yield from self._finish(*coming.popleft())
        while going or coming:
            if going:
                coming.append((yield from self._gather_shares(*going.popleft())))
            if not going or len(coming) == self._depth:
                yield from self._finish(*coming.popleft())

    def _give_shares(self, index: int, source: Array) -> tuple[int, Request, Array]:
        """Give each worker its share of everybody's rows."""
        shares, rows, item = self._shares(index), self._transfer.rows, self._dtype.itemsize
        own = shares[self._communicator.rank]
        received = np.empty(own * sum(rows), self._dtype)
        to = Parts(as_bytes(source), [share * self._own_rows * item for share in shares])
        of = Parts(as_bytes(received), [own * count * item for count in rows])
        return index, self._communicator.ialltoallv(to, of), received

    def _gather_shares(self, index: int, request: Request, received: Array) -> Steps[tuple[int, Request, Array]]:
        """Fold this worker's share, and gather the shares of all."""
        yield request
        shares, total = self._shares(index), self._total(index)
        own = shares[self._communicator.rank]
        share = self._transfer.combine(list(received.reshape(-1, own))) if own else received
        sizes = [share * self._dtype.itemsize for share in shares]
        return index, self._communicator.iallgatherv(as_bytes(share), Parts(as_bytes(total), sizes)), total

    def _finish(self, index: int, request: Request, total: Array) -> Steps[None]:
        yield request
        self._transfer.finish(*self._segments[index], total)

    def _total(self, index: int) -> Array:
        begin, end = self._segments[index]
        room = self._transfer.room(begin, end)
        return self._totals.take(index)[: end - begin] if room is None else room

    def _shares(self, index: int) -> list[int]:
        begin, end = self._segments[index]
        workers = self._communicator.size
        share = -(-(end - begin) // workers)
        return [max(0, min(share, end - begin - worker * share)) for worker in range(workers)]

    # What this worker sends.

    def _source(self, index: int) -> Steps[Array]:
        """Return what this worker sends of a segment, the next one."""
        if self._own_rows == 1:
            own = self._transfer.own(*self._segments[index])
            if own is not None:
                return own
        if not self._slow:
            return self._fill(index, self._room(index))
        while self._begun < min(len(self._segments), index + 1 + _AHEAD):
            room = self._room(self._begun)
            self._jobs.append((self._threads.begin(self._fill, self._begun, room), room))
            self._begun += 1
        job, room = self._jobs.popleft()
        yield job
        job.result()
        return room

    def _room(self, index: int) -> Array:
        begin, end = self._segments[index]
        return self._sources.take(index)[: (end - begin) * self._own_rows]

    def _fill(self, index: int, room: Array) -> Array:
        """Fold a segment; of several rows, or for shares, each worker's share after the other."""
        begin, end = self._segments[index]
        if self._by_engine or self._own_rows == 1:
            self._transfer.fold(begin, end, room)
            return room
        at = 0
        for low, high in pairwise(accumulate(self._shares(index), initial=begin)):
            size = (high - low) * self._own_rows
            self._transfer.fold(low, high, room[at : at + size])
            at += size
        return room


def _gather(transfer: Gathering, communicator: Communicator, threads: Threads) -> Steps[None]:
    lengths = [_NO_LENGTHS] * communicator.size
    if any(transfer.length_counts):
        sizes = [8 * count for count in transfer.length_counts]
        told = yield from gather_bytes(communicator, as_bytes(transfer.lengths), sizes)
        lengths = [part.view(np.int64) for part in told]
    sizes = transfer.sizes(lengths)
    own = yield from _by_size(threads, sizes[communicator.rank], transfer.data)
    parts = yield from gather_bytes(communicator, own, sizes)
    yield from _by_size(threads, sum(sizes), transfer.take, lengths, parts)


def _exchange(transfer: Exchange, communicator: Communicator, threads: Threads) -> Steps[None]:
    going, coming = list(transfer.send_counts), list(transfer.receive_counts)
    send = yield from _by_size(threads, sum(going), transfer.data)
    whole = np.empty(sum(coming), np.uint8)
    step = max(1, SEGMENT // communicator.size)
    segments = [
        (_segment(send, going, at, step), _segment(whole, coming, at, step)) for at in range(0, transfer.most, step)
    ]
    if max(len(send), len(whole)) > _FARTHEST:
        for to, of in segments:
            room = Parts(np.empty(sum(of.counts), np.uint8), of.counts)
            yield communicator.ialltoallv(Parts(np.concatenate(to.views()), to.counts), room)
            for piece, part in zip(of.views(), room.views(), strict=True):
                piece[...] = part
    else:
        yield from _in_turns(communicator.ialltoallv(to, of) for to, of in segments)
    yield from _by_size(threads, len(whole), transfer.take, whole)


def gather_bytes(communicator: Communicator, own: Array, sizes: Sequence[int]) -> Steps[list[Array]]:
    """Return the bytes of all workers, by rank, who have so many each."""
    givers = [rank for rank, size in enumerate(sizes) if size]
    if len(givers) == 1 < len(sizes) or sum(sizes) > _FARTHEST:
        parts = [own if rank == communicator.rank else np.empty(size, np.uint8) for rank, size in enumerate(sizes)]
        for root in givers:
            segments = (parts[root][at : at + SEGMENT] for at in range(0, sizes[root], SEGMENT))
            yield from _in_turns(communicator.ibcast(segment, root) for segment in segments)
        return parts
    whole, step = np.empty(sum(sizes), np.uint8), max(1, SEGMENT // communicator.size)
    yield from _in_turns(
        communicator.iallgatherv(own[at : at + step], _segment(whole, sizes, at, step))
        for at in range(0, max(sizes), step)
    )
    return Parts(whole, sizes).views()


def gather_objects(communicator: Communicator, own: Any) -> Steps[list[Any]]:
    """Return what each worker has, by rank."""
    data = np.frombuffer(pickle.dumps(own, protocol=5), np.uint8)
    sizes = np.empty(communicator.size, np.int64)
    yield communicator.iallgather(as_bytes(np.array([len(data)], np.int64)), as_bytes(sizes))
    parts = yield from gather_bytes(communicator, data, sizes.tolist())
    return [pickle.loads(part.data) for part in parts]  # noqa: S301  (the engine's own data path)


def _by_size(threads: Threads, nbytes: int, fn: Callable[..., Any], *args: Any) -> Steps[Any]:
    """Call a function that copies so many bytes, in a worker thread where that would hold up the event loop."""
    if policy.blocks(2 * nbytes):
        return (yield from threads.call(fn, *args))
    return fn(*args)


def _segment(whole: Array, sizes: Sequence[int], at: int, step: int) -> Parts:
    """Return how much of each part is in a segment, and where that begins."""
    places = [begin + min(at, size) for begin, size in zip(begins_of(sizes), sizes, strict=True)]
    return Parts(whole, [min(step, max(0, size - at)) for size in sizes], places)


def _in_turns(requests: Iterator[Request]) -> Steps[None]:
    """Wait for requests, of which a few are begun before the first of them is complete."""
    pending: deque[Request] = deque()
    for request in requests:
        pending.append(request)
        if len(pending) == _IN_FLIGHT:
            yield pending.popleft()
    while pending:
        yield pending.popleft()
