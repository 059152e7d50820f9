# SPDX-License-Identifier: Apache-2.0
"""A block of memory is given out again only when nobody holds what was made of it, in any way."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections import deque
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from aiodist_kernels import KernelSpec, ReduceOp, policy, pool, reduce, reduce_alike, warm
from aiodist_kernels.pool import MIB, Pool

if TYPE_CHECKING:
    from collections.abc import Callable

SINGLE = np.dtype(np.float32)
LEAST = 1 << 10
SIZES = (LEAST, LEAST + 64, LEAST * 2, LEAST * 8)
MOST_IDLE = LEAST * 12


class Cycle:
    """Holds something, and itself."""

    def __init__(self, held: object) -> None:
        self.held = held
        self.me = self


class Lazarus:
    """Puts what it holds into a list when the garbage collector finds it in a cycle."""

    def __init__(self, held: object, saved: list[Any]) -> None:
        self.held = held
        self.saved = saved
        self.me = self

    def __del__(self) -> None:
        self.saved.append(self.held)


def failure(held: object) -> BaseException:
    """Return an exception whose traceback holds something in a frame."""

    def fail(held: object) -> None:
        raise LookupError

    try:
        fail(held)
    except LookupError as error:
        return error
    return AssertionError()


def generator(held: object) -> Any:
    """Return a suspended generator that holds something."""

    def held_in_frame() -> Any:
        mine = held
        yield
        yield mine

    suspended = held_in_frame()
    next(suspended)
    return suspended


DERIVED: list[Callable[[Any], Any]] = [
    lambda a: a.view(),
    lambda a: a[3:],
    lambda a: a[::-2],
    lambda a: a.reshape(2, -1).T,
    lambda a: a.reshape(4, -1)[1],
    lambda a: a.view(np.uint16),
    lambda a: a.view(np.recarray),
    memoryview,
    lambda a: memoryview(a)[4:],
    lambda a: memoryview(memoryview(a).cast("B")),
    lambda a: np.frombuffer(a, np.uint8),
    lambda a: np.asarray(memoryview(a)),
    lambda a: np.from_dlpack(a) if a.flags.writeable else a,
    lambda a: as_strided(a, (3,), (4,)),
    lambda a: sliding_window_view(a, 3),
    lambda a: np.broadcast_to(a, (2, *a.shape)),
    lambda a: a.flat,
    np.nditer,
    lambda a: a.ctypes,
    lambda a: np.ctypeslib.as_array(np.ctypeslib.as_ctypes(a)),
    lambda a: a.base,
    lambda a: getattr(a.base, "base", a.base),  # which is no array where another protocol made it
    pickle.PickleBuffer,
    copy.copy,
    lambda a: [a],
    lambda a: lambda: a,
    Cycle,
    failure,
    generator,
]


class Holding(RuleBasedStateMachine):
    """Takes arrays, makes other things of them, drops what it likes, and looks whether all it sees stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(MOST_IDLE)
        self.fills = 0
        self.held: list[tuple[np.ndarray, Any, bytes]] = []  # what sees the memory; what holds it; what is to be seen
        self.saved: list[Any] = []

    @rule(nbytes=st.sampled_from(SIZES), dtype=st.sampled_from(["f4", "u1", "c8"]))
    def take(self, nbytes: int, dtype: str) -> None:
        array = self.pool.empty((nbytes // np.dtype(dtype).itemsize,), np.dtype(dtype))
        self.fills += 1
        array.view(np.uint8)[...] = self.fills % 251 + 1
        self.hold(array, array)

    def hold(self, array: np.ndarray, holder: Any) -> None:
        place = {"data": (array.ctypes.data, False), "shape": (array.nbytes,), "typestr": "|u1", "version": 3}
        look = np.asarray(type("Look", (), {"__array_interface__": place})())
        self.held.append((look, holder, look.tobytes()))

    @precondition(lambda self: any(type(holder) is np.ndarray for _, holder, _ in self.held))
    @rule(data=st.data(), which=st.integers(0, len(DERIVED) - 1))
    def make_something_else_of_it(self, data: st.DataObject, which: int) -> None:
        derive = DERIVED[which]
        places = [i for i, (_, holder, _) in enumerate(self.held) if type(holder) is np.ndarray and holder.ndim == 1]
        if not places:
            return
        look, array, wanted = self.held.pop(data.draw(st.sampled_from(places)))
        if derive is copy.copy:  # holds nothing of it
            return
        if array.dtype != np.float32 or not array.flags.c_contiguous or array.size < 16 or array.size % 4:
            derive = memoryview
        self.held.append((look, derive(array), wanted))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop_in_another_thread(self, data: st.DataObject) -> None:
        dropped = [self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))]
        thread = threading.Thread(target=dropped.clear)
        thread.start()
        thread.join()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave_it_to_one_that_rises_again(self, data: st.DataObject) -> None:
        look, holder, wanted = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if type(holder) in (GeneratorType, pool._Lease):  # which the collector ends, as no array holds them
            return
        Lazarus((look, holder, wanted), self.saved)
        del holder
        gc.collect(1)
        self.held.append(self.saved.pop())

    @invariant()
    def all_that_is_held_is_as_it_was(self) -> None:
        for look, _, wanted in self.held:
            assert look.tobytes() == wanted

    @invariant()
    def little_lies_idle(self) -> None:
        assert self.pool.idle_bytes <= MOST_IDLE

    def teardown(self) -> None:
        self.held.clear()
        gc.collect()
        assert not [lease for lease in gc.get_objects() if type(lease) is pool._Lease and lease._pool is self.pool]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POOLED_FROM", LEAST)
    monkeypatch.setattr(pool, "results", Pool())


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=8, stateful_step_count=30, deadline=None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the size of each block that is made."""
    sizes: list[int] = []
    plain = pool._Block

    def make(nbytes: int, kind: int) -> Any:
        sizes.append(nbytes)
        return plain(nbytes, kind)

    monkeypatch.setattr(pool, "_Block", make)
    return sizes


def test_ten_thousand_steps_make_a_few_blocks(made: list[int]) -> None:
    """The results of three steps are held, as by a program that compares them."""
    buffers = [np.full(MIB // 4, index, np.float32) for index in (1, 2)]
    kept: deque[np.ndarray] = deque(maxlen=3)
    for _ in range(10_000):
        kept.append(reduce_alike(ReduceOp.SUM, buffers, among=True))
    assert 3 <= len(made) <= 5
    assert (kept[0] == 3).all()
    assert pool.results.idle_bytes <= 2 * MIB
    kept.clear()
    assert pool.results.idle_bytes == sum(made)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["f4", "f2", "c8"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT], ids=str)
def test_large_results_of_every_kind_lie_in_blocks(op: ReduceOp, dtype: str, count: int, made: list[int]) -> None:
    buffers = [np.ones((800, 800), dtype)] * count
    before = reduce(op, buffers).tobytes()
    assert made
    made.clear()
    result = reduce(op, buffers)
    assert not made
    assert result.tobytes() == before
    assert result.flags.aligned
    assert result.ctypes.data % pool.ALIGNMENT == 0


def test_sum_of_two_that_comes_alone_leaves_the_pool_to_larger_ones(made: list[int]) -> None:
    for nbytes, blocks in ((policy.PLAIN_BELOW - 4, 0), (policy.PLAIN_BELOW, 1)):
        reduce(ReduceOp.SUM, [np.ones(nbytes // 4, SINGLE)] * 2)
        assert len(made) == blocks


def test_kernels_write_into_blocks(made: list[int]) -> None:
    warm([KernelSpec(ReduceOp.MEAN, SINGLE, 3)])
    buffers = [np.full((50, 50), index, SINGLE, order="F") for index in (1, 2, 3)]
    assert (reduce(ReduceOp.MEAN, buffers) == 2).all()
    assert made == [10_240]
    assert reduce(ReduceOp.MEAN, buffers).flags.f_contiguous
    assert made == [10_240]


def test_lease_that_the_collector_has_ended_shows_its_block_to_nobody() -> None:
    blocks = Pool()
    saved: list[Any] = []
    Lazarus(blocks.empty((LEAST,), np.dtype(np.uint8)).base.base, saved)  # type: ignore[union-attr]
    gc.collect()
    (lease,) = saved
    assert blocks.idle_bytes == LEAST
    assert not hasattr(lease, "__array_interface__")
    del lease
    saved.clear()
    assert blocks.idle_bytes == LEAST


@given(nbytes=st.integers(1, 1 << 24))
def test_block_wastes_no_more_than_an_eighth(nbytes: int) -> None:
    blocks = Pool()
    array = blocks.empty((max(nbytes, LEAST),), np.dtype(np.uint8))
    del array
    assert 0.875 * blocks.idle_bytes <= max(nbytes, LEAST) <= blocks.idle_bytes


def test_many_results_of_one_size_lie_in_blocks_earlier(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POOLED_AMONG_FROM", LEAST // 4)
    buffers = [np.ones(LEAST // 8, SINGLE), np.arange(LEAST // 8, dtype=SINGLE)]
    kept: list[np.ndarray] = []
    for count in (3, 3, 2, 2):
        kept = [reduce_alike(ReduceOp.SUM, (buffers * 2)[:count], among=True) for _ in range(5)]
    assert len(made) == 10  # those of one step, while those of the one before are held
    assert (kept[0] == 1 + buffers[1]).all()
    assert reduce_alike(ReduceOp.SUM, buffers).flags.owndata


def test_longest_idle_goes_first() -> None:
    blocks = Pool(most_idle=10_000)
    arrays = [blocks.empty((nbytes,), np.dtype(np.uint8)) for nbytes in (4000, 5000, 6000)]
    for _ in range(3):
        del arrays[0]
    assert blocks.idle_bytes == 6144
    assert blocks._longest_idle().memory.nbytes == 6144  # type: ignore[union-attr]


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
    assert blocks.idle_bytes <= 8 * LEAST  # each thread drops its array when it has the next one


def test_blocks_that_come_back_while_the_pool_is_looked_through() -> None:
    """The collector may run, and end many leases, wherever the interpreter makes an object."""
    blocks = Pool()
    kind = np.dtype(np.uint8)
    before = gc.get_threshold()
    try:
        for least in range(1, 40):
            gc.set_threshold(0)
            kept = [blocks.empty((LEAST,), kind) for _ in range(5)]
            for _ in range(200):
                Cycle(blocks.empty((LEAST,), kind))
            kept.clear()
            gc.set_threshold(least, 1, 1)  # to run at another moment of what follows
            arrays = [blocks.empty((LEAST,), kind) for _ in range(50)]
            assert len({array.ctypes.data for array in arrays}) == 50
    finally:
        gc.set_threshold(*before)
