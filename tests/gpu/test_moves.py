"""Moves between parts of arrays: right bytes in any order of streams, in as few copies as possible."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist._gpu import steps
from aiodist._gpu.enqueue import Queue
from aiodist._gpu.steps import Copy, Move, Place, StreamBarrier, View, contiguous
from tests.gpu.fake_driver import FakeDriver, placed
from tests.gpu.problem import POISON
from tests.kernels import arrays
from tests.kernels.arrays import SINGLE

HERE, THERE = (contiguous(Place(k, 1 << 40), (4, 5, 6), SINGLE) for k in range(2))


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Return the shape of an array with up to three axes, and a part of it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=3)))
    lows = [draw(st.integers(0, size)) for size in shape]
    return shape, tuple(slice(low, draw(st.integers(low, size))) for low, size in zip(lows, shape, strict=True))


def view(device: int, memory: Any, shape: tuple[int, ...], itemsize: int, where: tuple[slice, ...]) -> View:
    found = contiguous(Place(device, memory.address), shape, np.dtype(f"V{itemsize}"))
    for axis, part in enumerate(where):
        found = found.part(axis, part.start, part.stop)
    return found


@settings(max_examples=200)
@given(
    seed=arrays.seeds,
    source=parts(),
    margins=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=3, max_size=3),
    devices=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    itemsize=st.sampled_from([1, 2, 8]),
)
def test_any_part_to_any_part(
    seed: int,
    source: tuple[tuple[int, ...], tuple[slice, ...]],
    margins: list[tuple[int, int]],
    devices: tuple[int, int],
    itemsize: int,
) -> None:
    shape, where = source
    there = tuple(slice(low, low + w.stop - w.start) for (low, _), w in zip(margins, where, strict=False))
    target_shape = tuple(w.stop + more for (_, more), w in zip(margins, there, strict=False))
    driver = FakeDriver(seed, {frozenset({0, 1})})
    values = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), np.uint8)
    wanted = np.full((*target_shape, itemsize), 7, np.uint8)
    memory, target = placed(driver, devices[0], values), placed(driver, devices[1], wanted)
    wanted[there] = values[where]
    memory.array[...] = POISON
    stream = driver.stream(devices[0], "GPU:0")
    driver.enqueue(stream, partial(np.copyto, memory.array, values.reshape(-1)))
    target_view = view(devices[1], target, target_shape, itemsize, there)
    move = Move(target_view, view(devices[0], memory, shape, itemsize, where))
    seen: list[np.ndarray] = []
    queue = Queue(driver)
    schedule = queue.schedule([], [move])
    with driver.using():
        completion = queue.run(schedule, [stream], [])
    driver.enqueue(stream, lambda: seen.append(target.array.copy()))
    driver.enqueue(stream, partial(memory.array.fill, POISON))
    driver.drain()
    assert completion.is_done()
    assert driver.host_waits == 0
    assert seen[0].tobytes() == wanted.tobytes()


def planned(*moves: Move) -> tuple[list[steps.Step], list[tuple[int, int]]]:
    """Return the steps and their scratch memory."""
    allocated: list[tuple[int, int]] = []

    def allocate(device: int, nbytes: int) -> int:
        allocated.append((device, nbytes))
        return 1 << 50

    return steps.move_steps(moves, allocate), allocated


def test_contiguous_arrays_move_in_one_copy() -> None:
    made, allocated = planned(Move(HERE, THERE), Move(HERE.part(0, 1, 3), THERE.part(0, 0, 2)))
    assert made == [Copy(0, HERE.place, THERE.place, 480), Copy(0, HERE.place.offset(120), THERE.place, 240)]
    assert not allocated


def test_strided_arrays_are_packed_and_unpacked_on_their_devices() -> None:
    made, allocated = planned(Move(HERE.part(1, 1, 3), THERE.part(1, 0, 2)))
    assert made == [
        Copy(1, Place(1, 1 << 50), THERE.place, 48, 4, 48, 120),
        StreamBarrier((0, 1)),
        Copy(0, Place(0, 1 << 50), Place(1, 1 << 50), 192),
        Copy(0, HERE.place.offset(24), Place(0, 1 << 50), 48, 4, 120, 48),
    ]
    assert allocated == [(1, 192), (0, 192)]


def test_longest_axis_becomes_the_rows_of_a_copy() -> None:
    array = contiguous(Place(0, 1 << 40), (1000, 3, 8), SINGLE).part(1, 0, 2)
    made, _ = planned(Move(array.part(2, 0, 4), array.part(2, 4, 8)))
    assert [step.rows for step in made if isinstance(step, Copy)] == [1000, 1000]
