"""Prefetching: ahead but bounded, the same elements, and nothing left when the consumer is gone."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import NumpyDataset
from aiodist._data.prefetch import Prefetched
from tests.data.test_distributed import collected, lists
from tests.runtime.programs import mirrored

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 20.0


class Source:
    """Numbers that tell how far they have come, and wait before ``stop_at`` until they may leave."""

    def __init__(self, size: int, stop_at: int | None = None) -> None:
        self.size, self.stop_at = size, stop_at
        self.made = [threading.Event() for _ in range(size)]
        self.leave, self.ended = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        try:
            for k in range(self.size):
                assert k != self.stop_at or self.leave.wait(LONG)
                self.made[k].set()
                yield k
        finally:
            self.ended.set()


def await_threads_given_back() -> None:
    """Wait until no thread makes elements any more: they are renamed in the process's cache."""
    while any(thread.name.startswith("aiodist prefetch") for thread in threading.enumerate()):
        threading.Event().wait(0.001)


@given(st.integers(0, 20), st.integers(1, 8), st.integers(1, 8))
def test_elements_are_the_same_as_without(size: int, n: int, ahead: int) -> None:
    def made() -> NumpyDataset:
        return NumpyDataset(np.arange(size)).shuffle(3).batch(n).repeat(2)

    expected = [batch.tolist() for batch in made()]
    elements = iter(made().prefetch(ahead))
    assert [batch.tolist() for batch in elements] == expected
    assert next(elements, None) is None
    await_threads_given_back()


def test_thread_is_ahead_but_not_farther_than_allowed() -> None:
    source = Source(20)
    elements = Prefetched(iter(source), 3)
    assert source.made[2].wait(LONG)
    for k in range(5):
        assert next(elements) == k
        assert source.made[k + 3].wait(LONG)
        assert not source.made[k + 4].is_set()
    elements.close()


def test_dropped_iterator_ends_its_thread_and_the_source() -> None:
    source = Source(1000)
    for element in Prefetched(iter(source), 2):
        if element == 3:
            break
    gc.collect()
    assert source.ended.wait(LONG)
    assert not source.made[6].is_set()


@pytest.mark.anyio
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
async def test_error_arrives_once_and_in_its_place(asynchronous: bool, kind: type[BaseException]) -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise kind("disk")

    elements = Prefetched(broken(), 5)

    async def take() -> Any:
        return await anext(elements, "end") if asynchronous else next(elements, "end")

    assert await take() == 0
    with pytest.raises(kind, match="disk") as caught:
        await take()
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert await take() == "end"


@pytest.mark.anyio
async def test_cancelled_wait_loses_no_element() -> None:
    source = Source(3, stop_at=1)
    elements = Prefetched(iter(source), 2)
    assert await anext(elements) == 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, elements)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    source.leave.set()
    assert await collected(elements) == [1, 2]


@pytest.mark.anyio
async def test_closing_a_distributed_iterator_ends_the_thread() -> None:
    strategy = mirrored(2)
    data = strategy.experimental_make_numpy_dataset(np.arange(100)).batch(2).repeat().prefetch(2)
    iterator = aiter(strategy.experimental_distribute_dataset(data))
    assert lists(await anext(iterator)) == [[0], [1]]
    await iterator.aclose()
    await_threads_given_back()
    assert await anext(iterator, None) is None


def test_exit_does_not_wait_for_elements_that_nobody_takes() -> None:
    """The source never gives its second element, so a thread that is waited for would keep the process."""
    program = """
import threading
from aiodist._data.prefetch import Prefetched
elements = Prefetched(map(lambda k: k or threading.Event().wait(), iter([1, 0])), 2)
print(next(elements))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "1\n"
