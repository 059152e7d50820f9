"""How leaves that lie on one GPU or several are reduced: which launches and copies, on which device, in which order.

One device: one launch reduces all leaves into the first replica's results, and copies give the others theirs: one
launch, too, where they are many.

Several that read each other's memory, small values: every device reads everything and reduces for itself.

Several, large values: every device reduces its part of each leaf, then gathers the other parts from the others.

Several, of which some cannot read each other's memory, or results that go to other devices than the values come from:
the first result's device reduces, what it cannot read is copied to it before, and the other results are copied from it;
the driver takes such copies through the host where it must.

Every element is folded in replica order on one device, so all ways give the same bits. A plan is data; it depends on
nothing but its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from aiodist_kernels.cuda.forms import Leaf

SHARD_FROM: Final = 1 << 20
"""Bytes of one replica's leaves from which devices share the work: below, a second round of copies costs more."""

GRAIN: Final = 1024
"""Elements to whose multiples parts are cut: whole vectors for every dtype."""

FEW: Final = 4
"""Copies that are enqueued one by one: each takes host and device a microsecond or two. More are done by one launch."""

HOST: Final = -1
"""Stands for the host's memory among devices. It has no stream: the other device carries what is copied."""


class Place(NamedTuple):
    """Memory on a device, or the host's."""

    device: int
    address: int


class Job(NamedTuple):
    """One leaf: where every replica's buffer lies, and where its result goes.

    Attributes:
        inputs: in replica order.
        outputs: each the whole result. Memory that overlaps no input, but for one on the same device in the same place.
        elements: in each.
        input_size: bytes of an element.
        output_size: bytes of a result's element.
    """

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    elements: int
    input_size: int
    output_size: int


class Launch(NamedTuple):
    """One kernel launch on a device, for leaves or parts of them."""

    device: int
    leaves: tuple[Leaf, ...]


class Copy(NamedTuple):
    """A copy, enqueued on the stream of ``device``, which is one of the two."""

    device: int
    target: Place
    source: Place
    nbytes: int


class Together(NamedTuple):
    """Copies done by one launch on a device: each leaf's one buffer, in elements of ``size`` bytes."""

    device: int
    leaves: tuple[Leaf, ...]
    size: int


class Meet(NamedTuple):
    """Each device's stream waits for what the others' have been given so far."""

    devices: tuple[int, ...]


Step: TypeAlias = Launch | Copy | Together | Meet
Reaches: TypeAlias = Callable[[int, int], bool]
Allocate: TypeAlias = Callable[[int, int], int]


def make(jobs: Sequence[Job], reaches: Reaches, allocate: Allocate) -> list[Step]:
    """Return the steps that reduce leaves of one dtype.

    Before the first of them, every device's stream must wait until all inputs are ready; after the last, whoever uses
    inputs or results must wait for all devices' streams.

    Args:
        jobs: the leaves; the i-th inputs of all lie on one device, and so do the i-th outputs.
        reaches: whether kernels on a device can read another's memory.
        allocate: returns the address of scratch memory on a device, for so many bytes.
    """
    devices = tuple(dict.fromkeys(place.device for place in jobs[0].inputs))
    elsewhere = {place.device for place in jobs[0].outputs} != set(devices)
    if elsewhere or not all(reaches(one, other) for one in devices for other in devices if one != other):
        return _at_home(jobs[0].outputs[0].device, jobs, reaches, allocate)
    if len(devices) == 1:
        return [*_reduce_all(devices[0], jobs), *_local_copies(devices[0], jobs)]
    if sum(job.elements * job.input_size for job in jobs) < SHARD_FROM:
        return [step for device in devices for step in (*_reduce_all(device, jobs), *_local_copies(device, jobs))]
    return _sharded(devices, jobs)


def _reduce_all(device: int, jobs: Sequence[Job]) -> list[Step]:
    first = next(i for i, place in enumerate(jobs[0].outputs) if place.device == device)
    leaves = tuple(
        [
            Leaf(job.outputs[first].address, tuple([place.address for place in job.inputs]), job.elements)
            for job in jobs
            if job.elements
        ]
    )
    return [Launch(device, leaves)] if leaves else []


def _local_copies(device: int, jobs: Sequence[Job]) -> list[Step]:
    """Give the device's other replicas their results."""
    first, *others = [i for i, place in enumerate(jobs[0].outputs) if place.device == device]
    copies = [
        Copy(device, job.outputs[other], job.outputs[first], job.elements * job.output_size)
        for job in jobs
        for other in others
        if job.elements and job.outputs[other] != job.outputs[first]
    ]
    return _together(device, copies, jobs[0].output_size)


def _together(device: int, copies: Sequence[Copy], size: int) -> list[Step]:
    """Make one launch of many copies, which do not depend on each other; the device reaches all that they touch."""
    if len(copies) <= FEW:
        return list(copies)
    leaves = [Leaf(copy.target.address, (copy.source.address,), copy.nbytes // size) for copy in copies]
    return [Together(device, tuple(leaves), size)]


def _sharded(devices: tuple[int, ...], jobs: Sequence[Job]) -> list[Step]:
    steps: list[Step] = []
    for turn, device in enumerate(devices):
        parts = [(job, *_part(job, turn, len(devices))) for job in jobs]
        leaves = tuple(_leaf(_own(device, job), job, low, high) for job, low, high in parts if low < high)
        steps += [Launch(device, leaves)] if leaves else []
    steps.append(Meet(devices))
    for device in devices:
        others = [(turn, other) for turn, other in enumerate(devices) if other != device]
        copies = [_fetch(device, other, job, *_part(job, turn, len(devices))) for turn, other in others for job in jobs]
        steps += _together(device, [copy for copy in copies if copy.nbytes], jobs[0].output_size)
        steps += _local_copies(device, jobs)
    return steps


def _fetch(device: int, other: int, job: Job, low: int, high: int) -> Copy:
    """Fetch what another device has reduced."""
    size = job.output_size
    target, source = _moved(_own(device, job), low * size), _moved(_own(other, job), low * size)
    return Copy(device, target, source, (high - low) * size)


def _at_home(home: int, jobs: Sequence[Job], reaches: Reaches, allocate: Allocate) -> list[Step]:
    fetches: list[Step] = []
    at_home: list[Job] = []
    for job in jobs:
        inputs = []
        for place in job.inputs:
            here = place
            if job.elements and not reaches(home, place.device):
                nbytes = job.elements * job.input_size
                here = Place(home, allocate(home, nbytes))
                fetches.append(Copy(home, here, place, nbytes))
            inputs.append(here)
        at_home.append(job._replace(inputs=tuple(inputs)))
    returns = [
        Copy(home, other, own, job.elements * job.output_size)
        for job in jobs
        for own in [_own(home, job)]
        for other in job.outputs
        if other.device != home and job.elements
    ]
    return [*fetches, *_reduce_all(home, at_home), *_local_copies(home, jobs), *returns]


def _part(job: Job, turn: int, count: int) -> tuple[int, int]:
    """Return the elements of a leaf that a device reduces."""
    step = -(-job.elements // (count * GRAIN)) * GRAIN
    return min(turn * step, job.elements), min((turn + 1) * step, job.elements)


def _leaf(own: Place, job: Job, low: int, high: int) -> Leaf:
    addresses = tuple(place.address + low * job.input_size for place in job.inputs)
    return Leaf(own.address + low * job.output_size, addresses, high - low)


def _own(device: int, job: Job) -> Place:
    """Return where the device's first replica has its result."""
    return next(place for place in job.outputs if place.device == device)


def _moved(place: Place, offset: int) -> Place:
    return Place(place.device, place.address + offset)
