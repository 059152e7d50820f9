"""Kernels on a GPU, where there is one, have the bits of the CPU. Skipped elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist._arrays import gpus
from aiodist._gpu.enqueue import Queue
from aiodist._gpu.schedule import Batch
from aiodist._gpu.steps import Job, Place
from aiodist_kernels import reduce
from tests.benchmarks.cuda_reductions import Gpu
from tests.kernels import arrays
from tests.kernels.arrays import assert_same_bits
from tests.kernels.cuda.cases import CASES, Case

pytestmark = pytest.mark.skipif(not gpus.find().gpus, reason=f"no GPU: {gpus.find().missing}")


@pytest.fixture(scope="module")
def lab() -> Gpu:
    try:
        return Gpu()
    except ImportError as error:
        pytest.skip(str(error))


def reduced(lab: Gpu, case: Case, buffers: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Reduce leaves on the first GPU, into poisoned memory for each replica; return each leaf's results."""
    keeps: list[Any] = []
    jobs = []
    result = case.rule.result
    outs = [[lab.put(np.full(leaf[0].size * result.itemsize, 0xA5, np.uint8)) for _ in leaf] for leaf in buffers]
    for leaf, own in zip(buffers, outs, strict=True):
        memory = [lab.put(values.reshape(-1)) for values in leaf]
        keeps += memory
        places = [tuple(Place(0, m.address) for m in some) for some in (memory, own)]
        jobs.append(Job(places[0], places[1], leaf[0].size, leaf[0].itemsize, result.itemsize))
    queue = Queue(lab.driver)
    schedule = queue.schedule([Batch(case.rule, jobs)])
    queue.load(schedule)
    queue.run(schedule, [lab.driver.stream(0)], keeps).wait()
    return [
        [lab.get(out, leaf[0].size * result.itemsize).view(result) for out in own]
        for own, leaf in zip(outs, buffers, strict=True)
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_cpu(lab: Gpu, case: Case) -> None:
    for count, sizes in ((2, [100_003]), (3, [5]), (4, [4097, 1, 70_000]), (8, [33]), (16, [1000]), (21, [5000, 3])):
        buffers = [arrays.buffers(leaf, count, (size,), case.dtype) for leaf, size in enumerate(sizes)]
        for results, leaf in zip(reduced(lab, case, buffers), buffers, strict=True):
            wanted = reduce(case.op, leaf, accumulate=case.accumulate)
            for got in results:
                assert_same_bits(got, wanted)
