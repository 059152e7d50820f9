"""Steps: which launches, copies and joins of streams reduce arrays on GPUs, and move parts of them. All is data.

**Reductions.** On one device one launch reduces all leaves into the first replica's results, and copies give the others
theirs: one launch, too, where they are many. Of several devices that read each other's memory, each reads everything of
small values and reduces for itself; of large ones, each reduces its part of every leaf, then fetches the other parts
from the others. Where some cannot read each other's memory, or results go to other devices than the values come from,
the first result's device reduces: what it cannot read is copied to it before, and the other results are copied from
it; the driver takes such copies through the host where it must. Every element is folded in replica order on one device,
so all ways give the same bits.

**Moves** are copies between parts of arrays: of rows on one device, and plain ones from one device to another. What has
no gaps skips the steps that would close or open them:

    part ── rows, on its device ──▶ packed ── one copy ──▶ landed ── rows, on the other device ──▶ part
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from aiodist._arrays.device import has_gaps, strides_in_c_order
from aiodist_kernels.cuda.forms import Form, Leaf, copying, form_for
from aiodist_kernels.rules import DType, Rule, components

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

    def behind(self, offset: int) -> Place:
        """Return the place so many bytes behind this one."""
        return Place(self.device, self.address + offset)


class Job(NamedTuple):
    """One leaf: where every replica's buffer lies, and where its result goes."""

    inputs: tuple[Place, ...]  # in replica order
    outputs: tuple[Place, ...]  # each the whole result, which overlaps no input, but for one in the very same place
    elements: int  # in each


class Launch(NamedTuple):
    """One kernel launch on a device, for leaves or parts of them whose elements have so many lanes."""

    device: int
    form: Form
    leaves: tuple[Leaf, ...]
    lanes: int


class Copy(NamedTuple):
    """A copy, enqueued on the stream of ``device``, which is one of the two: of bytes, or of rows within one device.

    The pitches are the bytes from one row to the next.
    """

    device: int
    target: Place
    source: Place
    nbytes: int  # of each row
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


class Meet(NamedTuple):
    """Each device's stream waits for what the others' have been given so far."""

    devices: tuple[int, ...]


Step: TypeAlias = Launch | Copy | Meet
Reaches: TypeAlias = Callable[[int, int], bool]
"""Whether kernels on a device can read another's memory."""

Allocate: TypeAlias = Callable[[int, int], int]
"""Returns the address of scratch memory on a device, for so many bytes."""


def reduce_steps(rule: Rule, jobs: Sequence[Job], reaches: Reaches, allocate: Allocate) -> list[Step]:
    """Return the steps that reduce leaves, of which all i-th inputs lie on one device, and so do all i-th outputs.

    Before the first of them, every device's stream must wait until all inputs are ready; after the last, whoever uses
    inputs or results must wait for all devices' streams.
    """
    devices = tuple(dict.fromkeys(place.device for place in jobs[0].inputs))
    elsewhere = {place.device for place in jobs[0].outputs} != set(devices)
    if elsewhere or not all(reaches(one, other) for one in devices for other in devices if one != other):
        return _at_home(jobs[0].outputs[0].device, rule, jobs, reaches, allocate)
    if len(devices) == 1 or sum(job.elements * rule.dtype.itemsize for job in jobs) < SHARD_FROM:
        return [step for device in devices for step in _whole_leaves(device, rule, jobs)]
    return _sharded(devices, rule, jobs)


def _whole_leaves(device: int, rule: Rule, jobs: Sequence[Job]) -> list[Step]:
    """Reduce all on one device, into the results of its replicas."""
    leaves = [
        Leaf(_own(device, job).address, tuple([place.address for place in job.inputs]), job.elements) for job in jobs
    ]
    return [*_reducing(device, rule, leaves), *_local_copies(device, rule, jobs)]


def _reducing(device: int, rule: Rule, leaves: Iterable[Leaf]) -> list[Step]:
    some = tuple([leaf for leaf in leaves if leaf.elements])
    if not some:
        return []
    return [Launch(device, form_for(rule, len(some[0].buffers), leaves=len(some)), some, components(rule.dtype))]


def _local_copies(device: int, rule: Rule, jobs: Sequence[Job]) -> list[Step]:
    """Give the device's other replicas their results."""
    first, *others = [i for i, place in enumerate(jobs[0].outputs) if place.device == device]
    copies = [
        Copy(device, job.outputs[other], job.outputs[first], job.elements * rule.result.itemsize)
        for job in jobs
        for other in others
        if job.elements and job.outputs[other] != job.outputs[first]
    ]
    return _together(device, copies, rule.result.itemsize)


def _together(device: int, copies: Sequence[Copy], size: int) -> list[Step]:
    """Make one launch of many copies, which do not depend on each other; the device reaches all that they touch."""
    if len(copies) <= FEW:
        return list(copies)
    leaves = [Leaf(copy.target.address, (copy.source.address,), copy.nbytes // size) for copy in copies]
    form = copying(size)
    return [Launch(device, form, tuple(leaves), size // form.rule.dtype.itemsize)]


def _sharded(devices: tuple[int, ...], rule: Rule, jobs: Sequence[Job]) -> list[Step]:
    size, result_size = rule.dtype.itemsize, rule.result.itemsize

    def part(job: Job, turn: int) -> tuple[int, int]:
        """Return the elements of a leaf that a device reduces."""
        step = -(-job.elements // (len(devices) * GRAIN)) * GRAIN
        return min(turn * step, job.elements), min((turn + 1) * step, job.elements)

    def shard(device: int, turn: int, job: Job) -> Leaf:
        low, high = part(job, turn)
        addresses = tuple([place.behind(low * size).address for place in job.inputs])
        return Leaf(_own(device, job).behind(low * result_size).address, addresses, high - low)

    def fetch(device: int, other: int, turn: int, job: Job) -> Copy:
        low, high = (element * result_size for element in part(job, turn))
        return Copy(device, _own(device, job).behind(low), _own(other, job).behind(low), high - low)

    steps: list[Step] = []
    for turn, device in enumerate(devices):
        steps += _reducing(device, rule, [shard(device, turn, job) for job in jobs])
    steps.append(Meet(devices))
    for device in devices:
        others = [(turn, other) for turn, other in enumerate(devices) if other != device]
        copies = [fetch(device, other, turn, job) for turn, other in others for job in jobs]
        steps += _together(device, [copy for copy in copies if copy.nbytes], result_size)
        steps += _local_copies(device, rule, jobs)
    return steps


def _at_home(home: int, rule: Rule, jobs: Sequence[Job], reaches: Reaches, allocate: Allocate) -> list[Step]:
    fetches: list[Step] = []
    returns: list[Step] = []
    at_home: list[Job] = []
    for job in jobs:
        inputs = []
        for place in job.inputs:
            here = place
            if job.elements and not reaches(home, place.device):
                nbytes = job.elements * rule.dtype.itemsize
                here = Place(home, allocate(home, nbytes))
                fetches.append(Copy(home, here, place, nbytes))
            inputs.append(here)
        at_home.append(job._replace(inputs=tuple(inputs)))
        away = [place for place in job.outputs if place.device != home] if job.elements else []
        returns += [Copy(home, place, _own(home, job), job.elements * rule.result.itemsize) for place in away]
    return [*fetches, *_whole_leaves(home, rule, at_home), *returns]


def _own(device: int, job: Job) -> Place:
    """Return where the device's first replica has its result."""
    return next(place for place in job.outputs if place.device == device)


# Moves.


class View(NamedTuple):
    """An array, or a part of one, on a device."""

    place: Place  # of its first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # for each axis, the bytes from an element to the next
    dtype: DType

    def part(self, axis: int, low: int, high: int) -> View:
        """Return the part from ``low`` to ``high`` along an axis."""
        shape = (*self.shape[:axis], high - low, *self.shape[axis + 1 :])
        return self._replace(place=self.place.behind(low * self.strides[axis]), shape=shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return math.prod(self.shape) * self.dtype.itemsize


class Move(NamedTuple):
    """A copy between parts of arrays of one shape and dtype."""

    target: View
    source: View


def whole(place: Place, shape: tuple[int, ...], dtype: DType) -> View:
    """Return an array without gaps, in C's order."""
    return View(place, shape, strides_in_c_order(shape, dtype.itemsize), dtype)


def devices_of(moves: Sequence[Move]) -> set[int]:
    """Return the devices that moves touch."""
    return {view.place.device for move in moves for view in move} - {HOST}


def move_steps(moves: Sequence[Move], allocate: Allocate) -> list[Step]:
    """Return the steps that carry out moves, in their order, so that one on a device may copy what one before made.

    What moves to another device, or to the host, must be there before the first step. What moves to the host, or from
    it, has no gaps there.
    """
    packs: list[Step] = []
    steps: list[Step] = []

    def scratch(device: int, like: View) -> View:
        return whole(Place(device, allocate(device, like.nbytes)), like.shape, like.dtype)

    for target, source in moves:
        here, there, ready = target.place.device, source.place.device, source
        if not source.nbytes:
            continue
        if here != there and not has_no_gaps(source):
            ready = scratch(there, source)
            packs += _on_device(ready, source)
        if here != there and not has_no_gaps(target):
            landed = scratch(here, target)
            steps.append(Copy(here, landed.place, ready.place, landed.nbytes))
            ready = landed
        steps += _on_device(target, ready)
    return [*packs, Meet(tuple(sorted(devices_of(moves)))), *steps] if packs else steps


def _on_device(target: View, source: View) -> Iterator[Copy]:
    """Return a move's copies, between two views of one device, or two without gaps."""
    device, extents = target.place.device, _merged(target, source)
    if device == HOST:
        device = source.place.device
    width = source.dtype.itemsize
    if extents and extents[-1][1:] == (width, width):
        width *= extents.pop()[0]
    if not extents:
        yield Copy(device, target.place, source.place, width)
        return
    rows = max(extents, key=itemgetter(0))
    extents.remove(rows)
    for index in product(*(range(extent) for extent, _, _ in extents)):
        to = target.place.behind(sum(i * step for i, (_, step, _) in zip(index, extents, strict=True)))
        by = source.place.behind(sum(i * step for i, (_, _, step) in zip(index, extents, strict=True)))
        yield Copy(device, to, by, width, *rows)


def _merged(target: View, source: View) -> list[tuple[int, int, int]]:
    """Return extent and strides of as few axes as tell where all elements lie in both."""
    found: list[tuple[int, int, int]] = []
    for extent, to, by in zip(target.shape, target.strides, source.strides, strict=True):
        if extent == 1:
            continue
        if found and found[-1][1:] == (extent * to, extent * by):
            found[-1] = (found[-1][0] * extent, to, by)
        else:
            found.append((extent, to, by))
    return found


def has_no_gaps(view: View) -> bool:
    """Return whether elements lie one behind the other, in C's order."""
    return not has_gaps(view.shape, view.strides, view.dtype.itemsize)
