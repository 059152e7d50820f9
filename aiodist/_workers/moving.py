"""Moving: what becomes of a collective's values over workers: plan, record or exchange, result.

A plan (`_collectives.workers`) says what each worker contributes and what is made of it. Small values travel in the
record that all agree by; the rest is exchanged afterwards. Values on GPUs go through the host.

Where replicas have joined, each worker tells all others what each of its replicas contributes, and makes the result as
one machine would that had all the replicas that are there. A worker whose replicas have all joined does not know what
the step is, and need not. There are few such steps, the last ones of uneven data. What was rejected: neutral values in
the engine's reduction (for MIN there is none, and adding 0 to -0.0 changes it).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from aiodist._arrays.device import DeviceType
from aiodist._arrays.leaves import Spec
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import Collective
from aiodist._collectives.transfers import Members
from aiodist._collectives.work import Work
from aiodist._collectives.workers import Crossing, WorkerPlan, worker_plan
from aiodist._core.ledger import Group
from aiodist._workers import exchange
from aiodist._workers.channel import Channel
from aiodist._workers.layout import Layout
from aiodist._workers.record import FLOAT64, MOST_IN_FULL, Found
from aiodist._workers.threads import Threads
from aiodist._workers.transport import OF_VALUES, Steps

if TYPE_CHECKING:
    from aiodist._runtime.rendezvous import Rendezvous

_NOTHING: Final = b""


class Moving:
    """Moves the values of one run's collectives.

    Args:
        layout: the workers' replicas.
        devices: those of local replicas.
        threads: fold and copy what would hold up the event loop.
        ordered: reductions give the same bits for every layout.
    """

    def __init__(self, layout: Layout, devices: Sequence[str], threads: Threads, *, ordered: bool) -> None:
        self._layout = layout
        self._devices = tuple(devices)
        self._threads = threads
        self._ordered = ordered
        self._begun: dict[Rendezvous, Crossing] = {}

    def payload(self, slot: Rendezvous) -> bytes:
        """Return the values of a slot where they are small enough for the record of every worker; else nothing."""
        members = self._members(slot.group)
        workers = len(members.ids)
        request = slot.request
        if workers > MOST_IN_FULL or request.collective.spec is None or request.on_devices:
            return _NOTHING
        try:
            crossing = self._plan(slot, slot.options.accumulate).begin(_brought(slot))
            sizes = exchange.payload_sizes(crossing, workers)
            self._begun[slot] = crossing
            return _NOTHING if sizes is None else exchange.payload(crossing, members.rank)
        except OF_VALUES:
            self._begun.pop(slot, None)
            return _NOTHING  # every worker finds the same when it comes to moving them

    def move(self, channel: Channel, slot: Rendezvous, found: Found) -> Steps[Any]:
        """Move the values of a slot that all workers have agreed on; return the result.

        Raises:
            TypeError, ValueError, OverflowError: the values cannot be combined, as all workers find.
        """
        crossing = self._begun.pop(slot, None)
        request = slot.request
        slot.shared = True
        if request.collective.spec is None:
            return None
        plan = self._plan(slot, accumulate_of(found))
        if request.on_devices:
            work = plan.on_host(slot.values, self._devices_of(slot.group))
            crossing = plan.begin((yield from self._threads.call(work.carry_out)))
        elif crossing is None or not found.flags_alike:
            crossing = plan.begin(_brought(slot))
        communicator = channel.communicator
        in_record = channel.records.in_full and found.flags_alike and not request.on_devices
        sizes = exchange.payload_sizes(crossing, communicator.size) if in_record else None
        if sizes is not None:
            exchange.take_payloads(crossing, channel.records.payloads(sizes), communicator.size)
            yield from exchange.carry_out_further(crossing, communicator, self._threads)
        else:
            yield from exchange.carry_out(crossing, communicator, self._threads)
        if request.over_workers is not None:
            return request.over_workers.finish(slot.values, crossing.result())
        slot.shared = plan.shared
        return (yield from self._handed_out(slot, plan, crossing.result()))

    def _handed_out(self, slot: Rendezvous, plan: WorkerPlan, result: Any) -> Steps[Any]:
        """Return a result as replicas get it: on their devices, in their frameworks, in their own buffers."""
        if slot.request.on_devices:
            outs = None if slot.outs is None else {position: out.leaves for position, out in slot.outs.items()}
            slot.shared = False
            work = plan.on_devices(slot.values, result, self._devices_of(slot.group), outs)
            return (yield from self._threads.call(work.carry_out))
        _fill_outs(slot, result)
        return plan.hand_out(result)

    def gather(self, channel: Channel, slot: Rendezvous | None) -> Steps[Any]:
        """Tell all workers what each replica contributes that is there; return what comes of it.

        Args:
            channel: the group's.
            slot: the step; None where all of this worker's replicas have joined.

        Raises:
            TypeError, ValueError, OverflowError: it cannot be made without those who have joined.
        """
        own: dict[int, Any] = {}
        accumulate = ""
        if slot is not None:
            self._begun.pop(slot, None)
            accumulate = slot.options.accumulate
            values = (yield from self._on_host(slot)) if slot.request.on_devices else _brought(slot)
            there = [m for m in slot.group.members if m.position not in slot.absent]
            if slot.request.collective.spec is not None:
                own = {member.replica_id: values[member.position] for member in there}
            else:
                own = {member.replica_id: None for member in there}
        told = yield from exchange.gather_objects(channel.communicator, (accumulate, own))
        if slot is None:
            return None
        ids = slot.group.key[0]
        by_id = {replica_id: value for _, values in told for replica_id, value in values.items()}
        absent = tuple(position for position, replica_id in enumerate(ids) if replica_id not in by_id)
        collective = _collective(slot)
        slot.shared = True
        collective.check_present(absent)
        if collective.spec is None:
            return None
        on_host = collective._replace(spec=_without_devices(collective.spec)) if slot.request.on_devices else collective
        made = executor(on_host, len(ids), absent, next(found for found, _ in told if found))
        result = made.run([by_id.get(replica_id) for replica_id in ids])
        if isinstance(result, Work):
            result = yield from self._threads.call(result.carry_out)
        if slot.request.over_workers is not None:
            return slot.request.over_workers.finish(slot.values, result)
        slot.shared = made.shared
        if not made.shared:
            result = [result[member.rank] for member in slot.group.members]
        if slot.request.on_devices:
            slot.shared = False
            return (yield from self._back_on_devices(slot, result))
        _fill_outs(slot, result)
        return result

    def _back_on_devices(self, slot: Rendezvous, result: Any) -> Steps[Any]:
        from aiodist._collectives.device import from_host

        outs = None if slot.outs is None else {position: out.leaves for position, out in slot.outs.items()}
        work = from_host(slot.request.collective, slot.values, result, self._devices_of(slot.group), outs)
        return (yield from self._threads.call(work.carry_out))

    def _on_host(self, slot: Rendezvous) -> Steps[Any]:
        """Return values on GPUs as they are on the host, each by itself."""
        from aiodist._collectives.device import to_host  # loaded where there are arrays on GPUs

        options = slot.options
        work = to_host(slot.request.collective, slot.values, self._devices_of(slot.group), options.accumulate)
        return (yield from self._threads.call(work.carry_out))

    def _plan(self, slot: Rendezvous, accumulate: Any) -> WorkerPlan:
        return worker_plan(_collective(slot), self._members(slot.group), accumulate, ordered=self._ordered)

    def _members(self, group: Group) -> Members:
        return members_of(self._layout, None if group.is_root else group.key[0])

    def _devices_of(self, group: Group) -> tuple[str, ...]:
        return tuple(self._devices[member.replica_id - self._layout.offset] for member in group.members)


def moved(
    channel: Channel, layout: Layout, collective: Collective, values: Sequence[Any], found: Found, threads: Threads,
    *, ordered: bool,
) -> Steps[Any]:  # fmt: skip
    """Move values that all replicas bring outside of runs; return the result, on the host.

    Args:
        channel: what they are moved over.
        layout: the workers' replicas.
        collective: what is made of them.
        values: by local position.
        found: what the records said.
        threads: fold and copy.
        ordered: reductions give the same bits for every layout.
    """
    plan = worker_plan(collective, members_of(layout, None), accumulate_of(found), ordered=ordered)
    crossing = plan.begin(values)
    yield from exchange.carry_out(crossing, channel.communicator, threads)
    return crossing.result()


def _collective(slot: Rendezvous) -> Collective:
    over = slot.request.over_workers
    return slot.request.collective if over is None else over.collective


def _brought(slot: Rendezvous) -> Sequence[Any]:
    over = slot.request.over_workers
    return slot.values if over is None else over.bring(slot.values)


def _fill_outs(slot: Rendezvous, result: Any) -> None:
    """Copy a result into the replicas' own buffers."""
    spec = slot.request.collective.spec
    for position, out in (slot.outs or {}).items():
        own = result if slot.shared else result[position]
        assert spec is not None
        for buffer, leaf in zip(out.leaves, [own] if spec.single else own, strict=True):
            buffer[...] = leaf


def _without_devices(spec: Spec) -> Spec:
    return spec._replace(marks=tuple(None if isinstance(mark, DeviceType) else mark for mark in spec.marks))


def accumulate_of(found: Found) -> Any:
    """Return the accumulator that the records have said."""
    return "float64" if found.flags & FLOAT64 else "native"


@lru_cache(maxsize=1024)
def members_of(layout: Layout, replica_ids: tuple[int, ...] | None) -> Members:
    """Return the members of a group by worker, by their ids in the group; None: of all replicas."""
    if replica_ids is None:
        return Members(layout.rank, layout.positions)
    ranks: dict[int, list[int]] = {}
    for rank, replica_id in enumerate(replica_ids):
        ranks.setdefault(layout.worker_of(replica_id), []).append(rank)
    workers = sorted(ranks)
    return Members(workers.index(layout.rank), tuple(tuple(ranks[worker]) for worker in workers))
