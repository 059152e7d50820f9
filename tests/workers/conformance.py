"""Cases that a communicator of any engine must pass; all workers go through each at the same time.

A case is a generator that yields requests and is resumed when each completes. Contributions follow from ranks, so that
every worker computes the expected results in plain NumPy.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from aiodist._workers.exchange import SEGMENT
from aiodist._workers.transport import Communicator, Parts, Request
from aiodist_kernels import ReduceOp

Case = Callable[[Communicator], Iterator[Request]]

SUM, _, MIN, MAX, PRODUCT = ReduceOp
FOLDS: Final = {SUM: np.add, PRODUCT: np.multiply, MIN: np.minimum, MAX: np.maximum}
DTYPES: Final = [np.dtype(name) for name in (*"bBhHiIlLefdgFD", "?")]
SPECIAL: Final = [np.inf, -np.inf, np.nan, -0.0, 0.0, 1.0, 2.0, -1.0]
SIZES: Final = [0, 7, 1000]


def contributed(rank: int, size: int, dtype: np.dtype) -> np.ndarray:
    """Return a worker's contribution: values whose sums and products are the same in every order."""
    draw = np.random.default_rng(100 * rank + size % 97)
    if dtype.kind == "b":
        return draw.random(size) < 0.5
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return draw.integers(bounds.min, bounds.max, size, dtype, endpoint=True)
    if dtype.kind == "f":
        return draw.choice(SPECIAL, size).astype(dtype)
    return (draw.integers(-3, 3, size) + 1j * draw.integers(-3, 3, size)).astype(dtype)


def reduced(op: ReduceOp, size: int, dtype: np.dtype, ranks: Sequence[int]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return functools.reduce(FOLDS[op], [contributed(rank, size, dtype) for rank in ranks])


def check(op: ReduceOp, found: np.ndarray, wanted: np.ndarray) -> None:
    """Compare values, and the signs of zeros except those of MIN and MAX, which may give either zero."""
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    if found.dtype.kind == "f" and op in (SUM, PRODUCT):
        number = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(found)[number], np.signbit(wanted)[number])


def takes(op: ReduceOp, dtype: np.dtype) -> bool:
    refused = {"c": (MIN, MAX), "b": (SUM, PRODUCT)}
    return op not in refused.get(dtype.kind, ())


def reductions_of_the_engine(c: Communicator) -> Iterator[Request]:
    """All reductions that the engine claims, in place and into another buffer."""
    for dtype in DTYPES:
        for op in FOLDS:
            for size in SIZES if takes(op, dtype) and c.reduces(op, dtype) else ():
                wanted = reduced(op, size, dtype, range(c.size))
                mine = contributed(c.rank, size, dtype)
                other = np.empty_like(mine)
                yield c.iallreduce(op, mine, other)
                np.testing.assert_array_equal(mine, contributed(c.rank, size, dtype))
                yield c.iallreduce(op, mine, mine)
                check(op, mine, wanted)
                check(op, other, wanted)


def least_of_records(c: Communicator) -> Iterator[Request]:
    """The minimum of bytes, by which many workers compare records, whatever `reduces` says."""
    values = np.array([c.rank, 255 - c.rank, 128, 127], np.uint8)
    yield c.iallreduce(MIN, values, values)
    assert values.tolist() == [0, 256 - c.size, 128, 127]


def text(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(1000 * rank + size).integers(0, 256, size, np.uint8)


def gatherings(c: Communicator) -> Iterator[Request]:
    """Parts of one size, and of several, some or all of them empty, contiguous or with gaps, which stay as they are.

    What is sent may be read-only.
    """
    for size in (0, 1, 512, 70_001):
        receive = np.empty(size * c.size, np.uint8)
        yield c.iallgather(text(c.rank, size), receive)
        np.testing.assert_array_equal(receive, np.concatenate([text(rank, size) for rank in range(c.size)]))
    last = [0] * (c.size - 1)
    for counts in ([0] * c.size, [3] * c.size, list(range(c.size)), [*last, 100_003], [1, *last]):
        behind = sum(counts) + 3 * c.size
        for places in (None, [behind - sum(counts[: rank + 1]) - 3 * rank for rank in range(c.size)]):
            send = text(c.rank, counts[c.rank])
            send.flags.writeable = False
            receive = np.full(sum(counts) if places is None else behind, 7, np.uint8)
            parts = Parts(receive, counts, places)
            wanted = receive.copy()
            for rank, (place, count) in enumerate(zip(parts.begins, counts, strict=True)):
                wanted[place : place + count] = text(rank, count)
            yield c.iallgatherv(send, parts)
            np.testing.assert_array_equal(receive, wanted)


def records(c: Communicator) -> Iterator[Request]:
    """The exchange that begins every step, repeated, with records of unequal length."""
    own, everyone = np.zeros(c.record_bytes, np.uint8), np.zeros((c.size, c.record_bytes), np.uint8)
    begin = c.exchange_init(own, everyone.reshape(-1))
    lengths = [48, c.record_bytes, 513 % c.record_bytes, 512]
    for step in range(6):
        said = [text(step + 10 * rank, lengths[(step + rank // 2) % 4]) for rank in range(c.size)]
        own[: said[c.rank].size] = said[c.rank]
        yield begin(said[c.rank].size)
        for rank, expected in enumerate(said):
            if rank != c.rank:
                np.testing.assert_array_equal(everyone[rank, : expected.size], expected)


def broadcasts(c: Communicator) -> Iterator[Request]:
    """Several sizes from each worker; what is sent may be read-only."""
    for root in range(c.size):
        for size in (0, 1, 513, SEGMENT):
            buffer = text(c.rank, size)
            buffer.flags.writeable = c.rank != root
            yield c.ibcast(buffer, root)
            np.testing.assert_array_equal(buffer, text(root, size))


def exchanges(c: Communicator) -> Iterator[Request]:
    """Parts of several sizes, some or all of them empty, contiguous and with gaps."""

    def part(source: int, target: int, unit: int) -> np.ndarray:
        return text(100 * source + target, unit * ((source + 2 * target) % 3))

    for unit in (0, 1, 5000):
        mine = [part(c.rank, target, unit) for target in range(c.size)]
        theirs = [part(source, c.rank, unit) for source in range(c.size)]
        receive = np.empty(sum(map(len, theirs)), np.uint8)
        sizes, their_sizes = list(map(len, mine)), list(map(len, theirs))
        yield c.ialltoallv(Parts(np.concatenate(mine), sizes), Parts(receive, their_sizes))
        np.testing.assert_array_equal(receive, np.concatenate(theirs))
        going = [place for _, place in zip(mine, range(3, 10_003 * c.size, 10_003), strict=False)]
        coming = [place for _, place in zip(theirs, range(5, 10_005 * c.size, 10_005), strict=False)]
        send, receive = np.full(10_003 * c.size, 7, np.uint8), np.full(10_005 * c.size, 9, np.uint8)
        wanted = receive.copy()
        for place, part_of in zip(going, mine, strict=True):
            send[place : place + len(part_of)] = part_of
        for place, part_of in zip(coming, theirs, strict=True):
            wanted[place : place + len(part_of)] = part_of
        send.flags.writeable = False
        yield c.ialltoallv(Parts(send, sizes, going), Parts(receive, their_sizes, coming))
        np.testing.assert_array_equal(receive, wanted)


def several_in_flight(c: Communicator) -> Iterator[Request]:
    """Operations of all kinds, in flight together, completed in another order."""
    total, send = np.full(5000, float(c.rank)), text(c.rank, 300)
    whole, given, exchanged = np.empty(300 * c.size, np.uint8), text(c.rank, 9), np.empty(c.size, np.uint8)
    ones = [1] * c.size
    requests = [
        c.iallreduce(SUM, total, total),
        c.iallgather(send, whole),
        c.ibcast(given, c.size - 1),
        c.ialltoallv(Parts(np.arange(c.size, dtype=np.uint8), ones), Parts(exchanged, ones)),
    ]
    yield from [*reversed(requests), *requests]  # one that is complete stays so
    assert set(total) == {sum(range(c.size))}
    np.testing.assert_array_equal(whole, np.concatenate([text(rank, 300) for rank in range(c.size)]))
    np.testing.assert_array_equal(given, text(c.size - 1, 9))
    assert set(exchanged) == {c.rank}


def duplicates_are_apart(c: Communicator) -> Iterator[Request]:
    """Operations of two communicators, which half of the workers begin in the opposite order."""
    made = [(yield from c.dup()), (yield from c.dup())]
    assert all((other.rank, other.size, other.engine) == (c.rank, c.size, c.engine) for other in made)
    values = [np.full(3, 10.0 ** (k + c.rank)) for k in (0, 8)]
    requests: dict[int, Request] = {}
    for k in (0, 1) if c.rank % 2 else (1, 0):
        requests[k] = made[k].iallreduce(SUM, values[k], values[k])
    mine = np.array([c.rank])
    yield c.iallreduce(MAX, mine, mine)
    yield requests[0]
    yield requests[1]
    assert mine[0] == c.size - 1
    for k, value in zip((0, 8), values, strict=True):
        assert set(value) == {sum(10.0 ** (k + rank) for rank in range(c.size))}
    again = yield from made[1].dup()
    yield again.ibcast(mine, 0)


def parts_of_the_workers(c: Communicator) -> Iterator[Request]:
    """Communicators of some workers, two at a time, and of all."""
    for number, members in enumerate([range(0, c.size, 2), range(1, c.size, 2), range(c.size)], 1):
        if c.rank not in members or len(members) < 2:
            continue
        part = yield from c.create_group(list(members), number)
        assert (part.rank, part.size) == (list(members).index(c.rank), len(members))
        value = np.array([1 << c.rank])
        yield part.iallreduce(SUM, value, value)
        assert value[0] == sum(1 << rank for rank in members)
        yield from records(part)  # of two workers, say


CASES: Final[list[Case]] = [
    reductions_of_the_engine, least_of_records, records, gatherings, broadcasts, exchanges,
    several_in_flight, duplicates_are_apart, parts_of_the_workers,
]  # fmt: skip


def go_through(case: Case, communicator: Communicator) -> None:
    for request in case(communicator):
        wait(request)


def wait(request: Request) -> None:
    while not request.test():
        time.sleep(100e-6)  # there may be more workers than cores


def go_through_together(case: Case, communicators: Sequence[Any]) -> None:
    """Go through a case as all workers of one process, each in turn as far as it gets."""
    walks = {rank: case(communicator) for rank, communicator in enumerate(communicators)}
    pending: dict[int, Request | None] = dict.fromkeys(walks)
    while walks:
        stuck = True
        for rank, walk in list(walks.items()):
            while rank in walks and ((request := pending[rank]) is None or request.test()):
                stuck = False
                pending[rank] = next(walk, None)
                if pending[rank] is None:
                    del walks[rank]
        assert not stuck, f"workers {sorted(walks)} wait for ever in {case.__name__}"
