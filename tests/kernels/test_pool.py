# SPDX-License-Identifier: Apache-2.0
"""A block of memory is reused only when nothing refers any more to what was made of it, in any way."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.lib.stride_tricks import as_strided

from aiodist_kernels import ReduceOp, plan_for, pool, reduce, reduction, warm
from aiodist_kernels.pool import MIB, Pool
from tests.kernels.arrays import SINGLE

LEAST = 1 << 10
SIZES = (LEAST, LEAST + 64, LEAST * 2, LEAST * 8)
MOST_IDLE = LEAST * 12


class Cycle:
    """Holds an object, and itself; adds the object to a list when the garbage collector finds the cycle."""

    def __init__(self, held: object, saved: list[Any] | None = None) -> None:
        self.held = held
        self.saved = [] if saved is None else saved
        self.me = self

    def __del__(self) -> None:
        self.saved.append(self.held)


def failure(held: object) -> BaseException:
    """Return an exception whose traceback holds an object in a frame."""

    def fail(held: object) -> None:
        raise LookupError

    try:
        fail(held)
    except LookupError as error:
        return error
    return AssertionError()


DERIVED: list[Callable[[Any], Any]] = [
    lambda a: a[::-2],
    lambda a: memoryview(memoryview(a)[4:].cast("B")),
    lambda a: np.frombuffer(a, np.uint8),
    np.from_dlpack,
    lambda a: as_strided(a, (3,), (4,)),
    lambda a: np.ctypeslib.as_array(np.ctypeslib.as_ctypes(a)),
    lambda a: a.base,
    lambda a: lambda: a,
    Cycle,
    failure,
]


class Holding(RuleBasedStateMachine):
    """Takes arrays, derives objects from them, drops some, and checks that memory still held is unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(MOST_IDLE)
        self.fills = 0
        self.held: list[
            tuple[np.ndarray, Any, bytes]
        ] = []  # a view that does not hold the memory; its holder; the expected bytes

    @rule(nbytes=st.sampled_from(SIZES))
    def take(self, nbytes: int) -> None:
        array = self.pool.empty((nbytes // 4,), SINGLE)
        self.fills += 1
        array.view(np.uint8)[...] = self.fills % 251 + 1
        place = {"data": (array.ctypes.data, False), "shape": (array.nbytes,), "typestr": "|u1", "version": 3}
        look = np.asarray(type("Look", (), {"__array_interface__": place})())
        self.held.append((look, array, look.tobytes()))

    def drawn(self, data: st.DataObject) -> tuple[np.ndarray, Any, bytes]:
        return self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), derive=st.sampled_from(DERIVED))
    def derive(self, data: st.DataObject, derive: Callable[[Any], Any]) -> None:
        look, holder, wanted = self.drawn(data)
        if type(holder) is np.ndarray and holder.dtype == SINGLE and holder.flags.c_contiguous:
            holder = derive(holder)
        self.held.append((look, holder, wanted))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), in_a_thread=st.booleans())
    def drop(self, data: st.DataObject, *, in_a_thread: bool) -> None:
        dropped = [self.drawn(data)]
        if in_a_thread:
            thread = threading.Thread(target=dropped.clear)
            thread.start()
            thread.join()

    @invariant()
    def held_memory_is_unchanged(self) -> None:
        for look, _, wanted in self.held:
            assert look.tobytes() == wanted

    @invariant()
    def idle_bytes_are_bounded(self) -> None:
        assert 0 <= self.pool.idle_bytes <= MOST_IDLE


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POOLED_FROM", LEAST)
    monkeypatch.setattr(pool, "POOLED_AMONG_FROM", LEAST)
    monkeypatch.setattr(pool, "results", Pool())


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=8, stateful_step_count=30, deadline=None)


def test_repeated_steps_reuse_a_few_blocks(made: list[int]) -> None:
    """The results of three steps are held at a time, as by a program that compares them."""
    buffers = [np.full(MIB // 4, index, np.float32) for index in (1, 2)]
    kept: deque[np.ndarray] = deque(maxlen=3)
    step = reduction(ReduceOp.SUM, SINGLE, buffers[0].shape, 2, among=True)
    for _ in range(2000):
        kept.append(step(buffers))
    assert 3 <= len(made) <= 5
    assert (kept[0] == 3).all()
    kept.clear()
    assert pool.results.idle_bytes == sum(made)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["f4", "f2", "c8"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT], ids=str)
def test_large_results_of_every_kind_lie_in_blocks(op: ReduceOp, dtype: str, count: int, made: list[int]) -> None:
    buffers = [np.ones((80, 800), dtype)] * count
    before = reduce(op, buffers).tobytes()
    assert made
    made.clear()
    result = reduce(op, buffers)
    assert not made
    assert result.tobytes() == before
    assert result.ctypes.data % pool.ALIGNMENT == 0


def test_kernels_write_into_blocks(made: list[int]) -> None:
    warm([plan_for(ReduceOp.MEAN, SINGLE, 3, "native")])
    buffers = [np.full((50, 50), index, SINGLE, order="F") for index in (1, 2, 3)]
    for _ in range(2):
        result = reduce(ReduceOp.MEAN, buffers)
        assert (result == 2).all()
        assert result.flags.f_contiguous
        del result
    assert made == [10_000]


def test_results_of_a_nest_use_blocks_from_a_smaller_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POOLED_AMONG_FROM", LEAST // 4)
    buffers = [np.ones(LEAST // 8, SINGLE)] * 2
    for among in (False, True):
        reduced = reduction(ReduceOp.SUM, SINGLE, buffers[0].shape, 2, among=among)
        assert reduced(buffers).flags.owndata is not among


def test_finalised_lease_exports_no_memory() -> None:
    blocks = Pool()
    saved: list[Any] = []
    Cycle(blocks.empty((LEAST,), np.dtype(np.uint8)).base.base, saved)  # type: ignore[union-attr]
    gc.collect()
    (lease,) = saved
    assert blocks.idle_bytes == LEAST
    assert not hasattr(lease, "__array_interface__")
    del lease
    saved.clear()
    assert blocks.idle_bytes == LEAST


def test_threads_never_share_a_block() -> None:
    blocks = Pool()
    wrong: list[int] = []

    def take_and_drop(mark: int) -> None:
        for _ in range(2000):
            array = blocks.empty((LEAST,), np.dtype(np.uint8))
            array[:] = mark
            if (array != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=take_and_drop, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert blocks.idle_bytes <= 8 * LEAST  # each thread drops its array only after it has got the next one


def test_leases_that_die_within_the_pools_own_code() -> None:
    """The garbage collector may run, and end many leases, wherever the interpreter creates an object."""
    blocks, kind, before = Pool(64 * LEAST), np.dtype(np.uint8), gc.get_threshold()
    try:
        for least in range(1, 40):
            gc.set_threshold(0)
            for _ in range(200):
                Cycle(blocks.empty((LEAST,), kind))
            gc.set_threshold(least, 1, 1)  # so that it runs at another moment below
            arrays = [blocks.empty((LEAST,), kind) for _ in range(50)]
            assert len({array.ctypes.data for array in arrays}) == 50
            assert 0 <= blocks.idle_bytes <= 64 * LEAST
    finally:
        gc.set_threshold(*before)
