"""Kernels on a GPU, where there is one, have the bits of the CPU. Skipped elsewhere."""

from __future__ import annotations

import pytest

from aiodist._arrays import devices
from aiodist._gpu.enqueue import Queue
from tests.benchmarks.cuda_reductions import Gpu
from tests.gpu.problem import Problem
from tests.kernels.arrays import assert_same_bits
from tests.kernels.cuda.cases import CASES, Case

pytestmark = pytest.mark.skipif(not devices.find_gpus().gpus, reason=f"no GPU: {devices.find_gpus().missing}")


@pytest.fixture(scope="module")
def lab() -> Gpu:
    try:
        return Gpu()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_cpu(lab: Gpu, case: Case) -> None:
    for count, sizes in ((2, [100_003]), (3, [5]), (4, [4097, 1, 70_000]), (8, [33]), (16, [1000]), (21, [5000, 3])):
        problem = Problem(lambda _, values: lab.put(values), case.op, case.dtype, [0] * count, sizes, case.accumulate)
        problem.run(Queue(lab.driver), [lab.driver.stream(0)]).wait()
        for out, wanted in problem.results:
            assert_same_bits(lab.get(out, wanted.nbytes).view(wanted.dtype), wanted)
