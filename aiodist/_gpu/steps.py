"""Steps, as data: the launches, copies and joins of streams that reduce arrays on GPUs, and move parts of them.

**Reductions.** On one device, one launch reduces all leaves into the first replica's results, and copies give the
others theirs, also in one launch if there are many. Devices that read each other's memory each reduce small values for
themselves; of large ones, each reduces its part of every leaf and then fetches the other parts. If some cannot read
each other's memory, or results go to other devices than the inputs', the first result's device reduces: what it cannot
read is copied to it first, and the other results are copied from it; if necessary, the driver copies by way of the
host. Every element is folded in replica order on one device, so the bits are always the same.

**Moves** are copies between parts of arrays: of rows on one device, and contiguous ones between devices. A part without
gaps skips the step that would pack or unpack it:

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
"""Bytes of one replica's leaves from which devices share the work; below, a second round of copies costs more."""

GRAIN: Final = 1024  # the size of parts is a multiple of this number of elements: whole vectors for every dtype

FEW: Final = 4
"""The largest number of copies that are enqueued one by one, at one or two microseconds each; one launch does more."""

HOST: Final = -1
"""The host's memory, as a device. It has no stream: the other device's stream carries the copies."""


class Place(NamedTuple):
    """An address on a device, or on the host."""

    device: int
    address: int

    def offset(self, nbytes: int) -> Place:
        """Return the place at an offset in bytes."""
        return Place(self.device, self.address + nbytes)


class Job(NamedTuple):
    """One leaf: the places of all replicas' buffers and results.

    Each output takes the whole result. It may be the place of an input, but overlaps none otherwise.
    """

    inputs: tuple[Place, ...]  # in replica order
    outputs: tuple[Place, ...]
    elements: int  # in each


class Launch(NamedTuple):
    """One kernel launch on a device, for leaves or parts of leaves."""

    device: int
    form: Form
    leaves: tuple[Leaf, ...]
    lanes: int  # of each element


class Copy(NamedTuple):
    """A copy of bytes, or of rows of bytes within one device; the pitches are the distances between rows in bytes."""

    device: int  # the target's or the source's; it is enqueued on this device's stream
    target: Place
    source: Place
    nbytes: int  # of each row
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


class StreamBarrier(NamedTuple):
    """Each device's stream waits for everything that is on the others' so far."""

    devices: tuple[int, ...]


Step: TypeAlias = Launch | Copy | StreamBarrier
Reaches: TypeAlias = Callable[[int, int], bool]  # returns whether kernels on a device can read another's memory

Allocate: TypeAlias = Callable[[int, int], int]
"""Returns the address of scratch memory, for a device and a number of bytes."""


def reduce_steps(rule: Rule, jobs: Sequence[Job], reaches: Reaches, allocate: Allocate) -> list[Step]:
    """Return the steps that reduce leaves. All i-th inputs are on one device, and so are all i-th outputs.

    Before the first step, every device's stream must wait until all inputs are ready; after the last, users of inputs
    or results must wait for all devices' streams.
    """
    devices = tuple(dict.fromkeys(place.device for place in jobs[0].inputs))
    elsewhere = {place.device for place in jobs[0].outputs} != set(devices)
    if elsewhere or not all(reaches(one, other) for one in devices for other in devices if one != other):
        return _on_first_device(jobs[0].outputs[0].device, rule, jobs, reaches, allocate)
    if len(devices) == 1 or sum(job.elements * rule.dtype.itemsize for job in jobs) < SHARD_FROM:
        return [step for device in devices for step in _whole_leaves(device, rule, jobs)]
    return _sharded(devices, rule, jobs)


def _whole_leaves(device: int, rule: Rule, jobs: Sequence[Job]) -> list[Step]:
    """Reduce everything on one device, into the results of its replicas."""
    leaves = [
        Leaf(_first_output(device, job).address, tuple([place.address for place in job.inputs]), job.elements)
        for job in jobs
    ]
    return [*_reducing(device, rule, leaves), *_local_copies(device, rule, jobs)]


def _reducing(device: int, rule: Rule, leaves: Iterable[Leaf]) -> list[Step]:
    some = tuple([leaf for leaf in leaves if leaf.elements])
    if not some:
        return []
    return [Launch(device, form_for(rule, len(some[0].buffers), leaves=len(some)), some, components(rule.dtype))]


def _local_copies(device: int, rule: Rule, jobs: Sequence[Job]) -> list[Step]:
    """Copy results from the device's first replica to its others."""
    size = rule.result.itemsize
    copies = [
        Copy(device, place, _first_output(device, job), job.elements * size)
        for job in jobs
        for place in job.outputs
        if job.elements and place.device == device and place != _first_output(device, job)
    ]
    return _batched(device, copies, size)


def _batched(device: int, copies: Sequence[Copy], size: int) -> list[Step]:
    """Make many independent copies one launch; the device can access all of their memory."""
    if len(copies) <= FEW:
        return list(copies)
    leaves = [Leaf(copy.target.address, (copy.source.address,), copy.nbytes // size) for copy in copies]
    form = copying(size)
    return [Launch(device, form, tuple(leaves), size // form.rule.dtype.itemsize)]


def _sharded(devices: tuple[int, ...], rule: Rule, jobs: Sequence[Job]) -> list[Step]:
    size, result_size = rule.dtype.itemsize, rule.result.itemsize

    def part(job: Job, rank: int) -> tuple[int, int]:
        """Return the range of a leaf's elements that a device reduces."""
        step = -(-job.elements // (len(devices) * GRAIN)) * GRAIN
        return min(rank * step, job.elements), min((rank + 1) * step, job.elements)

    def shard(device: int, rank: int, job: Job) -> Leaf:
        low, high = part(job, rank)
        addresses = tuple([place.offset(low * size).address for place in job.inputs])
        return Leaf(_first_output(device, job).offset(low * result_size).address, addresses, high - low)

    def fetch(device: int, other: int, rank: int, job: Job) -> Copy:
        low, high = (element * result_size for element in part(job, rank))
        return Copy(device, _first_output(device, job).offset(low), _first_output(other, job).offset(low), high - low)

    steps: list[Step] = []
    for rank, device in enumerate(devices):
        steps += _reducing(device, rule, [shard(device, rank, job) for job in jobs])
    steps.append(StreamBarrier(devices))
    for device in devices:
        others = [(rank, other) for rank, other in enumerate(devices) if other != device]
        copies = [fetch(device, other, rank, job) for rank, other in others for job in jobs]
        steps += _batched(device, [copy for copy in copies if copy.nbytes], result_size)
        steps += _local_copies(device, rule, jobs)
    return steps


def _on_first_device(device: int, rule: Rule, jobs: Sequence[Job], reaches: Reaches, allocate: Allocate) -> list[Step]:
    fetches: list[Step] = []
    returns: list[Step] = []
    local_jobs: list[Job] = []
    for job in jobs:
        inputs = []
        for place in job.inputs:
            here = place
            if job.elements and not reaches(device, place.device):
                nbytes = job.elements * rule.dtype.itemsize
                here = Place(device, allocate(device, nbytes))
                fetches.append(Copy(device, here, place, nbytes))
            inputs.append(here)
        local_jobs.append(job._replace(inputs=tuple(inputs)))
        own, nbytes = _first_output(device, job), job.elements * rule.result.itemsize
        returns += [Copy(device, place, own, nbytes) for place in job.outputs if nbytes and place.device != device]
    return [*fetches, *_whole_leaves(device, rule, local_jobs), *returns]


def _first_output(device: int, job: Job) -> Place:
    """Return the place of the result of the device's first replica."""
    return next(place for place in job.outputs if place.device == device)


# Moves.


class View(NamedTuple):
    """An array, or a part of one, on a device."""

    place: Place  # of the first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: DType

    def part(self, axis: int, low: int, high: int) -> View:
        """Return the part from ``low`` to ``high`` along an axis."""
        shape = (*self.shape[:axis], high - low, *self.shape[axis + 1 :])
        return self._replace(place=self.place.offset(low * self.strides[axis]), shape=shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_gaps(self) -> bool:
        """Whether it is not contiguous in C order."""
        return has_gaps(self.shape, self.strides, self.dtype.itemsize)


class Move(NamedTuple):
    """A copy between parts of arrays of one shape and dtype."""

    target: View
    source: View


def contiguous(place: Place, shape: tuple[int, ...], dtype: DType) -> View:
    """Return a contiguous array in C order."""
    return View(place, shape, strides_in_c_order(shape, dtype.itemsize), dtype)


def devices_of(moves: Sequence[Move]) -> set[int]:
    """Return the devices that moves touch."""
    return {view.place.device for move in moves for view in move} - {HOST}


def move_steps(moves: Sequence[Move], allocate: Allocate) -> list[Step]:
    """Return the steps that carry out moves, in order: a move on one device may copy the result of an earlier one.

    Arrays that move between devices, or to the host, must be complete before the first step. On the host they have no
    gaps.
    """
    packs: list[Step] = []
    steps: list[Step] = []

    def scratch(device: int, like: View) -> View:
        return contiguous(Place(device, allocate(device, like.nbytes)), like.shape, like.dtype)

    for target, source in moves:
        here, there, ready = target.place.device, source.place.device, source
        if not source.nbytes:
            continue
        if here != there and source.has_gaps:
            ready = scratch(there, source)
            packs += _on_device(ready, source)
        if here != there and target.has_gaps:
            landed = scratch(here, target)
            steps.append(Copy(here, landed.place, ready.place, landed.nbytes))
            ready = landed
        steps += _on_device(target, ready)
    return [*packs, StreamBarrier(tuple(sorted(devices_of(moves)))), *steps] if packs else steps


def _on_device(target: View, source: View) -> Iterator[Copy]:
    """Yield the copies between two views on one device, or two views without gaps."""
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
        to = target.place.offset(sum(i * step for i, (_, step, _) in zip(index, extents, strict=True)))
        by = source.place.offset(sum(i * step for i, (_, _, step) in zip(index, extents, strict=True)))
        yield Copy(device, to, by, width, *rows)


def _merged(target: View, source: View) -> list[tuple[int, int, int]]:
    """Return the extents and strides of two views of one shape, with as few axes as possible."""
    found: list[tuple[int, int, int]] = []
    for extent, to, by in zip(target.shape, target.strides, source.strides, strict=True):
        if extent == 1:
            continue
        if found and found[-1][1:] == (extent * to, extent * by):
            found[-1] = (found[-1][0] * extent, to, by)
        else:
            found.append((extent, to, by))
    return found
